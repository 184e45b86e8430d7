"""What counts as stuck: the meter, fed by hand."""

from __future__ import annotations

import os
import threading

import pytest

from holdfast.core.procfs import ThreadTimes, read_process, read_thread
from holdfast.engines.contract import Progress
from holdfast.health.watcher import own_identity
from holdfast.worker.beat import StuckMeter

MS = 1_000_000


def progress(steps: int = 1, running: int = 1, waiting: int = 0, thread: tuple[int, int] | None = (5, 7)) -> Progress:
    return Progress(steps, running, waiting, 20.0, 0.0, thread)


def feed(*samples: tuple[float, Progress, ThreadTimes | None]) -> float:
    meter = StuckMeter()
    return [meter.sample(*sample) for sample in samples][-1]


asleep = ThreadTimes("S", 100 * MS, 5 * MS)


@pytest.mark.parametrize(
    ("before", "after", "stuck_ms"),
    [
        pytest.param(asleep, asleep, 200, id="asleep: stuck"),
        pytest.param(asleep, ThreadTimes("R", 300 * MS, 5 * MS), 200, id="spinning: stuck"),
        pytest.param(asleep, ThreadTimes("R", 100 * MS, 5 * MS), 0, id="runnable without CPU: starved"),
        pytest.param(asleep, ThreadTimes("S", 110 * MS, 155 * MS), 50, id="waited for a CPU most of the time"),
        pytest.param(asleep, ThreadTimes("S", 110 * MS, 905 * MS), 0, id="a long wait booked at its end"),
        pytest.param(None, None, 200, id="no schedstat: all time counts"),
        pytest.param(asleep, None, 200, id="schedstat lost"),
        pytest.param(None, asleep, 200, id="schedstat found"),
    ],
)
def test_one_interval(before: ThreadTimes | None, after: ThreadTimes | None, stuck_ms: float) -> None:
    """0.2 s with work and without a step count as far as the engine's thread was not waiting for a CPU."""
    assert feed((10.0, progress(), before), (10.2, progress(), after)) == pytest.approx(stuck_ms)


@pytest.mark.parametrize(
    ("second", "stuck_ms"),
    [
        pytest.param(progress(steps=2), 0, id="a step"),
        pytest.param(progress(running=0), 0, id="no work"),
        pytest.param(progress(running=0, waiting=1), 200, id="waiting work counts"),
        pytest.param(progress(thread=(5, 8)), 0, id="another thread makes steps now"),
        pytest.param(progress(thread=(6, 7)), 0, id="another process makes steps now"),
        pytest.param(progress(thread=None), 0, id="nobody knows who makes them now"),
    ],
)
def test_what_starts_it_anew(second: Progress, stuck_ms: float) -> None:
    """A step or an end of work sets it to nothing."""
    assert feed((10.0, progress(), asleep), (10.2, second, asleep)) == pytest.approx(stuck_ms)


def test_work_that_just_began_is_not_stuck() -> None:
    """The interval in which work arrived does not count: nobody knows when in it."""
    assert feed((10.0, progress(running=0), asleep), (10.2, progress(), asleep)) == 0
    later = feed((10.0, progress(running=0), None), (10.2, progress(), None), (10.4, progress(), None))
    assert later == pytest.approx(200)


def test_oversleeping_does_not_count() -> None:
    """After a stop of ten seconds (SIGSTOP, a paused machine) only about one beat's time is added."""
    assert feed((10.0, progress(), asleep), (20.0, progress(), asleep)) <= 250


def test_it_adds_up() -> None:
    """Intervals add until a step comes; a second of no step is 1,000 ms."""
    samples = [(10 + i * 0.2, progress(), asleep) for i in range(6)]
    assert feed(*samples) == pytest.approx(1000)
    assert feed(*samples, (11.2, progress(steps=2), asleep)) == 0


def test_own_thread_and_identity_are_read() -> None:
    """The running thread reads itself as running, with CPU time; a thread that is not there reads as None."""
    times = read_thread(os.getpid(), threading.get_native_id())
    if times is None:
        pytest.skip("this kernel keeps no schedstat")
    assert times.state == "R"
    assert times.cpu_ns > 0
    assert read_thread(os.getpid(), 2**22 + 1) is None
    assert read_process(2**22 + 1) is None
    identity = own_identity(threading.get_native_id())
    stat = read_process(os.getpid())
    assert stat is not None
    assert (identity.pid, identity.start_ticks) == (os.getpid(), stat.start_ticks)
    assert identity.boot_id
    assert identity.pid_namespace.startswith("pid:")


def test_a_name_with_brackets_shifts_no_field() -> None:
    """A thread named like stat's own punctuation is read right."""
    path = f"/proc/self/task/{threading.get_native_id()}/comm"
    with open(path) as file:
        name = file.read()
    start = read_process(os.getpid())
    assert start is not None
    with open(path, "w") as file:
        file.write(") T 1 (x) Z")
    try:
        assert read_process(os.getpid()) == type(start)("R", start.start_ticks)
    finally:
        with open(path, "w") as file:
            file.write(name)
