"""A Hub id is fetched by the Hub's own library from a stand-in of the Hub, or the way to do it by hand is told."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.errors import TransientError, UserError
from holdfast.engines.torch.files import hub
from holdfast.engines.torch.files.hub import fetch_from_hub, is_hub_id
from holdfast.engines.torch.files.resolve import look_at
from holdfast.roles.model_names import named
from tests.rigs.small_model import LLAMA, quiet, weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}


class StandIn(http.server.ThreadingHTTPServer):
    """As much of huggingface.co as fetching a model asks for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.models: dict[str, dict[str, bytes]] = {}
        self.stuck = threading.Event()  # set: no file is sent any more
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(http.server.BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/[^/]+)?", path):
            self._facts(found[1], found[2] == "tree", with_body)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(found[1], found[2], with_body)
        else:
            self._refuse("no such page", with_body)

    def _facts(self, repo: str, tree: bool, with_body: bool) -> None:
        files = self.server.models.get(repo)
        if files is None:
            self._refuse("RepoNotFound", with_body)
            return
        if tree:
            listed = [{"type": "file", "path": n, "size": len(c), "oid": _sum(c)} for n, c in files.items()]
            self._send(json.dumps(listed).encode(), {"content-type": "application/json"}, with_body)
            return
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        facts = {"_id": "1", "id": repo, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False}
        facts |= {"downloads": 0, "likes": 0, "tags": []}
        self._send(json.dumps(facts).encode(), {"content-type": "application/json"}, with_body)

    def _file(self, repo: str, name: str, with_body: bool) -> None:
        content = self.server.models.get(repo, {}).get(name)
        if content is None:
            self._refuse("EntryNotFound" if repo in self.server.models else "RepoNotFound", with_body)
            return
        if with_body and self.server.stuck.is_set() and name.endswith(".safetensors"):
            threading.Event().wait(600)
        self._send(content, {"ETag": f'"{_sum(content)}"', "X-Repo-Commit": COMMIT}, with_body)

    def _refuse(self, code: str, with_body: bool) -> None:
        self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, with_body, 404)

    def _send(self, body: bytes, headers: dict[str, str], with_body: bool, status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a test's output is the test's."""


def _sum(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    made = StandIn()
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield made
    made.shutdown()
    made.server_close()


def test_a_hub_id_is_fetched_once(stand_in: StandIn) -> None:
    """What a model's directory needs, and no second copy of the weights; the next time nothing is fetched."""
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b'{"model": {}}',
        "model.safetensors": weights(CONFIG),
        "consolidated.safetensors": b"the same again",
        "original/params.json": b"{}",
        "README.md": b"hello",
    }
    stand_in.models["org/small"] = files
    told: list[tuple[str, int, int | None]] = []
    path = fetch_from_hub("org/small", lambda *step: told.append(step))
    there = {file.name for file in path.rglob("*") if file.is_file()}
    assert there == {"config.json", "tokenizer.json", "model.safetensors"}
    assert look_at(str(path), path, quiet).config.family == "llama"
    assert told[0] == ("fetch", 0, None)
    stand_in.asked.clear()
    assert look_at("org/small@main", path, quiet).source == str(path)
    assert not [asked for asked in stand_in.asked if asked.startswith("GET /org")]


def test_what_cannot_be_served_is_refused_before_its_weights_are_fetched(stand_in: StandIn) -> None:
    """By its config.json; a repository without one is told how to use its GGUF files."""
    gemma = json.dumps(CONFIG | {"architectures": ["GemmaForCausalLM"]}).encode()
    stand_in.models = {"org/gemma": {"config.json": gemma, "model.safetensors": bytes(9)}, "org/gguf": {"m.gguf": b"x"}}
    with pytest.raises(UserError, match="--model org/gemma: the architecture GemmaForCausalLM is not supported"):
        fetch_from_hub("org/gemma", quiet)
    assert not [asked for asked in stand_in.asked if "safetensors" in asked]
    with pytest.raises(UserError, match=r"org/gguf: it has no config.json; .*hf download org/gguf FILE\.gguf"):
        fetch_from_hub("org/gguf", quiet)
    with pytest.raises(UserError, match="org/none: there is no such path, and no such model on the Hub") as refused:
        fetch_from_hub("org/none", quiet)
    assert not isinstance(refused.value, TransientError)


@pytest.mark.long
def test_a_line_that_brings_nothing_is_given_up(stand_in: StandIn) -> None:
    """Bounded, and with the way to do it by hand; the process that waited is gone."""
    stand_in.models["org/slow"] = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": weights(CONFIG)}
    stand_in.stuck.set()
    with pytest.raises(
        TransientError, match=r"nothing came for 4 s; where there is a network: `hf download org/slow --local"
    ):
        fetch_from_hub("org/slow", quiet, silent_ticks_max=8)


def test_without_the_library_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra: who wants it is told its name, and how to do without."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = r"--model org/x@v1: there is no such path.*'holdfast-llm\[hub\]'.*`hf download org/x --revision v1 --local"
    with pytest.raises(UserError, match=words):
        hub.fetch_from_hub("org/x@v1", quiet)


def test_what_is_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names with a slash; but a path that is there is a path."""
    assert is_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert is_hub_id("org/name@refs/pr/1")
    for text in ("tiny", "random:8b", "/org/name", "./org/name", "~/name", "a/b/c", "org/", "../up"):
        assert not is_hub_id(text)
    assert named("torch", "org/name@v1", "") == ("org/name@v1", "org/name")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert named("torch", "org/name", "") == (str(tmp_path / "org" / "name"), "name")


@pytest.mark.parametrize("odd", ["~nobody-of-that-name/model", "a" * 300])
def test_a_path_that_cannot_be_is_refused_by_its_option(odd: str) -> None:
    """Nobody's home, and a name too long for any disk."""
    with pytest.raises(UserError, match="--model "):
        named("torch", odd, "")
