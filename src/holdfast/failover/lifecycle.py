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
from enum import StrEnum


class State(StrEnum):
    INIT = "init"  # loading
    STANDBY = "standby"  # loaded and mapped, waits for the lock
    WAKING = "waking"  # holds the lock: fences, adopts, announces
    ACTIVE = "active"
    DRAINING = "draining"  # takes nothing new, hands back what it has
    DEAD = "dead"


class Cause(StrEnum):
    """What an event means for the state; the events below carry the rest."""

    LOADED = "loaded"  # as a shadow
    LOADED_ALONE = "loaded alone"  # as a normal worker: nobody to wait for
    LOCK_WON = "lock won"
    ANNOUNCED = "announced"
    WAKE_FAILED = "wake failed"
    STAND_DOWN = "stand down"
    RESTED = "rested"
    MUST_LOAD = "must load"  # a wake that needs more than a look at what is mapped
    NOTED = "a problem came or went"
    ENDED = "ended"


S, C = State, Cause

TABLE: dict[State, dict[Cause, State]] = {
    S.INIT: {C.LOADED: S.STANDBY, C.LOADED_ALONE: S.ACTIVE, C.NOTED: S.INIT, C.ENDED: S.DEAD},
    S.STANDBY: {C.LOCK_WON: S.WAKING, C.STAND_DOWN: S.DRAINING, C.NOTED: S.STANDBY, C.ENDED: S.DEAD},
    S.WAKING: {
        C.ANNOUNCED: S.ACTIVE,
        C.WAKE_FAILED: S.DEAD,
        C.MUST_LOAD: S.WAKING,
        C.STAND_DOWN: S.DRAINING,
        C.NOTED: S.WAKING,
        C.ENDED: S.DEAD,
    },
    S.ACTIVE: {C.STAND_DOWN: S.DRAINING, C.NOTED: S.ACTIVE, C.ENDED: S.DEAD},
    # Whoever drains may be told to again, by another voice (a lost lock, then SIGTERM); and the dead may end again.
    S.DRAINING: {C.STAND_DOWN: S.DRAINING, C.RESTED: S.STANDBY, C.NOTED: S.DRAINING, C.ENDED: S.DEAD},
    S.DEAD: {C.ENDED: S.DEAD},
}


class Rule(StrEnum):
    """How a probe is answered."""

    YES = "200"
    NO = "503"
    STARTING = "503; 200 where `DYN_SYSTEM_STARTING_HEALTH_STATUS=ready`"
    MEMORY = "200; 503 while its memory is in doubt"
    DEADLINE = "200; 503 past its deadline"
    NOT_FATAL = "200; 503 if its endpoint can only be mended by a restart"
    ENDPOINTS = "200; 503 while an endpoint is not healthy"


@dataclass(frozen=True, slots=True)
class Probes:
    """What is answered in one state, and whether a frontend may send it requests."""

    live: Rule
    ready: Rule
    routable: str


PROBES: dict[State, Probes] = {
    S.INIT: Probes(Rule.STARTING, Rule.STARTING, "no"),
    S.STANDBY: Probes(Rule.YES, Rule.MEMORY, "no (known as standby, so peers can connect ahead)"),
    S.WAKING: Probes(Rule.DEADLINE, Rule.YES, "no"),
    S.ACTIVE: Probes(Rule.NOT_FATAL, Rule.ENDPOINTS, "yes"),
    S.DRAINING: Probes(Rule.YES, Rule.NO, "finishing only"),
    S.DEAD: Probes(Rule.NO, Rule.NO, "no"),
}

# The endpoints a worker has; DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS may name these.
ENDPOINTS = ("generate",)


class Misstep(Exception):
    """An event that cannot happen in this state: a bug of the shell, or a wish at the wrong time. Nothing changed."""


# -- events


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is loaded and warm, and its canary passed."""


@dataclass(frozen=True, slots=True)
class LockWon:
    """Elected. `contended`: it was another's before. The first leader of a fresh deployment switches nothing over,
    and so counts as no attempt."""

    epoch: int
    contended: bool = True


@dataclass(frozen=True, slots=True)
class Announced:
    """Awake, *and* said so on the frontends' open connections."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WakeFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class MustLoad:
    """The wake under way has weights to verify or to load: it gets the time that takes, and no more."""

    reason: str
    bound_s: float


@dataclass(frozen=True, slots=True)
class StandDown:
    """SIGTERM, `/engine/sleep`, a lost lock."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rested:
    """Drained to sleep, not to end."""


@dataclass(frozen=True, slots=True)
class MemoryProblem:
    """Why the memory cannot be vouched for; "": it can."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndpointProblem:
    """Why the endpoint is not healthy; "": it is. `fatal`: only a restart mends it (a failed canary does that, a card
    that frontends refuse does not)."""

    reason: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    reason: str


Event = (
    Loaded | LockWon | Announced | WakeFailed | MustLoad | StandDown | Rested | MemoryProblem | EndpointProblem | Ended
)


# -- effects


@dataclass(frozen=True, slots=True)
class Entered:
    """Another state now; for the log. `duration_s`: how long the one before lasted."""

    before: State
    after: State
    duration_s: float
    reason: str
    epoch: int = 0  # the last it was elected to

    def __str__(self) -> str:
        epoch = f", epoch {self.epoch}" if self.epoch else ""
        return f"{self.before} -> {self.after} after {self.duration_s:.3f} s{epoch}: {self.reason}"


Effect = Entered

# -- the state


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
