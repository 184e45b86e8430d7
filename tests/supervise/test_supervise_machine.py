"""The restart policy, without a process: what happens to a life, and what is done about it."""

from __future__ import annotations

import pytest

from holdfast.supervise import machine as m
from holdfast.supervise.machine import Life, Phase, step


def grow(*events: tuple[float, m.Event]) -> tuple[Life, list[m.Effect]]:
    """A life after events at given times, and every effect on the way."""
    life, done = Life(), []
    for at_s, event in events:
        life, effects = step(life, event, at_s)
        done += effects
    return life, done


STARTED = ((0.0, m.Start()), (0.0, m.Spawned(11)))
READY = (*STARTED, (0.5, m.BecameReady()))


def test_a_start_leads_to_ready() -> None:
    """A started process is spawned once, and is ready when its record says so."""
    life, done = grow(*READY)
    assert (life.phase, life.pid) == (Phase.READY, 11)
    assert done == [m.Spawn(), m.Tell("is ready, pid 11, after 0.50 s")]


def test_the_first_restart_is_immediate() -> None:
    """A process that ends unasked is started again in the same step, without a pause."""
    life, done = grow(*READY, (5.0, m.Exited("SIGKILL")), (5.0, m.Spawned(12)), (5.4, m.BecameReady()))
    assert life.phase is Phase.READY
    assert done[2:] == [
        m.Tell("died (SIGKILL); starting it again"),
        m.Spawn(),
        m.Tell("is back as pid 12, after 0.40 s"),
    ]


def test_further_restarts_back_off() -> None:
    """Pauses double from 0.1 s to 10 s while lives stay short, and the reason is there to be read."""
    life, _ = grow(*STARTED)
    now_s, pauses = 0.0, []
    for _ in range(12):
        life, _ = step(life, m.Exited("exited with 1: no such model"), now_s)
        if life.phase is Phase.BACKING_OFF:
            assert life.deadline_s is not None
            assert str(life).endswith("s, exited with 1: no such model)")
            pauses.append(round(life.deadline_s - now_s, 3))
            now_s = life.deadline_s
            life, effects = step(life, m.Tick(), now_s)
            assert effects == (m.Spawn(),)
        life, _ = step(life, m.Spawned(1), now_s)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0, 10.0]


def test_a_steady_life_forgets_failures() -> None:
    """After 30 s of life the next restart is immediate again."""
    life = Life(Phase.READY, pid=9, started_s=100.0, failures=7, was_ready=True)
    short, _ = step(life, m.Exited("SIGSEGV"), 129.9)
    steady, _ = step(life, m.Exited("SIGSEGV"), 130.0)
    assert (short.phase, short.failures) == (Phase.BACKING_OFF, 8)
    assert (steady.phase, steady.failures) == (Phase.STARTING, 1)


def test_pauses_never_overflow() -> None:
    """However often it has failed, the pause is the greatest one."""
    assert m.pause_s(1_000_000) == m.PAUSE_S_MAX


def test_stopping_is_bounded() -> None:
    """SIGTERM first; SIGKILL when the bound has passed and not before."""
    life, done = grow(*READY, (10.0, m.Stop(3.0)))
    assert (life.phase, life.deadline_s, done[-1]) == (Phase.STOPPING, 13.0, m.Terminate())
    early, effects = step(life, m.Tick(), 12.9)
    assert (early, effects) == (life, ())
    late, effects = step(life, m.Tick(), 13.0)
    assert m.Kill() in effects
    assert late.deadline_s is None
    over, _ = step(late, m.Exited("SIGKILL"), 13.1)
    assert over.phase is Phase.OVER


def test_a_replaced_process_comes_back() -> None:
    """One that was asked to leave for new settings is spawned again; one told to stop meanwhile is not."""
    life, _ = grow(*READY, (10.0, m.Replace(3.0)))
    again, effects = step(life, m.Exited("exited with 0"), 10.2)
    assert (again.phase, effects) == (Phase.STARTING, (m.Spawn(),))
    stopped, _ = step(life, m.Stop(3.0), 10.1)
    over, effects = step(stopped, m.Exited("exited with 0"), 10.2)
    assert over.phase is Phase.OVER
    assert m.Spawn() not in effects


@pytest.mark.parametrize("phase", list(Phase))
def test_everything_can_be_stopped_and_killed(phase: Phase) -> None:
    """Whatever a process is doing, `Stop` and `KillNow` are understood and never spawn."""
    for event in (m.Stop(1.0), m.KillNow()):
        life, effects = step(Life(phase, pid=3), event, 1.0)
        assert life.phase in (Phase.STOPPING, Phase.OVER)
        assert not life.wanted or phase is Phase.OVER
        assert m.Spawn() not in effects


def test_what_is_not_in_the_table_is_a_bug() -> None:
    """An event that cannot happen is refused loudly."""
    with pytest.raises(AssertionError, match="BecameReady while over"):
        step(Life(Phase.OVER), m.BecameReady(), 0.0)
