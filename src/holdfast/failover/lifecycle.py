"""An engine's life: Init, Standby, Waking, Active, Draining, Dead, and what its probes answer. Pure.

The theory: there is one way to Active for a shadow, through a lock won and then an announcement made, so nothing can be
routable before both; a normal worker has no other to wait for and goes straight there. Waking alone has a deadline: it
is the one state in which streams wait for somebody who may hang, so past it `/live` says no and a supervisor ends it. A
wake that finds weights to load says so, and has a load's time from then on.

Always true: an event that `TABLE` has no entry for raises `Misstep` and changes nothing; epochs never go back; one that
leads where the engine already is changes no clock and no reason (the first cause is the one to read); every change of
state is counted here and told in one `Entered`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.failover.lifecycle_words import (
    ENDPOINTS,
    PROBES,
    TABLE,
    Announced,
    Cause,
    Effect,
    Ended,
    EndpointProblem,
    Entered,
    Event,
    Loaded,
    LockWon,
    MemoryProblem,
    Misstep,
    MustLoad,
    Rested,
    Rule,
    StandDown,
    State,
    WakeFailed,
)

__all__ = [
    "ENDPOINTS",
    "PROBES",
    "TABLE",
    "Announced",
    "Cause",
    "Effect",
    "Ended",
    "EndpointProblem",
    "Entered",
    "Event",
    "Lifecycle",
    "Loaded",
    "LockWon",
    "MemoryProblem",
    "Misstep",
    "MustLoad",
    "Rested",
    "Rule",
    "StandDown",
    "State",
    "WakeFailed",
    "live",
    "next_deadline_s",
    "ready",
    "step",
]


@dataclass(frozen=True, slots=True, repr=False)
class Lifecycle:
    """Where one engine is in its life; its repr is the status line."""

    shadow: bool  # False: a normal worker, which goes straight from Init to Active
    wake_s: float  # how long Waking may take
    state: State = State.INIT
    entered_s: float = 0.0  # when this state began
    epoch: int = 0  # the last it was elected to; 0: never
    reason: str = ""  # why this state was entered
    loading: str = ""  # what a wake has to load
    load_until_s: float = 0.0  # and by when
    memory_problem: str = ""  # why the memory cannot be vouched for; a standby is not ready then
    endpoint_problem: str = ""  # why the endpoint is not healthy (canary failed, not admitted, ...)
    endpoint_fatal: bool = False  # only a restart mends that
    last_duration_s: float = 0.0  # of the state before this one
    durations_s: Mapping[State, float] = field(default_factory=dict)  # of each state, the last time it was left
    transitions: Mapping[tuple[State, State], int] = field(default_factory=dict)  # how often, by before and after
    switching: bool = False  # the wake under way, or last done, took over from another
    switch_attempts: int = 0
    switch_successes: int = 0

    def __repr__(self) -> str:
        kind = "shadow" if self.shadow else "worker"
        epoch = f", epoch {self.epoch}" if self.epoch else ""
        reason = f" ({self.reason})" if self.reason else ""
        memory = f", memory: {self.memory_problem}" if self.memory_problem else ""
        endpoint = f", endpoint: {self.endpoint_problem}" if self.endpoint_problem else ""
        return f"<{kind} {self.state}{epoch}{reason}{memory}{endpoint}>"


def step(life: Lifecycle, event: Event, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    """What follows from one event."""
    cause, reason = _meaning(life, event)
    after = TABLE[life.state].get(cause)
    if after is None:
        raise Misstep(f"{cause} while {life.state}: not possible")
    if isinstance(event, MemoryProblem):
        return replace(life, memory_problem=event.reason), ()
    if isinstance(event, EndpointProblem):
        return replace(life, endpoint_problem=event.reason, endpoint_fatal=bool(event.reason) and event.fatal), ()
    if isinstance(event, MustLoad):
        return replace(life, loading=event.reason, load_until_s=now_s + event.bound_s), ()
    if after is life.state:
        return life, ()
    if isinstance(event, LockWon | Announced):
        life = _led(life, event)
    return _enter(life, after, reason, now_s)


def _meaning(life: Lifecycle, event: Event) -> tuple[Cause, str]:
    """The row of the table to look in, and why the next state is entered."""
    match event:
        case Loaded():
            return (Cause.LOADED if life.shadow else Cause.LOADED_ALONE), "loaded"
        case LockWon():
            return Cause.LOCK_WON, "won the lock"
        case Announced():
            return Cause.ANNOUNCED, "announced"
        case WakeFailed():
            return Cause.WAKE_FAILED, f"could not wake: {event.reason}"
        case MustLoad():
            return Cause.MUST_LOAD, ""
        case StandDown():
            return Cause.STAND_DOWN, event.reason
        case Rested():
            return Cause.RESTED, "rested"
        case MemoryProblem() | EndpointProblem():
            return Cause.NOTED, ""
        case Ended():
            return Cause.ENDED, event.reason


def _led(life: Lifecycle, event: LockWon | Announced) -> Lifecycle:
    """Its epoch and its counts as a leader."""
    if isinstance(event, Announced):
        # The vault may have asked for a newer epoch than the one elected (facts 4d), never for an older one.
        if event.epoch < life.epoch:
            raise Misstep(f"announced epoch {event.epoch} while elected to {life.epoch}: not possible")
        return replace(life, epoch=event.epoch, switch_successes=life.switch_successes + life.switching)
    if event.epoch <= life.epoch:
        raise Misstep(f"won epoch {event.epoch} after {life.epoch}: not possible")
    attempts = life.switch_attempts + event.contended
    return replace(life, epoch=event.epoch, switching=event.contended, switch_attempts=attempts)


def _enter(life: Lifecycle, after: State, reason: str, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    before, duration_s = life.state, now_s - life.entered_s
    assert duration_s >= 0, f"time went back by {-duration_s} s"
    move = (before, after)
    entered = replace(
        life,
        state=after,
        entered_s=now_s,
        reason=reason,
        loading="",
        load_until_s=0.0,
        last_duration_s=duration_s,
        durations_s={**life.durations_s, before: duration_s},
        transitions={**life.transitions, move: life.transitions.get(move, 0) + 1},
    )
    return entered, (Entered(before, after, duration_s, reason, life.epoch),)


def next_deadline_s(life: Lifecycle) -> float | None:
    """When something should have happened, as a point in the time that `step` is given; None: no hurry."""
    return max(life.entered_s + life.wake_s, life.load_until_s) if life.state is State.WAKING else None


# -- probes


def live(life: Lifecycle, now_s: float, starting_ready: bool = False) -> tuple[bool, str]:
    """Should it be left running? And why."""
    return _answer(PROBES[life.state].live, life, now_s, starting_ready, ())


def ready(
    life: Lifecycle, now_s: float, starting_ready: bool = False, endpoints: Sequence[str] = ()
) -> tuple[bool, str]:
    """Is it what it should be? And why. `endpoints`: those that must be healthy, by name; none: all it has."""
    return _answer(PROBES[life.state].ready, life, now_s, starting_ready, endpoints)


def _answer(
    rule: Rule, life: Lifecycle, now_s: float, starting_ready: bool, endpoints: Sequence[str]
) -> tuple[bool, str]:
    doing = _doing(life)
    match rule:
        case Rule.YES:
            return True, doing
        case Rule.NO:
            return False, doing
        case Rule.STARTING:
            return starting_ready, doing
        case Rule.MEMORY:
            return not life.memory_problem, doing
        case Rule.DEADLINE:
            deadline_s = next_deadline_s(life)
            if deadline_s is None or now_s <= deadline_s:
                return True, doing
            taken_s, bound_s = now_s - life.entered_s, deadline_s - life.entered_s
            return False, f"{doing}: the takeover takes longer than its bound of {bound_s:g} s ({taken_s:.1f} s by now)"
        case Rule.NOT_FATAL:
            return not life.endpoint_fatal, doing
        case Rule.ENDPOINTS:
            missing = [name for name in endpoints if name not in ENDPOINTS]
            if missing:
                return False, f"{doing}; it has no endpoint {', '.join(map(repr, missing))}"
            return not life.endpoint_problem, doing


def _doing(life: Lifecycle) -> str:
    """A state in words, with what troubles it: the reason of every answer."""
    words = {
        State.INIT: "loading",
        State.STANDBY: "standing by",
        State.WAKING: f"waking: {life.loading}" if life.loading else "waking",
        State.ACTIVE: "serving",
        State.DRAINING: f"draining: {life.reason}",
        State.DEAD: f"dead: {life.reason}",
    }[life.state]
    if life.endpoint_problem and life.state is State.ACTIVE:
        words += f"; endpoint {ENDPOINTS[0]!r} is not healthy: {life.endpoint_problem}"
    if life.memory_problem and life.state is not State.DEAD:
        words += f"; cannot vouch for its memory: {life.memory_problem}"
    return words
