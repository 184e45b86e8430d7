"""What no second try mends is refused once, in one line, before anything is started and before torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.errors import REFUSED
from holdfast.engines.torch.files.directory import INDEX, SINGLE
from holdfast.spec import engines
from holdfast.spec.engines import TorchSettings
from holdfast.spec.launch import WorkerLaunch
from tests.rigs.cli.up_rig import UpRig
from tests.rigs.small_model import LLAMA, header, weights

ROOT = Path(__file__).parents[2]


class Refusing:
    """A place where loading torch leaves a trace, and does not work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rig = UpRig("--model", "tiny")
        self.trace = folder / "torch-was-loaded"
        (folder / "torch").mkdir()
        (folder / "torch" / "version.py").write_text("cuda = None\n")
        code = f"open({str(self.trace)!r}, 'w').close()\nraise ImportError('not here')\n"
        (folder / "torch" / "__init__.py").write_text(code)
        self.rig.env["PYTHONPATH"] = str(folder)

    def model(self, name: str, config: dict[str, Any] | None, **files: bytes) -> str:
        path = self.folder / name
        path.mkdir()
        if config is not None:
            (path / "config.json").write_text(json.dumps(config))
        for name, content in files.items():
            (path / name.replace("__", ".")).write_bytes(content)
        return str(path)

    def must_refuse(self, command: list[str], *words: str) -> None:
        """In one line with these words, and with the status that says not to try again."""
        done = subprocess.run(command, env=self.rig.env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (REFUSED, 1), done.stderr
        assert all(word in done.stderr for word in words), done.stderr
        assert not self.trace.exists(), "torch was loaded"


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[Refusing]:
    made = Refusing(tmp_path)
    yield made
    made.rig.close()


TOKENIZER = b'{"model": {}}'
FP8 = {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}


def weighing(data: bytes) -> dict[str, bytes]:
    return {"tokenizer__json": TOKENIZER, SINGLE.replace(".", "__"): data}


MODELS: dict[str, tuple[dict[str, Any] | None, dict[str, bytes], str]] = {
    "not a model": (None, {}, "has no config.json"),
    "not JSON": (None, {"config__json": b"{"}, "is not JSON"),
    "an architecture": (LLAMA | {"architectures": ["GemmaForCausalLM"]}, {}, "GemmaForCausalLM is not supported"),
    "a quantisation": (LLAMA | {"quantization_config": {"quant_method": "awq"}}, {}, "awq quantisation"),
    "no tokenizer": (LLAMA, {SINGLE.replace(".", "__"): header()}, "has no tokenizer.json"),
    "another's tokenizer": (LLAMA, {"tokenizer__json": b"{}"}, "tokenizer.json has no model"),
    "no weights": (LLAMA, {"tokenizer__json": TOKENIZER}, f"neither {SINGLE} nor {INDEX}"),
    "weights cut short": (LLAMA, weighing(header()[:5]), "cut short in its header"),
    "weights of another kind": (LLAMA, weighing(header(x=FP8)), "F8_E4M3, which is not supported"),
    "tensors missing": (LLAMA, weighing(header()), "lacks the tensors model.embed_tokens.weight"),
}


LOOK = """
import json, sys
from pathlib import Path
from holdfast.roles.examining import Asked, examine
from holdfast.spec.engines import TorchSettings
from holdfast.core.errors import UserError
for source in sys.argv[1:]:
    try:
        examine(Asked(source, "", TorchSettings(), True, 1), print)
    except UserError as error:
        print(error)
print("torch" in sys.modules)
"""


def test_config_and_headers_decide_before_torch_is_loaded(refusing: Refusing) -> None:
    """Every model that cannot be served is named by one look at its small files."""
    paths = [refusing.model(what, config, **files) for what, (config, files, _) in MODELS.items()]
    command = [sys.executable, "-c", LOOK, *paths]
    done = subprocess.run(command, env=refusing.rig.env, capture_output=True, text=True, timeout=60, check=True)
    *said, loaded = done.stdout.splitlines()
    assert loaded == "False"
    for line, (_, _, words) in zip(said, MODELS.values(), strict=True):
        assert words in line


WISHES = (
    (("--model", "GEMMA"), "GemmaForCausalLM is not supported"),
    (("--model", "WORDLESS"), "the model's tokenizer.json cannot be read"),
    (("--engine", "vllm", "--model", "GEMMA", "--", "--seed", "1"), "the vllm engine needs the package vllm"),
    (("--engine", "vllm", "--torch-threads", "1"), "is for --engine torch and does nothing for vllm"),
    (("--", "--enforce-eager"), "(also as words after --) is for --engine vllm and does nothing for torch"),
    (("--engine", "vlmm"), "there is no such engine; there are sim, torch, vllm"),
    (("--store", "redis://localhost:1"), "there is no such store; a store is etcd://127.0.0.1:2379"),
    (("--model", "tiny", "--ranks", "3"), "3 ranks cannot share the model's 2 KV heads evenly"),
    (("--model", "tiny", "--kv-gib", "1e9"), "--kv-gib 1e+09 does not fit into memory: host "),
    (("--model", "tiny", "--torch-threads", "100000"), "--torch-threads 100000 is too many: at most "),
    (("--model", "tiny", "--context", "5000"), "--context 5000 is beyond the 4096 tokens"),
    (("--engine", "sim", "--vault-gib", "1e5"), "--vault-gib 100000 for each of 1 workers does not fit"),
)
# Says each command of its arguments, a JSON list, in this process; prints statuses and what was said on stderr.
SAY = """
import json, os, sys
from tests.rigs.cli.in_process import said_here
done = [said_here(words, os.environ) for words in json.loads(sys.argv[1])]
print(json.dumps([(one.returncode, one.stderr) for one in done]))
"""


def test_what_cannot_be_is_refused_once(refusing: Refusing) -> None:
    """`up` says one line that names the thing; no process was started, and torch was not loaded."""
    gemma = refusing.model("gemma", LLAMA | {"architectures": ["GemmaForCausalLM"]})
    wordless = refusing.model("wordless", LLAMA, **weighing(weights(LLAMA)))
    paths = {"GEMMA": gemma, "WORDLESS": wordless}
    port = str(refusing.rig.port)
    commands = [("up", "--port", port, *(paths.get(word, word) for word in wishes)) for wishes, _ in WISHES]
    command = [sys.executable, "-c", SAY, json.dumps(commands)]
    environ = refusing.rig.env | {"PYTHONPATH": f"{refusing.folder}:{ROOT}"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    for (status, said), (wishes, words) in zip(json.loads(done.stdout), WISHES, strict=True):
        assert (status, said.count("\n"), words in said) == (REFUSED, 1, True), (wishes, said)
    assert not refusing.trace.exists(), "torch was loaded"
    assert not (refusing.rig.state_dir / "run").exists(), "something was started"


def child(refusing: Refusing, **settings: Any) -> list[str]:
    """The command of a supervised worker."""
    told = {"state_dir": str(refusing.rig.state_dir), "store": "unix:///nowhere", "deployment": "local", "name": "w"}
    launch = WorkerLaunch(**(told | settings))
    return [sys.executable, "-m", "holdfast.roles", "worker", msgspec.json.encode(launch).decode()]


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"source": "/nowhere"}, "the model /nowhere is not there"),
        ({"source": "tiny", "torch": TorchSettings(kv_gib=1e9)}, "--kv-gib 1e+09 does not fit"),
        ({"source": "tiny", "torch": TorchSettings(threads=100_000)}, "--torch-threads 100000 is too many"),
        ({"store": "redis://x"}, "there is no such store"),
    ],
)
def test_an_engine_tells_its_supervisor_not_to_try_again(
    launch: dict[str, Any], words: str, refusing: Refusing
) -> None:
    """The process itself finds it too, before torch loads, and says so by its status: 78, not 1."""
    failover = engines.FailoverSettings(vault_socket="/nowhere.sock", device="host-1")
    base = {"engine": "torch", "lock": "flock:///nowhere", "failover": failover}
    refusing.must_refuse(child(refusing, **(base | launch)), words)


@pytest.mark.parametrize("words", ["up --engine sim", "worker", "memory serve --device host-0", ""])
def test_too_few_descriptors_are_refused_once(words: str, refusing: Refusing) -> None:
    """One line says how many there may be, how many it takes and what to raise; the status says not to try again. So it
    is with a supervised process."""
    command = refusing.rig.command(*words.split()) if words else child(refusing)
    few = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *command]
    refusing.must_refuse(few, "64 descriptors here, and needs 128 at least", "ulimit")
