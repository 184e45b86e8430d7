"""One supervised process's life, as a table: what it is, what happens to it, what to do about it.

Theory: a process that should run is started; when it ends without having been asked to, it is started again, at once
the first time and then after pauses that double, so that a crash loop costs little and still heals by itself. A life
of `steady_s` is proof enough to forget earlier failures. A process that is asked to leave gets SIGTERM and a bound,
then SIGKILL. No I/O and no clock here: `now_s` comes in, effects go out, and `Life.deadline_s` says when to tick.

Always true: an event that has no entry in the table is our own bug and changes nothing; at most one process per life.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

FIRST_PAUSE_S = 0.1  # after the second failure in a row; the first restart is immediate
PAUSE_S_MAX = 10.0  # a mended cause is noticed within this
STEADY_S = 30.0  # a life this long forgets the failures before it


class Phase(StrEnum):
    """Where a process is."""

    IDLE = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Life:
    """All that is remembered of one supervised process."""

    phase: Phase = Phase.IDLE
    pid: int = 0
    started_s: float = 0.0
    deadline_s: float | None = None  # when to send `Tick`
    failures: int = 0  # lives in a row that ended unasked before `STEADY_S`
    was_ready: bool = False  # ever
    wanted: bool = True  # False once it was asked to leave for good
    note: str = ""  # why it is backing off

    def __str__(self) -> str:
        return f"{self.phase} ({self.note})" if self.note else str(self.phase)


# -- what happens


@dataclass(frozen=True, slots=True)
class Start:
    """It should run."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """It runs already, started by an earlier supervisor."""

    pid: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Spawned:
    pid: int


@dataclass(frozen=True, slots=True)
class BecameReady:
    """It wrote its record."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone; `how` reads after "it died": `SIGKILL`, `exited with 1: the last line it logged`."""

    how: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave for good, within `bound_s`."""

    bound_s: float


@dataclass(frozen=True, slots=True)
class Replace:
    """Leave within `bound_s` and start again with the settings written down now."""

    bound_s: float


@dataclass(frozen=True, slots=True)
class KillNow:
    """Nobody waits any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """`Life.deadline_s` has come."""


Event = Start | Adopted | Spawned | BecameReady | Exited | Stop | Replace | KillNow | Tick


# -- what to do about it


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process; answer with `Spawned` or, if that fails, `Exited`."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL."""


@dataclass(frozen=True, slots=True)
class Tell:
    """A line for people; it reads after the process's name."""

    text: str


Effect = Spawn | Terminate | Kill | Tell
Outcome = tuple[Life, tuple[Effect, ...]]


def step(life: Life, event: Event, now_s: float) -> Outcome:
    """The next life, and what to do now, in order."""
    handler = TABLE.get((life.phase, type(event)))
    assert handler is not None, f"{type(event).__name__} while {life.phase}"
    return handler(life, event, now_s)


def pause_s(failures: int) -> float:
    """How long to wait after so many earlier failures in a row."""
    # The exponent is bounded too: a float overflows after a thousand failures, which is three hours of them.
    return 0.0 if failures == 0 else min(PAUSE_S_MAX, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))


# -- transitions, named by where they go


def _become_starting(life: Life, _event: Event, now_s: float) -> Outcome:
    return replace(life, phase=Phase.STARTING, pid=0, started_s=now_s, deadline_s=None), (Spawn(),)


def _become_adopted(life: Life, event: Adopted, now_s: float) -> Outcome:
    phase = Phase.READY if event.ready else Phase.STARTING
    adopted = replace(life, phase=phase, pid=event.pid, started_s=now_s, was_ready=event.ready)
    return adopted, (Tell(f"adopted, pid {event.pid}"),)


def _spawned(life: Life, event: Spawned, _now_s: float) -> Outcome:
    return replace(life, pid=event.pid), ()


def _become_ready(life: Life, _event: Event, now_s: float) -> Outcome:
    told = f"{'is back as' if life.was_ready else 'is ready,'} pid {life.pid}, after {now_s - life.started_s:.2f} s"
    return replace(life, phase=Phase.READY, was_ready=True, note=""), (Tell(told),)


def _become_fallen(life: Life, event: Exited, now_s: float) -> Outcome:
    """It ended unasked: start it again, now or after a pause."""
    failures = 0 if now_s - life.started_s >= STEADY_S else life.failures
    wait_s = pause_s(failures)
    fallen = replace(life, pid=0, failures=failures + 1)
    if wait_s == 0.0:
        starting, effects = _become_starting(fallen, event, now_s)
        return starting, (Tell(f"died ({event.how}); starting it again"), *effects)
    note = f"backing off {wait_s:.1f} s, {event.how}"
    waiting = replace(fallen, phase=Phase.BACKING_OFF, deadline_s=now_s + wait_s, note=note)
    return waiting, (Tell(f"died again; {note}"),)


def _become_stopping(life: Life, event: Stop, now_s: float) -> Outcome:
    stopping = replace(life, phase=Phase.STOPPING, deadline_s=now_s + event.bound_s, wanted=False)
    return stopping, (Terminate(),)


def _become_replaced(life: Life, event: Replace, now_s: float) -> Outcome:
    stopping = replace(life, phase=Phase.STOPPING, deadline_s=now_s + event.bound_s)
    return stopping, (Tell("has other settings now; replacing it"), Terminate())


def _become_killed(life: Life, _event: Event, _now_s: float) -> Outcome:
    return replace(life, phase=Phase.STOPPING, deadline_s=None, wanted=False), (Kill(),)


def _become_forced(life: Life, event: Event, now_s: float) -> Outcome:
    """The bound has passed. No further deadline: SIGKILL cannot be refused, only delayed by the kernel."""
    if life.deadline_s is None or now_s < life.deadline_s:
        return life, ()
    return replace(life, deadline_s=None), (Tell("did not leave in time; killing it"), Kill())


def _give_up(life: Life, _event: Event, _now_s: float) -> Outcome:
    return replace(life, wanted=False), ()


def _become_over(life: Life, _event: Event, _now_s: float) -> Outcome:
    return replace(life, phase=Phase.OVER, pid=0, deadline_s=None, wanted=False, note=""), ()


def _become_left(life: Life, event: Exited, now_s: float) -> Outcome:
    """It left as it was asked to."""
    if life.wanted:
        return _become_starting(life, event, now_s)
    over, _ = _become_over(life, event, now_s)
    return over, (Tell(f"stopped ({event.how})"),)


def _become_retried(life: Life, event: Event, now_s: float) -> Outcome:
    if life.deadline_s is None or now_s < life.deadline_s:
        return life, ()
    return _become_starting(life, event, now_s)


def _stay(life: Life, _event: Event, _now_s: float) -> Outcome:
    return life, ()


Handler = Callable[[Life, Any, float], Outcome]

TABLE: dict[tuple[Phase, type[Event]], Handler] = {
    (Phase.IDLE, Start): _become_starting,
    (Phase.IDLE, Adopted): _become_adopted,
    (Phase.IDLE, Stop): _become_over,
    (Phase.IDLE, KillNow): _become_over,
    (Phase.STARTING, Spawned): _spawned,
    (Phase.STARTING, BecameReady): _become_ready,
    (Phase.STARTING, Exited): _become_fallen,
    (Phase.STARTING, Stop): _become_stopping,
    (Phase.STARTING, Replace): _become_replaced,
    (Phase.STARTING, KillNow): _become_killed,
    (Phase.READY, Exited): _become_fallen,
    (Phase.READY, Stop): _become_stopping,
    (Phase.READY, Replace): _become_replaced,
    (Phase.READY, KillNow): _become_killed,
    (Phase.BACKING_OFF, Tick): _become_retried,
    (Phase.BACKING_OFF, Stop): _become_over,
    (Phase.BACKING_OFF, Replace): _become_starting,
    (Phase.BACKING_OFF, KillNow): _become_over,
    (Phase.STOPPING, Tick): _become_forced,
    (Phase.STOPPING, Stop): _give_up,
    (Phase.STOPPING, KillNow): _become_killed,
    (Phase.STOPPING, Exited): _become_left,
    (Phase.OVER, Stop): _stay,
    (Phase.OVER, KillNow): _stay,
}
