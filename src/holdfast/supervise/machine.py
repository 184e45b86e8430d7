"""One supervised process's life, as a table: what it is, what happens to it, what to do about it.

Theory: a process that should run is started; when it ends without having been asked to, it is started again, at once
the first time and then after pauses that double, so that a crash loop costs little and still heals by itself; after
`CRASH_LOOP_FAILURES` in a row it is called one. One that was never ready and says that its settings cannot be is not
tried again; one that was ready with the same settings may be right again, and is. Who was ready for longer than it took
to get there, and for `STEADY_S`, has paid for its start: earlier failures are forgotten. A process that is asked to
leave gets SIGTERM and a bound, then SIGKILL; one that is not ready in time, or is condemned by those who watch it, gets
SIGKILL at once and comes back like one that died. Of its own answers (facts 24, 31) one proves something, silence does
not: a process that *says* it cannot live any more (`/live` answers, and not with 200) several times in a row is
condemned; one that says nothing may only be starved, and is judged by its beats and by the kernel (`watching`), never
here. Readiness is shown and kills nobody. No I/O and no clock here: `now_s` comes in, effects go out, and
`next_deadline_s` says when to tick.

Always true: an event that has no entry in the table is our own bug and changes nothing; at most one process per life,
and none is started beside one that was killed and has not ended. Silence neither adds to the count of refusals nor
clears it; a process is condemned once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from msgspec import Struct

from holdfast.core.backoff import backoff_s
from holdfast.spec.launch import Probes

FIRST_PAUSE_S = 0.1  # after the second failure in a row; the first restart is immediate
PAUSE_S_MAX = 10.0  # a mended cause is noticed within this
STEADY_S = 2.0  # at least; a loop of shorter lives than this is one, however quick the start
CRASH_LOOP_FAILURES = 5  # in a row; two or three happen while peers come up, so fewer would cry wolf
KERNEL_S = 5.0  # from SIGKILL to the end: the kernel tears down memory first (facts 4c)
START_FAILURES_MAX = 3  # without ever being ready: the next time would end the same


class Phase(StrEnum):
    """Where a process is."""

    IDLE = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    CRASH_LOOP = "crash loop"  # backing off after many failures in a row; it still heals by itself
    REFUSED = "refused"  # it said that its settings cannot be; it is not tried again
    KILLED = "killed"  # by us, because it was stopped, wedged, sick or late; it comes back
    UNKILLABLE = "unkillable"  # SIGKILL was sent and the kernel did not end it
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Life:
    """All that is remembered of one supervised process."""

    phase: Phase = Phase.IDLE
    pid: int = 0
    started_s: float = 0.0
    ready_s: float | None = None  # since when; None: this life was not ready yet
    deadline_s: float | None = None  # until when this phase may last
    failures: int = 0  # lives in a row that ended unasked before they had been ready for long enough
    was_ready: bool = False  # ever
    wanted: bool = True  # False once it was asked to leave for good
    note: str = ""  # why it is backing off, was refused, or was killed
    startup_s: float | None = None  # from its start until it is ready; None: as long as it likes

    def __str__(self) -> str:
        return f"{self.phase} ({self.note})" if self.note else str(self.phase)

    @property
    def is_hopeless(self) -> bool:
        """Whether it will never be ready: it said so, or ended too often without ever having been."""
        return self.phase is Phase.REFUSED or (not self.was_ready and self.failures >= START_FAILURES_MAX)


# -- what happens


class Start(Struct, frozen=True):
    """It should run."""


class Adopted(Struct, frozen=True):
    """It runs already, started by an earlier supervisor."""

    pid: int
    ready: bool


class Spawned(Struct, frozen=True):
    pid: int


class BecameReady(Struct, frozen=True):
    """It wrote its record."""


class Condemned(Struct, frozen=True):
    """It cannot serve and will not end by itself; `why` reads after its name: `is stopped: …`, `says that …`."""

    why: str


class Exited(Struct, frozen=True):
    """The process is gone; `how` reads after "it died": `SIGKILL`, `exited with 1: the last line it logged`."""

    how: str
    refused: bool = False  # with the status that means: trying again cannot help


class Stop(Struct, frozen=True):
    """Leave for good, within `bound_s`."""

    bound_s: float


class Replace(Struct, frozen=True):
    """Leave within `bound_s` and start again with the settings written down now."""

    bound_s: float


class KillNow(Struct, frozen=True):
    """Nobody waits any more."""


class Tick(Struct, frozen=True):
    """`Life.deadline_s` has come."""


Event = Start | Adopted | Spawned | BecameReady | Condemned | Exited | Stop | Replace | KillNow | Tick


# -- what to do about it


class Spawn(Struct, frozen=True):
    """Start the process; answer with `Spawned` or, if that fails, `Exited`."""


class Terminate(Struct, frozen=True):
    """SIGTERM."""


class Kill(Struct, frozen=True):
    """SIGKILL, to it and to all that it started in its session."""


class Fell(Struct, frozen=True):
    """It ended unasked: to be remembered. `was_ready`: it had been ready in this life."""

    pid: int
    how: str
    was_ready: bool


class Tell(Struct, frozen=True):
    """A line for people; it reads after the process's name."""

    text: str


Effect = Spawn | Terminate | Kill | Fell | Tell
Outcome = tuple[Life, tuple[Effect, ...]]

# -- steps


def step(life: Life, event: Event, now_s: float) -> Outcome:
    """The next life, and what to do now, in order."""
    handler = TABLE.get((life.phase, type(event)))
    assert handler is not None, f"{type(event).__name__} while {life.phase}"
    return handler(life, event, now_s)


def next_deadline_s(life: Life) -> float | None:
    """When a `Tick` is due, if nothing else happens before."""
    return life.deadline_s


def _due(life: Life, now_s: float) -> bool:
    return life.deadline_s is not None and now_s >= life.deadline_s


def _start_bound(life: Life, now_s: float) -> float | None:
    return None if life.startup_s is None else now_s + life.startup_s


# -- transitions, named by where they go


def _become_starting(life: Life, _event: Event, now_s: float) -> Outcome:
    bound_s = _start_bound(life, now_s)
    return replace(life, phase=Phase.STARTING, pid=0, started_s=now_s, ready_s=None, deadline_s=bound_s), (Spawn(),)


def _become_adopted(life: Life, event: Adopted, now_s: float) -> Outcome:
    phase = Phase.READY if event.ready else Phase.STARTING
    ready_s, bound_s = (now_s, None) if event.ready else (None, _start_bound(life, now_s))
    adopted = replace(
        life, phase=phase, pid=event.pid, started_s=now_s, was_ready=event.ready, ready_s=ready_s, deadline_s=bound_s
    )
    return adopted, (Tell(f"adopted, pid {event.pid}"),)


def _spawned(life: Life, event: Spawned, _now_s: float) -> Outcome:
    return replace(life, pid=event.pid), ()


def _become_ready(life: Life, _event: Event, now_s: float) -> Outcome:
    told = f"{'is back as' if life.was_ready else 'is ready,'} pid {life.pid}, after {now_s - life.started_s:.2f} s"
    ready = replace(life, phase=Phase.READY, was_ready=True, ready_s=now_s, deadline_s=None, note="")
    return ready, (Tell(told),)


def _become_late(life: Life, _event: Event, now_s: float) -> Outcome:
    """The startup probe: it was not ready in time."""
    if not _due(life, now_s):
        return life, ()
    return _become_condemned(life, Condemned(f"was not ready within {life.startup_s:g} s"), now_s)


def _become_condemned(life: Life, event: Condemned, now_s: float) -> Outcome:
    condemned = replace(life, phase=Phase.KILLED, deadline_s=now_s + KERNEL_S, note=event.why)
    return condemned, (Tell(f"{event.why}; killing pid {life.pid}"), Kill())


def _become_unkillable(life: Life, _event: Event, now_s: float) -> Outcome:
    """SIGKILL cannot be refused, only delayed by the kernel: there is nothing more to be done than to say so."""
    if not _due(life, now_s):
        return life, ()
    told = f"failover impossible here: pid {life.pid} does not end after SIGKILL"
    return replace(life, phase=Phase.UNKILLABLE, deadline_s=None, note=told), (Tell(told),)


def _become_fallen(life: Life, event: Exited, now_s: float) -> Outcome:
    """It ended unasked, which is remembered."""
    if not life.wanted:
        return _become_left(life, event, now_s)
    how = f"killed: it {life.note}" if life.phase is Phase.KILLED and life.note else event.how
    after, effects = _become_raised(life, Exited(how, event.refused), now_s)
    return after, (Fell(life.pid, how, life.ready_s is not None), *effects)


def _become_raised(life: Life, event: Exited, now_s: float) -> Outcome:
    """Start it again, now or after a pause, unless it said that this cannot help."""
    how = event.how
    if event.refused and not life.was_ready:
        return _become_refused(life, how)
    steady = life.ready_s is not None and now_s - life.ready_s >= max(STEADY_S, life.ready_s - life.started_s)
    failures = 0 if steady else life.failures
    fallen = replace(life, pid=0, failures=failures + 1)
    wait_s = backoff_s(failures, FIRST_PAUSE_S, PAUSE_S_MAX)
    if wait_s == 0.0:
        starting, effects = _become_starting(fallen, event, now_s)
        return starting, (Tell(f"died ({how}); starting it again"), *effects)
    loops = fallen.failures >= CRASH_LOOP_FAILURES
    note = f"failed {fallen.failures} times in a row, {how}" if loops else f"backing off {wait_s:.1f} s, {how}"
    phase = Phase.CRASH_LOOP if loops else Phase.BACKING_OFF
    waiting = replace(fallen, phase=phase, deadline_s=now_s + wait_s, note=note)
    told = f"died again; crash loop: {note}; next try in {wait_s:.1f} s" if loops else f"died again; {note}"
    return waiting, (Tell(told),)


def _become_refused(life: Life, why: str) -> Outcome:
    refused = replace(life, phase=Phase.REFUSED, pid=0, failures=life.failures + 1, deadline_s=None, note=why)
    return refused, (Tell(f"cannot be started: {why}; it is not tried again"),)


def _become_stopping(life: Life, event: Stop, now_s: float) -> Outcome:
    stopping = replace(life, phase=Phase.STOPPING, deadline_s=now_s + event.bound_s, wanted=False)
    return stopping, (Terminate(),)


def _become_replaced(life: Life, event: Replace, now_s: float) -> Outcome:
    stopping = replace(life, phase=Phase.STOPPING, deadline_s=now_s + event.bound_s)
    return stopping, (Tell("has other settings now; replacing it"), Terminate())


def _become_killed(life: Life, _event: Event, now_s: float) -> Outcome:
    return replace(life, phase=Phase.KILLED, deadline_s=now_s + KERNEL_S, wanted=False, note=""), (Kill(),)


def _become_forced(life: Life, _event: Event, now_s: float) -> Outcome:
    """The bound has passed."""
    if not _due(life, now_s):
        return life, ()
    killed = replace(life, phase=Phase.KILLED, deadline_s=now_s + KERNEL_S, note="")
    return killed, (Tell("did not leave in time; killing it"), Kill())


def _give_up(life: Life, _event: Event, _now_s: float) -> Outcome:
    return replace(life, wanted=False), ()


def _kill_again(life: Life, _event: Event, _now_s: float) -> Outcome:
    return replace(life, wanted=False), (Kill(),)


def _become_over(life: Life, _event: Event, _now_s: float) -> Outcome:
    return replace(life, phase=Phase.OVER, pid=0, deadline_s=None, wanted=False, note=""), ()


def _become_left(life: Life, event: Exited, now_s: float) -> Outcome:
    """It left as it was asked to."""
    if life.wanted:
        return _become_starting(life, event, now_s)
    over, _ = _become_over(life, event, now_s)
    return over, (Tell(f"stopped ({event.how})"),)


def _become_retried(life: Life, event: Event, now_s: float) -> Outcome:
    return _become_starting(life, event, now_s) if _due(life, now_s) else (life, ())


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
    (Phase.STARTING, Tick): _become_late,
    (Phase.STARTING, Condemned): _become_condemned,
    (Phase.STARTING, Exited): _become_fallen,
    (Phase.STARTING, Stop): _become_stopping,
    (Phase.STARTING, Replace): _become_replaced,
    (Phase.STARTING, KillNow): _become_killed,
    (Phase.READY, Condemned): _become_condemned,
    (Phase.READY, Exited): _become_fallen,
    (Phase.READY, Stop): _become_stopping,
    (Phase.READY, Replace): _become_replaced,
    (Phase.READY, KillNow): _become_killed,
    (Phase.BACKING_OFF, Tick): _become_retried,
    (Phase.BACKING_OFF, Stop): _become_over,
    (Phase.BACKING_OFF, Replace): _become_starting,
    (Phase.BACKING_OFF, KillNow): _become_over,
    (Phase.CRASH_LOOP, Tick): _become_retried,
    (Phase.CRASH_LOOP, Stop): _become_over,
    (Phase.CRASH_LOOP, Replace): _become_starting,
    (Phase.CRASH_LOOP, KillNow): _become_over,
    (Phase.REFUSED, Stop): _become_over,
    (Phase.REFUSED, Replace): _become_starting,
    (Phase.REFUSED, KillNow): _become_over,
    (Phase.KILLED, Tick): _become_unkillable,
    (Phase.KILLED, Exited): _become_fallen,
    (Phase.KILLED, Stop): _give_up,
    (Phase.KILLED, KillNow): _kill_again,
    (Phase.UNKILLABLE, Exited): _become_fallen,
    (Phase.UNKILLABLE, Stop): _give_up,
    (Phase.UNKILLABLE, KillNow): _kill_again,
    (Phase.STOPPING, Tick): _become_forced,
    (Phase.STOPPING, Stop): _give_up,
    (Phase.STOPPING, KillNow): _become_killed,
    (Phase.STOPPING, Exited): _become_left,
    (Phase.OVER, Stop): _stay,
    (Phase.OVER, KillNow): _stay,
}


# -- what its own answers mean: a kubelet's liveness and readiness probes, as a count


class Answer(StrEnum):
    YES = "yes"  # 200
    NO = "no"  # any other status
    SILENCE = "silence"


@dataclass(frozen=True, slots=True)
class Asked:
    """What one process answered so far."""

    refusals: int = 0  # of /live, in a row
    ready: Answer = Answer.SILENCE

    def __str__(self) -> str:
        readiness = {Answer.YES: "ready", Answer.NO: "not ready", Answer.SILENCE: "silent"}[self.ready]
        return f"{readiness}, /live refused {self.refusals} times" if self.refusals else readiness


def answer_of(status: int | None) -> Answer:
    """A status code, or None where nothing came, as an answer."""
    if status is None:
        return Answer.SILENCE
    return Answer.YES if status == 200 else Answer.NO


def weigh(asked: Asked, live: Answer, ready: Answer, probes: Probes, reason: str = "") -> tuple[Asked, str]:
    """What is known now, and why the process is condemned, or ""; `reason`: what its answer to /live gives as one."""
    refusals = {Answer.YES: 0, Answer.NO: asked.refusals + 1, Answer.SILENCE: asked.refusals}[live]
    after = replace(asked, refusals=refusals, ready=ready)
    if live is Answer.NO and refusals == probes.failure_threshold:
        cause = f": {reason}" if reason else f" (/live refused {refusals} times in a row)"
        return after, f"says that it cannot live{cause}"
    return after, ""
