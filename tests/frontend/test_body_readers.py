"""The process that reads large bodies may die, be stopped or hang: its frontend replaces it, and no answer is lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.core.procfs import read_text
from holdfast.frontend import large_bodies
from holdfast.frontend.api.errors import ApiError
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port
from tests.rigs.frontend.raw_http import WAIT_S, Raw, ask, completion, one_more_frontend, padded

COMPLETIONS = "/v1/completions"


def children(pid: int) -> list[int]:
    texts = [read_text(f"{task}/children") for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for text in texts for child in (text or "").split()]  # none: that thread has ended


def readers(pid: int) -> list[int]:
    return [child for child in children(pid) if b"body_reader" in command_line(child)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it ended while we looked


@pytest.fixture
def other(deployment: Deployment) -> Iterator[int]:
    """The port of one more frontend, which may be killed."""
    with one_more_frontend(deployment, "other", free_port(), {}) as port:
        assert ask(port, COMPLETIONS, padded(completion("hi", max_tokens=1))).status == 200
        yield port


def test_a_reader_ends_with_its_frontend(deployment: Deployment, other: int) -> None:
    """However the frontend ended."""
    (reader,) = readers(deployment.pid("other"))
    deployment.kill("other")
    deployment.wait_until(lambda: not Path(f"/proc/{reader}").exists(), "the reader to end")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_reader_costs_no_answer(deployment: Deployment, other: int, sent: signal.Signals) -> None:
    """Killed or stopped, the next body is read by another one; the loss is in the log and on the metrics page."""
    pid = deployment.pid("other")
    (reader,) = readers(pid)
    os.kill(reader, sent)
    assert ask(other, COMPLETIONS, padded(completion("hi", max_tokens=1))).status == 200
    assert reader not in readers(pid)
    cause = "died" if sent is signal.SIGKILL else "stopped"
    with Raw(other) as raw:
        page = raw.get("/metrics").reply().body.decode()
    assert re.search(rf'^holdfast_body_readers_lost_total{{.*cause="{cause}".*}} 1\.0$', page, re.MULTILINE)
    assert f"lost the reader of large bodies ({cause})" in deployment.log("other")


@pytest.fixture
def first_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a line of shell in the place of the first reader; those after it are real."""

    def put(line: str) -> None:
        script = tmp_path / "python"
        first = f"if mkdir {tmp_path}/first 2>/dev/null; then {line}; fi"
        script.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setattr(large_bodies.sys, "executable", str(script))

    return put


@pytest.mark.parametrize(
    ("line", "cause"),
    [("head -c 8 >/dev/null; exit 1", "died"), ("kill -STOP $$", "stopped"), ("exec sleep 1000", "stuck")],
)
async def test_a_reader_that_will_not_answer_is_replaced(
    first_reader: Callable[[str], None], line: str, cause: str
) -> None:
    """Whatever became of it, its body is read by another one."""
    first_reader(line)
    lost: list[str] = []
    large = large_bodies.LargeBodies(10**6, lost.append)
    body = json.dumps(padded(completion("hi"))).encode()
    assert (await large.parse("completions", body, {})).prompts == ["hi"]
    assert lost == [cause]
    await large.close()


async def test_a_client_that_leaves_takes_its_reader_along(first_reader: Callable[[str], None]) -> None:
    """The answer would be taken for the next one's; that is no loss to be told, and the next body is read."""
    first_reader("exec sleep 1000")
    lost: list[str] = []
    large = large_bodies.LargeBodies(10**6, lost.append)
    body = json.dumps(padded(completion("hi"))).encode()
    asked = asyncio.create_task(large.parse("completions", body, {}))
    async with asyncio.timeout(WAIT_S):
        while large._reader is None:
            await asyncio.sleep(0.01)
    reader = large._reader.pid
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert not command_line(reader)
    assert (await large.parse("completions", body, {})).prompts == ["hi"]
    assert lost == []
    await large.close()


async def test_a_body_under_which_every_reader_dies_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second try, with a hint to come back."""
    monkeypatch.setattr(large_bodies.sys, "executable", "/bin/false")
    large = large_bodies.LargeBodies(10**6, lambda cause: None)
    with pytest.raises(ApiError) as refused:
        await large.parse("completions", b"{}", {})
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "reader_failed", 1.0)
