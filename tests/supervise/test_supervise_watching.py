"""Who is watched is killed for what it says or what the kernel says, and never for silence alone. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.procfs import read_process
from holdfast.spec.jobs import Job
from holdfast.spec.launch import Probes
from holdfast.supervise import machine
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Answer, Phase
from holdfast.supervise.processes import LocalProcess
from holdfast.supervise.slots import Slot
from holdfast.supervise.status import look
from holdfast.testing.waiting import BOUND_S, until
from holdfast.wire.net import SocketNetwork
from tests.rigs.supervise.supervisors import World

pytestmark = pytest.mark.alone

CHILD = Path(__file__).parents[1] / "rigs" / "supervise" / "fake_child.py"
QUICK = Probes(period_s=0.1, failure_threshold=3, startup_s=BOUND_S, timeout_s=0.3)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="hfw-", dir="/tmp") as folder:
        child = [sys.executable, str(CHILD)]
        made = World(Path(folder), lambda job, settings, state_dir: [*child, str(settings), str(state_dir), job.name])
        yield made
        await made.close()


def fake(world: World, probes: Probes | None = QUICK, beats: bool = True, **sick: Any) -> Job:
    """A job named "a", as sick in its first life as is said."""
    path = f"{world.state_dir}/a.beat"
    settings = json.dumps(sick | ({"beat": path} if beats else {})).encode()
    return Job("a", "worker", settings, 5.0, probes=probes, beat_address=f"unix://{path}" if beats else "")


async def heard(world: World) -> None:
    """Every worker's beats are heard."""
    heard = [watch.beats for watch in world.watching.watched.values() if watch.beats is not None]
    await until(lambda: all(beats.liveness.routable for beats in heard), "beats")


async def replaced(supervisor: Supervisor, slot: Slot, before: int, bound_s: float = BOUND_S) -> None:
    assert await supervisor.wait(lambda: slot.life.phase is Phase.READY and slot.life.pid != before, bound_s), (
        f"{slot!r}"
    )


async def second_life(world: World, supervisor: Supervisor, slot: Slot) -> None:
    """The first one was killed, and the one after it is ready: the first may count as ready until its end is seen."""
    lives = world.state_dir / "a.lives"
    again = await supervisor.wait(lambda: slot.life.phase is Phase.READY and lives.stat().st_size > 1, BOUND_S)
    assert again, f"{slot!r}"
    assert lives.stat().st_size == 2


async def test_a_stopped_one_is_killed_and_replaced(world: World) -> None:
    """SIGSTOP: killed (within 2.5 s: idle beats come every second), told as stopped, and another is ready after."""
    supervisor = await world.up(fake(world), watched=True)
    await heard(world)
    slot = supervisor.slots["a"]
    before, loop = slot.life.pid, asyncio.get_running_loop()
    began_s = loop.time()
    os.kill(before, signal.SIGSTOP)
    assert await supervisor.wait(lambda: slot.life.pid != before, BOUND_S)
    print(f"killed after {loop.time() - began_s:.2f} s")
    await replaced(supervisor, slot, before)
    assert any(f"a is stopped: its process is stopped (state T); killing pid {before}" in line for line in world.told)


async def test_a_wedged_one_is_killed_and_replaced(world: World) -> None:
    """Work, beats and no steps: killed, and the next is well."""
    supervisor = await world.start(fake(world, running=3), watched=True)
    slot = supervisor.slots["a"]
    await until(lambda: any("a is wedged: no step for" in line for line in world.told), "the verdict")
    await second_life(world, supervisor, slot)


async def test_one_adopted_while_stopped_is_killed_too(world: World) -> None:
    """A process that never welcomed the supervisor is judged by the kernel's word alone, for long enough."""
    first = await world.up(fake(world), watched=True)
    slot = first.slots["a"]
    before = slot.life.pid
    world.lose(first)
    os.kill(before, signal.SIGSTOP)

    second = await world.start(fake(world), watched=True)
    assert second.slots["a"].life.pid == before
    # Our own test process is its parent still: reap it, as the first supervisor would have been reaped by init.
    await until(lambda: slot.process.child.poll() is not None, "its end")  # type: ignore[union-attr]
    await replaced(second, second.slots["a"], before)
    assert any("a is stopped: its process is stopped" in line for line in world.told)


async def test_a_sick_one_is_killed_after_three_refusals(world: World) -> None:
    """/live with 503 three times: killed and replaced; the next says 200 and stays."""
    supervisor = await world.start(fake(world, live=503, beats=False), watched=True)
    slot = supervisor.slots["a"]
    await until(lambda: any("says that it cannot live" in line for line in world.told), "the verdict")
    assert "/live refused 3 times in a row" in "".join(world.told)
    await second_life(world, supervisor, slot)
    pid = slot.life.pid
    await until(lambda: slot.asked.ready is Answer.YES, "an answer of the new one")
    assert slot.life.pid == pid
    assert (world.state_dir / "a.lives").stat().st_size == 2


@pytest.mark.parametrize("sick", [{"http": "silent"}, {"health": 503}], ids=["silent", "not ready"])
async def test_silence_and_unreadiness_kill_nobody(world: World, sick: dict[str, Any]) -> None:
    """A port that does not answer, or /health with 503, many times over: shown, and the process lives."""
    supervisor = await world.up(fake(world, **sick, probes=replace(QUICK, period_s=0.05, timeout_s=0.05)), watched=True)
    slot = supervisor.slots["a"]
    before, asked = slot.life.pid, 0
    expected = Answer.SILENCE if "http" in sick else Answer.NO
    while asked < 10:  # three would be enough for a refusal
        slot.asked = dataclasses.replace(slot.asked, ready=Answer.YES)
        await until(lambda: slot.asked.ready is expected, "an answer")
        asked += 1
    assert (slot.life.pid, slot.life.phase, slot.asked.refusals) == (before, Phase.READY, 0)


async def test_one_that_is_never_ready_is_killed_and_backs_off(world: World) -> None:
    """The startup bound: killed when it has passed, and started again."""
    quick = replace(QUICK, startup_s=0.5)
    supervisor = await world.start(fake(world, ready=False, beats=False, probes=quick), watched=True)
    await until(lambda: any("was not ready within 0.5 s; killing pid" in line for line in world.told), "the bound")
    assert await supervisor.wait(lambda: supervisor.slots["a"].life.failures >= 1, BOUND_S)
    assert any("died (killed: it was not ready within 0.5 s); starting it again" in line for line in world.told)


@pytest.mark.parametrize("where", ["group", "session"])
async def test_a_rank_does_not_outlive_its_engine(world: World, where: str) -> None:
    """Kill the parent alone: what it had started in its session is killed at once, in its group or beside it."""
    supervisor = await world.up(fake(world, rank=where, beats=False), watched=True)
    rank = int((world.state_dir / "a.rank").read_text())
    slot = supervisor.slots["a"]
    before = slot.life.pid
    assert os.getpgid(rank) == (before if where == "group" else rank)
    pidfd = os.pidfd_open(rank)
    os.kill(before, signal.SIGKILL)
    try:
        await until(lambda: _is_over(rank), "the rank's end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
    await replaced(supervisor, slot, before)


def _is_over(pid: int) -> bool:
    stat = read_process(pid)
    return stat is None or stat.state in "ZX"


async def test_one_that_does_not_end_is_shown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL that has no effect in time: `ps` says that failover is impossible here, until the process ends."""
    monkeypatch.setattr(machine, "KERNEL_S", 0.2)
    supervisor = await world.up(fake(world, beats=False), watched=True)
    slot = supervisor.slots["a"]
    pid = slot.life.pid
    # A kernel that does not let go of a process cannot be had in a test; a SIGKILL that is not sent looks the same.
    monkeypatch.setattr(LocalProcess, "kill", lambda _self: None)
    supervisor.condemn(slot, pid, "is stopped: so it is said")
    assert await supervisor.wait(lambda: slot.life.phase is Phase.UNKILLABLE, BOUND_S)
    (status,) = await look(world.state_dir, SocketNetwork())
    assert (status.state, status.pid) == ("unkillable", pid)
    assert status.note.startswith(f"failover impossible here: pid {pid} does not end after SIGKILL (state ")
    monkeypatch.undo()
    os.kill(pid, signal.SIGKILL)
    await replaced(supervisor, slot, pid)
    (status,) = await look(world.state_dir, SocketNetwork())
    assert status.state == "ready"


async def test_a_starved_supervisor_kills_nobody(world: World) -> None:
    """What a worker missed while the supervisor itself stood still is not held against it, even a stop."""
    supervisor = await world.up(fake(world), watched=True)
    await heard(world)
    before = supervisor.slots["a"].life.pid
    os.kill(before, signal.SIGSTOP)
    time.sleep(1.6)  # noqa: ASYNC251 - this loop gets no CPU meanwhile
    # It is still stopped when the loop runs again: whoever trusted the clock would now look, and kill it.
    await asyncio.sleep(0.15)
    os.kill(before, signal.SIGCONT)
    await heard(world)
    assert supervisor.slots["a"].life.pid == before
    assert not any("killing" in line for line in world.told)
