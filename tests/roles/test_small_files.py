"""Files named on the command line are read whole, pipes too, within bounds of time and size."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from openai import OpenAI

from holdfast.core.errors import UserError
from holdfast.discovery.card import CHAT_TEMPLATE_BYTES_MAX
from holdfast.engines.sim.vocabulary import asset
from holdfast.engines.torch.files.resolve import tiny
from holdfast.frontend.text.template import Templates
from holdfast.frontend.text.tokenizer import TextTokenizer
from holdfast.roles import small_files
from holdfast.roles.small_files import BYTES_MAX, chat_template, read_small, read_template, template_path
from holdfast.spec.launch import WorkerLaunch
from holdfast.testing.deployment import Deployment


def test_a_shells_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """Also one whose writer is slower than its reader, and one whose writer has left already."""
    (tmp_path / "f").write_bytes(b"x = 1\n")
    assert read_small(tmp_path / "f") == b"x = 1\n"
    reading, writing = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(writing, b"x" * 200_000), os.close(writing)))
    writer.start()
    assert read_small(Path(f"/proc/self/fd/{reading}")) == b"x" * 200_000
    writer.join()
    os.close(reading)
    reading, writing = os.pipe()
    os.write(writing, b"y = 2\n")
    os.close(writing)
    assert read_small(Path(f"/proc/self/fd/{reading}")) == b"y = 2\n"
    os.close(reading)


def test_what_has_no_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe without a writer, one whose writer stays, a device, a directory, too large a file: each has its reason."""
    monkeypatch.setattr(small_files, "READ_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(BYTES_MAX + 1))
    reading, writing = os.pipe()
    os.write(writing, b"x")
    late = "its writer has not finished within 0.2 s"
    for path, why in (
        (tmp_path / "pipe", late),
        (Path(f"/proc/self/fd/{reading}"), late),
        (Path("/dev/zero"), "it is larger than 1024 KiB"),
        (tmp_path / "large", "it is larger than 1024 KiB"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file or directory"),
    ):
        with pytest.raises(OSError) as caught:
            read_small(path)
        assert caught.value.strerror == why
    os.close(reading)
    os.close(writing)


# -- `--chat-template FILE`: the operator's template in place of the model's

SHOUTING = "{% for message in messages %}{{ message.content | upper }}!{% endfor %}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"", "has 0 bytes"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"x" * (CHAT_TEMPLATE_BYTES_MAX + 1), "bytes; 1 to"),
        (b"{% for message in messages %}", "does not compile"),
    ],
)
def test_a_file_that_is_no_template_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    """With the option, the file and what is wrong with it."""
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"--chat-template {path}.*{words}"):
        template_path(str(path))


def test_a_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines stand in another directory than the person who started them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text(SHOUTING)
    assert template_path("chat.jinja") == str(tmp_path / "chat.jinja")
    assert template_path("") == ""
    assert read_template(str(tmp_path / "chat.jinja")) == SHOUTING


def test_another_template_is_another_namespace() -> None:
    """Two workers that would make different prompts of a chat are never one set."""
    plain = WorkerLaunch(deployment="local")
    assert plain.namespace() != WorkerLaunch(deployment="local", chat_template="/t").namespace()


def test_a_template_that_asks_for_the_begin_of_text_gets_the_models(tmp_path: Path) -> None:
    """Like the model's own."""
    path = tmp_path / "chat.jinja"
    path.write_text("{{ bos_token }}" + SHOUTING)
    launch = WorkerLaunch(deployment="local", engine="torch", chat_template=str(path))
    made = chat_template(launch, replace(tiny(), bos_token="<s>"))
    assert made is not None
    assert Templates(datetime.now).get(made).render([{"role": "user", "content": "hi"}]) == "<s>HI!"


@pytest.mark.processes
def test_prompts_are_made_by_the_file(tmp_path: Path) -> None:
    """What the engine was asked is the chat as the template writes it."""
    (tmp_path / "chat.jinja").write_text(SHOUTING)
    with (
        Deployment(workers=1, worker={"chat_template": str(tmp_path / "chat.jinja")}) as deployment,
        OpenAI(base_url=f"http://127.0.0.1:{deployment.port}/v1", api_key="none", timeout=60) as client,
    ):
        answer = client.chat.completions.create(
            model="holdfast-sim",
            messages=[{"role": "user", "content": "the sea"}],
            max_tokens=2,
            extra_body={"return_token_ids": True},
        )
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == TextTokenizer(asset("tokenizer.json")).encode_now("THE SEA!")
