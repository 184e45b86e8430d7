"""The words of the liveness judge: its verdicts, what may change them, and the one table that says how.

Always true: streams are moved off a worker exactly when its verdict enters `LOST`; only `ROUTABLE` ones get work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    NEW = "new"  # no beat connection yet
    ALIVE = "alive"
    SUSPECT = "suspect"  # silent: no new work, nothing moved
    STARVED = "starved"  # silent, but its process is able to run: wait
    STOPPED = "stopped"  # the kernel says it does not run: move streams
    WEDGED = "wedged"  # beats, but its steps do not move: move streams
    GONE = "gone"  # silent, and it cannot be looked at: move streams, kill nothing
    PROBATION = "probation"  # came back: gets a little work


class Cause(StrEnum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    SILENT = "silent"  # for longer than its beats allow
    LIFE = "life"  # a beat or data from one that was only doubted
    LIFE_OWING = "life-owing"  # the same, from one whose probation is not over
    STARVING = "starving"  # the probe: it could run
    STOP_SEEN = "stop-seen"  # the probe: it is stopped, frozen or dead
    TOO_LONG = "too-long"  # starved past the hard limit
    HOST_SILENT = "host-silent"  # no probe possible, and silent past that limit
    STUCK = "stuck"  # a beat: work there, no step
    RETURNED = "returned"  # one whose streams were moved shows life, or steps
    PROVED = "proved"  # probation served


V, C = Verdict, Cause

TABLE: dict[Verdict, dict[Cause, Verdict]] = {
    V.NEW: {C.CONNECTED: V.ALIVE},
    V.ALIVE: {C.SILENT: V.SUSPECT, C.DISCONNECTED: V.SUSPECT, C.STUCK: V.WEDGED},
    V.PROBATION: {C.SILENT: V.SUSPECT, C.DISCONNECTED: V.SUSPECT, C.STUCK: V.WEDGED, C.PROVED: V.ALIVE},
    V.SUSPECT: {
        C.LIFE: V.ALIVE,
        C.LIFE_OWING: V.PROBATION,
        C.STUCK: V.WEDGED,
        C.STARVING: V.STARVED,
        C.STOP_SEEN: V.STOPPED,
        C.TOO_LONG: V.STOPPED,
        C.HOST_SILENT: V.GONE,
        C.CONNECTED: V.SUSPECT,
        C.DISCONNECTED: V.SUSPECT,
    },
    V.STARVED: {
        C.LIFE: V.ALIVE,
        C.LIFE_OWING: V.PROBATION,
        C.STUCK: V.WEDGED,
        C.STARVING: V.STARVED,
        C.STOP_SEEN: V.STOPPED,
        C.TOO_LONG: V.STOPPED,
        C.HOST_SILENT: V.GONE,
        C.CONNECTED: V.STARVED,
        C.DISCONNECTED: V.STARVED,
    },
    V.STOPPED: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.STOPPED, C.DISCONNECTED: V.STOPPED},
    V.GONE: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.GONE, C.DISCONNECTED: V.GONE},
    V.WEDGED: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.WEDGED, C.DISCONNECTED: V.WEDGED},
}

ROUTABLE = frozenset({V.ALIVE, V.PROBATION})
PROBED = frozenset({V.SUSPECT, V.STARVED})  # doubted: looked at every tick, where it can be
LOST = frozenset({V.STOPPED, V.WEDGED, V.GONE})


class LivenessError(Exception):
    """An event that cannot happen in this verdict: a bug of the observer. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One look at a process. Letters as in /proc; "" where there is nothing to read."""

    gone: bool  # no such pid, or another process has it by now
    state: str = ""
    frozen: bool = False
    thread_state: str = ""
    switches: int = 0  # of the beat thread, voluntary or not, since its start


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict changed; whether it is routable follows from it."""

    before: Verdict
    after: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Look at the process now and at every tick, and tell `on_probe`."""


@dataclass(frozen=True, slots=True)
class StopProbe:
    """Stop looking."""


@dataclass(frozen=True, slots=True)
class MoveStreams:
    """Resume this worker's streams elsewhere. The worker itself is not to be touched."""

    reason: str


Effect = Judged | StartProbe | StopProbe | MoveStreams
