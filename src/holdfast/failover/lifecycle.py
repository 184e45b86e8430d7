"""The lifecycle of an engine: Init, Standby, Waking, Active, Draining, Dead, and what its probes answer. Pure.

Theory. In a failover group an engine becomes Active only by winning the lock and then announcing itself, so it cannot
be routable before both. A normal worker goes straight from Init to Active. Only Waking has a deadline, because streams
wait then for an engine that may hang: past the deadline `/live` answers 503 and a supervisor ends the process. A wake
that must load weights (`MustLoad`) gets the time of a load.

Always true:

- An event without an entry in `TABLE` raises `Misstep` and changes nothing.
- Epochs never decrease.
- An event that leads to the current state keeps its start time and its reason (the first cause is the useful one).
- Every change of state is counted here and reported in one `Entered`.
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
    DRAINING = "draining"  # accepts no new streams, hands back those it has
    DEAD = "dead"


class Cause(StrEnum):
    """The kind of an event, as `TABLE` uses it; the events below carry the details."""

    LOADED = "loaded"  # in a failover group
    LOADED_ALONE = "loaded alone"  # as a normal worker: no election to wait for
    LOCK_WON = "lock won"
    ANNOUNCED = "announced"
    WAKE_FAILED = "wake failed"
    STAND_DOWN = "stand down"
    DRAINED = "drained"
    MUST_LOAD = "must load"  # a wake that must load or verify weights
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
    # A draining engine may get a second StandDown (a lost lock, then SIGTERM), and a dead one a second Ended.
    S.DRAINING: {C.STAND_DOWN: S.DRAINING, C.DRAINED: S.STANDBY, C.NOTED: S.DRAINING, C.ENDED: S.DEAD},
    S.DEAD: {C.ENDED: S.DEAD},
}


class Rule(StrEnum):
    """The rule by which a probe is answered."""

    YES = "200"
    NO = "503"
    STARTING = "503; 200 where `DYN_SYSTEM_STARTING_HEALTH_STATUS=ready`"
    MEMORY = "200; 503 while its memory is in doubt"
    DEADLINE = "200; 503 past its deadline"
    NOT_FATAL = "200; 503 if its endpoint can only be mended by a restart"
    ENDPOINTS = "200; 503 while an endpoint is not healthy"


@dataclass(frozen=True, slots=True)
class ProbeAnswers:
    """The probes' rules in one state, and whether a frontend may send requests."""

    live: Rule
    ready: Rule
    routable: str


PROBES: dict[State, ProbeAnswers] = {
    S.INIT: ProbeAnswers(Rule.STARTING, Rule.STARTING, "no"),
    S.STANDBY: ProbeAnswers(Rule.YES, Rule.MEMORY, "no (known as standby, so peers can connect ahead)"),
    S.WAKING: ProbeAnswers(Rule.DEADLINE, Rule.YES, "no"),
    S.ACTIVE: ProbeAnswers(Rule.NOT_FATAL, Rule.ENDPOINTS, "yes"),
    S.DRAINING: ProbeAnswers(Rule.YES, Rule.NO, "finishing only"),
    S.DEAD: ProbeAnswers(Rule.NO, Rule.NO, "no"),
}

# The endpoints a worker has; DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS may name these.
ENDPOINTS = ("generate",)


class Misstep(Exception):
    """Raised for an event that cannot happen in this state: a bug of the caller, or a request at the wrong time.
    Nothing changed."""


# -- events


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is loaded and warm, and its canary passed."""


@dataclass(frozen=True, slots=True)
class LockWon:
    """The engine won the election. `contended`: another engine led before, so this counts as a switch attempt."""

    epoch: int
    contended: bool = True


@dataclass(frozen=True, slots=True)
class Announced:
    """The engine is awake *and* has announced itself on the frontends' open connections."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WakeFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class MustLoad:
    """The current wake must verify or load weights, and may take `bound_s` from now."""

    reason: str
    bound_s: float


@dataclass(frozen=True, slots=True)
class StandDown:
    """The engine must stop serving: SIGTERM, `/engine/sleep`, a lost lock."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The engine has drained and stands by again."""


@dataclass(frozen=True, slots=True)
class MemoryProblem:
    """The engine's memory may be wrong, for this reason; "": it is right again."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndpointProblem:
    """The endpoint is not healthy, for this reason; "": it is healthy again. `fatal`: only a restart helps (as after a
    failed canary, but not for a card that frontends refuse)."""

    reason: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    reason: str


Event = (
    Loaded | LockWon | Announced | WakeFailed | MustLoad | StandDown | Drained | MemoryProblem | EndpointProblem | Ended
)


# -- effects


@dataclass(frozen=True, slots=True)
class Entered:
    """The engine has entered a state; for the log. `duration_s`: how long the state before lasted."""

    before: State
    after: State
    duration_s: float
    reason: str
    epoch: int = 0  # the last one it won

    def __str__(self) -> str:
        epoch = f", epoch {self.epoch}" if self.epoch else ""
        return f"{self.before} -> {self.after} after {self.duration_s:.3f} s{epoch}: {self.reason}"


Effect = Entered

# -- the state


@dataclass(frozen=True, slots=True, repr=False)
class Lifecycle:
    """The state of one engine's lifecycle; its repr is the status line."""

    failover: bool  # in a failover group; False: a normal worker, which goes straight from Init to Active
    wake_s: float  # how long Waking may take
    state: State = State.INIT
    entered_s: float = 0.0  # when this state began
    epoch: int = 0  # the last one it won; 0: none
    reason: str = ""  # why this state was entered
    loading: str = ""  # what a wake has to load
    load_until_s: float = 0.0  # the deadline of that load
    memory_problem: str = ""  # why the memory may be wrong; a standby is not ready then
    endpoint_problem: str = ""  # why the endpoint is not healthy (canary failed, not admitted, ...)
    endpoint_fatal: bool = False  # only a restart ends that problem
    durations_s: Mapping[State, float] = field(default_factory=dict)  # of each state, the last time it was left
    transitions: Mapping[tuple[State, State], int] = field(default_factory=dict)  # how often, by before and after
    switching: bool = False  # the current or last wake took over from another engine
    switch_attempts: int = 0
    switch_successes: int = 0

    def __repr__(self) -> str:
        kind = "failover worker" if self.failover else "worker"
        epoch = f", epoch {self.epoch}" if self.epoch else ""
        reason = f" ({self.reason})" if self.reason else ""
        memory = f", memory: {self.memory_problem}" if self.memory_problem else ""
        endpoint = f", endpoint: {self.endpoint_problem}" if self.endpoint_problem else ""
        return f"<{kind} {self.state}{epoch}{reason}{memory}{endpoint}>"


def step(life: Lifecycle, event: Event, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    """Return the lifecycle after an event, and the effects."""
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
    """Return the event's cause in `TABLE`, and the reason to record for the next state."""
    match event:
        case Loaded():
            return (Cause.LOADED if life.failover else Cause.LOADED_ALONE), "loaded"
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
        case Drained():
            return Cause.DRAINED, "drained"
        case MemoryProblem() | EndpointProblem():
            return Cause.NOTED, ""
        case Ended():
            return Cause.ENDED, event.reason


def _led(life: Lifecycle, event: LockWon | Announced) -> Lifecycle:
    """Return the lifecycle with its new epoch and its switch counts."""
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
    """Return the deadline of a wake, on the clock of `step`; None in other states."""
    return max(life.entered_s + life.wake_s, life.load_until_s) if life.state is State.WAKING else None


# -- probes


def live(life: Lifecycle, now_s: float, starting_ready: bool = False) -> tuple[bool, str]:
    """Return whether the process should keep running, and the reason: the answer of `/live`."""
    return _answer(PROBES[life.state].live, life, now_s, starting_ready, ())


def ready(
    life: Lifecycle, now_s: float, starting_ready: bool = False, endpoints: Sequence[str] = ()
) -> tuple[bool, str]:
    """Return whether the engine is ready, and the reason: the answer of `/health`. `endpoints`: names of those that
    must be healthy; none: all."""
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
    """Return the state as text, with its problems: the reason in every probe's answer."""
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
