"""The supervisor with real, tiny processes: a shell script stands in for a worker."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.core.errors import REFUSED
from holdfast.supervise import machine
from holdfast.supervise import processes as processes_module
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Phase
from holdfast.supervise.processes import LocalProcesses, exit_words, farewell
from holdfast.supervise.records import Record, launch_path, read_record, read_records, run_dir, write_record
from holdfast.supervise.slots import Slot
from holdfast.supervise.status import look
from holdfast.testing.waiting import BOUND_S
from holdfast.wire.net import SocketNetwork
from tests.rigs.supervise.supervisors import BECOME_READY, SERVE, World, job

SERVE_STUBBORNLY = "trap : TERM; " + BECOME_READY + "while :; do sleep 0.05; done"
FAIL = "echo no such model; exit 7"


async def test_a_killed_process_is_back_at_once(world: World) -> None:
    """SIGKILL is noticed without polling: another process runs under the name."""
    supervisor = await world.up(job("a", SERVE))
    slot = supervisor.slots["a"]
    before = slot.life.pid
    os.kill(before, signal.SIGKILL)
    assert await supervisor.wait(lambda: slot.life.pid not in (0, before), BOUND_S)
    assert await supervisor.wait(supervisor.all_ready, BOUND_S)
    assert "a died (SIGKILL); starting it again" in world.told


async def test_what_is_refused_is_not_tried_again(world: World) -> None:
    """A process that says its settings cannot be is started once; `ps` shows what it said; it can be stopped."""
    tries = world.state_dir / "tries"
    supervisor = world.supervisor(job("a", f"echo x >> {tries}; echo no such model; exit {REFUSED}"))
    await supervisor.start()
    slot = supervisor.slots["a"]
    assert await supervisor.wait(lambda: slot.life.phase is Phase.REFUSED, BOUND_S), world.told
    assert not supervisor.all_ready()
    assert slot.timer is None
    assert tries.read_text() == "x\n"
    (status,) = await look(world.state_dir, SocketNetwork())
    assert (status.state, status.pid, status.note, status.retry_in_s) == ("refused", 0, "no such model", None)
    assert world.told == ["a cannot be started: no such model; it is not tried again"]
    await supervisor.stop()
    assert read_records(world.state_dir) == []


async def next_failure(supervisor: Supervisor, slot: Slot) -> None:
    """Its pause is over, and it fails again."""
    before = slot.life.failures
    slot.life = dataclasses.replace(slot.life, deadline_s=asyncio.get_running_loop().time())
    supervisor.step(slot, machine.Tick())
    assert await supervisor.wait(lambda: slot.life.failures > before, BOUND_S)


async def test_a_crash_loop_is_visible_and_heals(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ps` says that it backs off and why; after five failures how often, the last words and when the next try is; that
    one may succeed. Its pauses are over when the test says so."""
    monkeypatch.setattr(machine, "FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(machine, "PAUSE_S_MAX", 3600.0)
    mended = world.state_dir / "mended"
    supervisor = world.supervisor(job("a", f"[ -e {mended} ] || {{ {FAIL}; }}; {SERVE}"))
    await supervisor.start()
    slot = supervisor.slots["a"]
    assert await supervisor.wait(lambda: slot.life.failures == 2, BOUND_S)
    await next_failure(supervisor, slot)
    (status,) = await look(world.state_dir, SocketNetwork())
    assert (status.state, status.pid) == ("backing off", 0)
    assert status.note == "backing off 1200.0 s, exited with 7: no such model"
    await next_failure(supervisor, slot)
    await next_failure(supervisor, slot)
    assert slot.life.phase is Phase.CRASH_LOOP
    (status,) = await look(world.state_dir, SocketNetwork())
    assert (status.state, status.pid, status.failures) == ("crash loop", 0, 5)
    assert status.note == "failed 5 times in a row, exited with 7: no such model"
    assert status.retry_in_s is not None
    assert 0.0 < status.retry_in_s <= 3600.0
    mended.touch()
    slot.life = dataclasses.replace(slot.life, deadline_s=asyncio.get_running_loop().time())
    supervisor.step(slot, machine.Tick())
    assert await supervisor.wait(lambda: slot.life.phase is Phase.READY, BOUND_S)
    (status,) = await look(world.state_dir, SocketNetwork())
    assert (status.state, status.retry_in_s) == ("ready", None)


async def test_vaults_are_there_before_their_workers(world: World) -> None:
    """Store and vault are ready before a worker or frontend is started at all."""
    seen = [f'grep -q ready "$1/run/{role}.json" || exit 9; ' for role in ("store", "vault")]
    checked = "".join(seen) + SERVE
    roles = {"frontend": checked, "worker": checked, "vault": "sleep 0.3; " + SERVE, "store": SERVE}
    supervisor = await world.up(*(job(role, script, role) for role, script in roles.items()))
    assert all(slot.life.failures == 0 for slot in supervisor.slots.values()), world.told


async def test_one_that_will_not_leave_is_killed(world: World) -> None:
    """SIGTERM that is ignored is followed by SIGKILL after the bound, and nothing stays on disk."""
    supervisor = await world.up(job("a", SERVE_STUBBORNLY, stop_bound_s=0.2))
    await supervisor.stop()
    assert world.told[-2:] == ["a did not leave in time; killing it", "a stopped (SIGKILL)"]
    assert list(run_dir(world.state_dir).iterdir()) == []


async def test_a_stopped_process_can_be_stopped(world: World) -> None:
    """A process under SIGSTOP hears SIGTERM too."""
    supervisor = await world.up(job("a", SERVE, stop_bound_s=2 * BOUND_S))
    os.kill(supervisor.slots["a"].life.pid, signal.SIGSTOP)
    async with asyncio.timeout(BOUND_S):
        await supervisor.stop()
    assert world.told[-1] == "a stopped (SIGTERM)"


async def test_peers_leave_in_order(world: World) -> None:
    """Frontends leave before workers, those before their vault, and the store last."""
    roles = ("store", "vault", "worker", "frontend")
    supervisor = await world.up(*(job(role, SERVE, role) for role in roles))
    world.told.clear()
    await supervisor.stop()
    assert [line.split()[0] for line in world.told] == ["frontend", "worker", "vault", "store"]


async def test_the_next_supervisor_adopts_and_replaces(world: World) -> None:
    """Equal settings: the same pid. Other settings: another. No longer wanted: gone. Started by hand: left alone."""
    first = await world.up(job("same", SERVE), job("other", SERVE), job("surplus", SERVE))
    pids = {name: slot.life.pid for name, slot in first.slots.items()}
    by_hand = Record.of_process(os.getpid(), "mine", "worker")
    write_record(world.state_dir, by_hand)
    world.lose(first)

    second = await world.up(job("same", SERVE), job("other", "true; " + SERVE))
    assert await second.wait(lambda: second.slots["surplus"].life.phase is Phase.OVER, BOUND_S)
    assert f"mine was started by hand, pid {os.getpid()}; left alone" in world.told
    assert second.slots["same"].life.pid == pids["same"]
    assert second.slots["other"].life.pid != pids["other"]
    assert "other has other settings now; replacing it" in world.told
    assert read_record(world.state_dir, "surplus") is None


async def test_one_just_started_is_found(world: World) -> None:
    """A process has a record from the moment it exists, so a supervisor killed meanwhile leaves no stray."""
    supervisor = world.supervisor(job("a", "exec sleep 1000"))
    await supervisor.start()
    record = read_record(world.state_dir, "a")
    assert record is not None
    assert (record.pid, record.state, record.alive) == (supervisor.slots["a"].life.pid, "starting", True)
    assert launch_path(world.state_dir, "a").stat().st_mode & 0o777 == 0o600


async def test_what_cannot_be_run_backs_off(world: World) -> None:
    """A program that isn't there is a failure like any other, with its reason."""
    supervisor = world.supervisor(job("a", SERVE))
    supervisor._command = lambda _job, _path: ["/nonexistent/program"]
    await supervisor.start()
    assert await supervisor.wait(lambda: supervisor.slots["a"].life.phase is Phase.BACKING_OFF, BOUND_S)
    assert "could not be started" in supervisor.slots["a"].life.note


def test_a_reused_pid_is_not_adopted(tmp_path: Path) -> None:
    """A record whose start time is another's is not taken for the process that has its pid now."""
    ours = Record.of_process(os.getpid(), "a", "worker")
    other = Record("a", "worker", ours.pid, ours.start_ticks - 1)
    processes = LocalProcesses(tmp_path)
    assert processes.adopt(other) is None
    adopted = processes.adopt(ours)
    assert adopted is not None
    os.close(adopted.pidfd)


async def test_a_long_log_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log over the bound is moved away when its process starts again; one generation is kept."""
    monkeypatch.setattr(processes_module, "LOG_BYTES_MAX", 10)
    processes = LocalProcesses(tmp_path)
    gone = asyncio.Event()
    for line in ("the first line", "the second"):
        gone.clear()
        processes.spawn("a", [sys.executable, "-c", f"print({line!r})"]).on_exit(lambda _status: gone.set())
        async with asyncio.timeout(BOUND_S):
            await gone.wait()
    assert processes.last_line("a") == "the second"
    assert (tmp_path / "a.log.1").read_text() == "the first line\n"


def test_exits_in_words() -> None:
    """How a process ended is said as people say it."""
    assert exit_words(-9, "x") == "SIGKILL"
    assert exit_words(0, "bye") == "exited with 0"
    assert exit_words(3, "oh no") == "exited with 3: oh no"
    assert exit_words(None, "") == "ended"


def test_the_reason_is_a_processs_own() -> None:
    """Whatever its libraries and helpers still write after it: a warning is not why it ended."""
    gone = "2026-01-02 03:04:05,678 worker-1a CRITICAL rank process 7 is gone: exiting at once"
    noise = ["tracker.py:254: UserWarning: 1 leaked object", "  warnings.warn("]
    assert exit_words(1, farewell([gone, *noise])) == "exited with 1: rank process 7 is gone: exiting at once"
    assert farewell(["x", "holdfast worker: no memory", *noise]) == "holdfast worker: no memory"
    assert farewell([gone, "a later life's", *noise, "KeyError: 3"]) == "KeyError: 3"
    assert farewell([]) == ""


def test_a_broken_record_is_no_record(tmp_path: Path) -> None:
    """Half a file, or something else under the name, is not taken for a process."""
    run_dir(tmp_path).mkdir()
    (run_dir(tmp_path) / "a.json").write_text('{"name": "a"')
    assert read_records(tmp_path) == []
