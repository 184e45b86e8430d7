"""The words of an engine's lifecycle: its states, what may happen to it, and the two tables that say what follows.

Always true: `TABLE` alone says which state follows which, and `PROBES` alone what is answered about it; an event with
no entry is refused and changes nothing. The tables in docs/failover.md are written from these.
"""

from __future__ import annotations

from dataclasses import dataclass
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
