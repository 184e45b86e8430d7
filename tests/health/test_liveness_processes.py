"""`WorkerLiveness`, the probe and the beat thread together, against real processes and real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast.core.procfs import _cgroup2_mount, read_text
from holdfast.health.liveness import LOST, Liveness
from holdfast.health.watcher import is_local, probe
from tests.rigs.health.liveness_watch import BOUND_S, Child, Watch

pytestmark = [pytest.mark.alone, pytest.mark.processes]


@pytest.fixture
def child() -> Iterator[Child]:
    with Child() as started:
        started.say("work")
        yield started


@pytest.fixture
async def watch(child: Child) -> AsyncIterator[Watch]:
    watching = Watch(child, streams_open=True)
    await watching.until(Liveness.ALIVE)
    await watching.run(lambda: watching.liveness._beat is not None and watching.liveness._beat.steps > 5)
    yield watching
    await watching.close()


async def test_a_stopped_process_is_judged_stopped_and_comes_back_on_probation(child: Child, watch: Watch) -> None:
    """SIGSTOP is known within 1.5 s; after SIGCONT the worker serves a probation and is ALIVE again."""
    child.signal(signal.SIGSTOP)
    await watch.until(Liveness.STOPPED, 1.5)
    assert "state T" in watch.liveness.reason
    assert watch.moves == 1
    child.signal(signal.SIGCONT)
    await watch.until(Liveness.PROBATION)
    assert watch.liveness.admit_max == 2
    await watch.until(Liveness.ALIVE)
    assert watch.moves == 1


async def test_an_idle_process_that_is_stopped_is_found_too() -> None:
    """With no streams anywhere a stop is known within 3 s, and idle beats before it raise no suspicion."""
    with Child() as child:
        watch = Watch(child, streams_open=False)
        await watch.until(Liveness.ALIVE)
        await watch.run(lambda: False, 2.5)
        assert [v for _, v in watch.log] == [Liveness.ALIVE]
        child.signal(signal.SIGSTOP)
        await watch.until(Liveness.STOPPED, 3)
        await watch.close()


@pytest.mark.long
async def test_work_that_comes_and_goes_raises_no_suspicion(child: Child, watch: Watch) -> None:
    """Every change between work and none is told soon enough for the shorter silence limit."""
    for index in range(12):
        watch.streams_open = index % 2 == 0
        child.say("work" if watch.streams_open else "idle")
        await watch.run(lambda: False, 0.33)
    assert [v for _, v in watch.log] == [Liveness.ALIVE]


async def test_a_killed_process_is_known_at_once(child: Child, watch: Watch) -> None:
    """SIGKILL breaks the beat connection, and the probe finds no living process."""
    child.signal(signal.SIGKILL)
    await watch.until(Liveness.STOPPED, 1.0)
    assert "gone" in watch.liveness.reason or "dead" in watch.liveness.reason


@pytest.mark.parametrize("how", ["wedge", pytest.param("spin", marks=pytest.mark.long)])
async def test_a_wedged_engine_is_judged_wedged(child: Child, watch: Watch, how: str) -> None:
    """Steps that stop, asleep or spinning, are known within 1.6 s in which neither its threads nor the test's stood in
    line for a CPU (time that must not count, and that a shared machine may add); when they move again, probation."""
    pids = child.process.pid, os.getpid()
    waited_s, began_s = _run_delay_s(*pids), time.monotonic()
    child.say(how)
    took_s = await watch.until(Liveness.WEDGED)
    assert time.monotonic() - began_s >= 0.8
    assert took_s <= 1.6 + _run_delay_s(*pids) - waited_s
    assert watch.moves == 1
    child.say("work")
    await watch.until(Liveness.PROBATION)
    await watch.until(Liveness.ALIVE)


def _run_delay_s(*pids: int) -> float:
    """How long the threads of these processes have stood in line for a CPU, all together."""
    texts = [read_text(str(file)) for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(text.split()[1]) for text in texts if text) / 1e9  # none: that thread has ended


@pytest.mark.long
async def test_a_starved_process_is_never_judged_dead() -> None:
    """Sixteen busy processes of far higher weight take its CPU for six seconds: nothing is moved."""
    with Child(nice=19) as child:
        child.say("work")
        watch = Watch(child, streams_open=True)
        await watch.until(Liveness.ALIVE)
        busy = [_busy_loop() for _ in range(16)]
        try:
            await watch.run(lambda: watch.liveness.state in LOST, 6.0)
        finally:
            for process in busy:
                process.kill()
            for process in busy:
                process.wait(BOUND_S)
        print("verdicts:", watch.log)
        assert watch.moves == 0, watch.log
        await watch.until(Liveness.ALIVE)
        await watch.close()


def _busy_loop() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=_nice)


def _nice() -> None:
    os.nice(5)  # above the starved child, below the rest of this machine


async def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    """Beats come over a path in the file system as they do over TCP."""
    with Child(f"unix://{tmp_path}/beat.sock") as child:
        watch = Watch(child, streams_open=False)
        await watch.until(Liveness.ALIVE)
        await watch.run(lambda: watch.liveness._beat is not None)
        assert watch.liveness._beat is not None
        await watch.close()


async def test_the_probe_sees_what_the_kernel_sees(child: Child, watch: Watch) -> None:
    """Identity is checked by start time, the beat thread is read, and a dead process is gone."""
    identity = watch.identity
    assert is_local(identity)
    first = probe(identity)
    assert (first.gone, first.frozen) == (False, False)
    assert first.thread_state in "SR"
    deadline = time.monotonic() + BOUND_S
    while probe(identity).switches == first.switches and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert probe(identity).switches > first.switches
    other = type(identity)(*[getattr(identity, f) for f in identity.__struct_fields__[:3]], 1, identity.beat_thread)
    assert probe(other).gone
    assert not is_local(other)
    child.process.kill()
    child.process.wait(BOUND_S)
    assert probe(identity).gone
    assert not is_local(identity)


async def test_a_frozen_cgroup_is_judged_stopped(child: Child, watch: Watch) -> None:
    """Freezing the worker's cgroup is seen as such, and thawing brings it back on probation."""
    mount = _cgroup2_mount()
    if mount is None:
        pytest.skip("no cgroup v2 tree is mounted")
    group = Path(mount) / f"holdfast-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"the cgroup v2 tree is not writable: {error}")
    try:
        (group / "cgroup.procs").write_text(str(child.process.pid))
        (group / "cgroup.freeze").write_text("1")
        await watch.until(Liveness.STOPPED)
        assert "frozen" in watch.liveness.reason
        (group / "cgroup.freeze").write_text("0")
        await watch.until(Liveness.PROBATION)
    finally:
        (group / "cgroup.freeze").write_text("0")
        child.process.kill()
        child.process.wait(BOUND_S)
        group.rmdir()
