"""Faults commanded over the chaos socket, with a real process for those that end or freeze one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import Code, HoldfastError
from holdfast.engines.sim.chaos_server import LINE_BYTES_MAX, ChaosServer, send_fault
from holdfast.engines.sim.faults import FIELDS, Fault, Faults, parse_fault, parse_switch

BOUND_S = 60.0

PROCESS = """
import asyncio, random, sys
if sys.argv[2] == "uvloop":
    import uvloop
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
from holdfast.engines.sim.chaos_server import ChaosServer
from holdfast.engines.sim.engine import SimEngine
from holdfast.spec.engines import SimSettings

async def main():
    engine = SimEngine(SimSettings(), random.Random(0))
    await engine.load(None)  # it says nothing
    server = ChaosServer(sys.argv[1], engine.inject, engine.faults)
    await server.start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Target:
    """Stands where the engine is: keeps what it was told."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.injected: list[Fault] = []

    def inject(self, fault: Fault) -> None:
        if fault.kind == "reset":
            raise HoldfastError(Code.INVALID_REQUEST, "fault reset: no hook")
        self.injected.append(fault)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[str, Target]]:
    target = Target()
    path = str(tmp_path / "chaos.sock")
    server = ChaosServer(path, target.inject, target.faults)
    await server.start()
    yield path, target
    await server.close()
    with pytest.raises(FileNotFoundError):
        await asyncio.to_thread(send_fault, path, {"fault": "clear"})


@pytest.fixture(params=["asyncio", "uvloop"])
def process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    path = str(tmp_path / "chaos.sock")
    command = [sys.executable, "-c", PROCESS, path, request.param]
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield path, child
        child.kill()


async def test_commands_are_answered_and_carried_out(served: tuple[str, Target]) -> None:
    """A good command answers ok with what is active; the socket is its owner's only."""
    path, target = served
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    answer = await asyncio.to_thread(send_fault, path, {"fault": "slow", "factor": 20})
    assert answer["ok"] is True
    assert answer["fault"] == "slow"
    assert answer["pid"] == os.getpid()
    assert "slow_factor" in answer["active"]
    assert target.injected == [Fault("slow", 20)]
    refused = await asyncio.to_thread(send_fault, path, {"fault": "reset"})
    assert refused == {"ok": False, "error": "fault reset: no hook"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ({}, ["fault", "crash"]),
        ({"fault": "melt"}, ["fault", "melt", "wedge"]),
        ({"fault": ["wedge"]}, ["fault", "wedge"]),
        ({"fault": "slow"}, ["factor", "1.0 to 10000.0"]),
        ({"fault": "slow", "factor": 0.5}, ["factor", "0.5"]),
        ({"fault": "slow", "factor": True}, ["factor", "True"]),
        ({"fault": "slow", "factor": float("nan")}, ["factor", "nan"]),
        ({"fault": "slow", "factor": 10**400}, ["factor"]),
        ({"fault": "slow", "factor": "20"}, ["factor", "'20'"]),
        ({"fault": "error_after", "tokens": 2.5}, ["tokens", "whole"]),
        ({"fault": "wedge", "factor": 3}, ["wedge", "factor"]),
        ({"fault": "slow", "factor": 3, "by": 1}, ["slow", "by"]),
    ],
)
def test_refusals_name_field_and_allowed(command: dict[str, Any], words: list[str]) -> None:
    """A wrong command is refused with the field and what it may be."""
    with pytest.raises(ValueError) as caught:
        parse_fault(command)
    assert all(word in str(caught.value) for word in words)


def test_every_fault_parses_with_its_least_and_greatest_value() -> None:
    """The table of faults is what the parser takes."""
    for kind, field in FIELDS.items():
        for value in field[1:] if field else (0,):
            command = {"fault": kind, field[0]: value} if field else {"fault": kind}
            assert parse_fault(command) == Fault(kind, value)


async def test_garbage_changes_nothing(served: tuple[str, Target]) -> None:
    """Lines that are not JSON, not objects or nested too deep are refused on the same connection; too long ends it."""
    path, target = served
    reader, writer = await asyncio.open_unix_connection(path)
    async with asyncio.timeout(BOUND_S):
        for line in (b"{", b"[1]", b"\xff\xfe", b"[" * 3000, b'{"fault": "slow", "factor": 1e999}', b""):
            writer.write(line + b"\n")
            assert json.loads(await reader.readline())["ok"] is False
        writer.write(b"x" * (2 * LINE_BYTES_MAX))
        assert str(LINE_BYTES_MAX) in json.loads(await reader.readline())["error"]
        assert await reader.read() == b""
    writer.close()
    assert target.injected == []


async def test_stale_socket_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    """A socket left by a killed process is taken over; a plain file at the path is left alone."""
    path = tmp_path / "chaos.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = ChaosServer(str(path), Target().inject, Faults())
    await server.start()
    assert (await asyncio.to_thread(send_fault, str(path), {"fault": "clear"}))["ok"] is True
    await server.close()
    path.write_text("mine")
    with pytest.raises(OSError):
        await ChaosServer(str(path), Target().inject, Faults()).start()
    assert path.read_text() == "mine"


@pytest.mark.processes
def test_crash_is_answered_and_kills(process: tuple[str, subprocess.Popen[str]]) -> None:
    """The answer to a crash arrives, and the process is dead of SIGKILL."""
    path, child = process
    answer = send_fault(path, {"fault": "crash"})
    assert (answer["ok"], answer["pid"]) == (True, child.pid)
    assert child.wait(BOUND_S) == -signal.SIGKILL


@pytest.mark.processes
def test_stop_is_answered_and_freezes(process: tuple[str, subprocess.Popen[str]]) -> None:
    """The answer to a stop arrives, the process is stopped, and after SIGCONT it serves again."""
    path, child = process
    assert send_fault(path, {"fault": "stop"})["ok"] is True
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    with pytest.raises(TimeoutError):
        send_fault(path, {"fault": "clear"}, timeout_s=0.2)
    os.kill(child.pid, signal.SIGCONT)
    assert send_fault(path, {"fault": "clear"}, timeout_s=BOUND_S)["ok"] is True


def test_an_engine_may_start_with_a_fault() -> None:
    """A switch by its name, with its value if it has one; others, and what has none, are refused by all there are."""
    assert Faults.with_one("") == Faults()
    assert Faults.with_one("wrong_tokens").wrong_tokens
    assert Faults.with_one("error_every:3").error_every == 3
    assert parse_switch("slow:2.5") == Fault("slow", 2.5)
    for text in ("crash", "error_every", "wrong_tokens:1", "wake_fails", "error_every:x", "error_every:0", "nothing"):
        with pytest.raises(ValueError, match=r"fault must be one of|invalid literal|error_every needs"):
            parse_switch(text)
