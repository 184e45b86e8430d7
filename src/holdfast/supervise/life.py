"""The words of the supervisor's machine: where a process is, what happens to it, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


class Restart(StrEnum):
    """When a process that ended unasked is started again."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Policy:
    """What is promised to one process."""

    restart: str = Restart.ALWAYS
    startup_s: float | None = None  # from its start until it is ready; None: as long as it likes


@dataclass(frozen=True, slots=True)
class Life:
    """All that is remembered of one supervised process."""

    phase: Phase = Phase.IDLE
    pid: int = 0
    started_s: float = 0.0
    ready_s: float | None = None  # since when; None: this life was not ready yet
    deadline_s: float | None = None  # when to send `Tick`
    failures: int = 0  # lives in a row that ended unasked before they had been ready for long enough
    was_ready: bool = False  # ever
    wanted: bool = True  # False once it was asked to leave for good
    note: str = ""  # why it is backing off, was refused, or was killed
    policy: Policy = Policy()

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
class Condemned:
    """It cannot serve and will not end by itself; `why` reads after its name: `is stopped: …`, `says that …`."""

    why: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone; `how` reads after "it died": `SIGKILL`, `exited with 1: the last line it logged`."""

    how: str
    clean: bool = False  # with status 0
    refused: bool = False  # with the status that means: trying again cannot help


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


Event = Start | Adopted | Spawned | BecameReady | Condemned | Exited | Stop | Replace | KillNow | Tick


# -- what to do about it


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process; answer with `Spawned` or, if that fails, `Exited`."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL, to it and to all that it started in its session."""


@dataclass(frozen=True, slots=True)
class Fell:
    """It ended unasked: to be remembered. `was_ready`: it had been ready in this life."""

    pid: int
    how: str
    was_ready: bool


@dataclass(frozen=True, slots=True)
class Tell:
    """A line for people; it reads after the process's name."""

    text: str


Effect = Spawn | Terminate | Kill | Fell | Tell
Outcome = tuple[Life, tuple[Effect, ...]]
