"""What is said to and by the lock machine of the weights (weights_machine.py): events and effects, nothing else.

Always true: a session is one client connection, by number; deadlines are points in the time that `step` is given;
an event to which no `Refuse` for its session is among the effects, was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Mode = Literal["rw", "ro", "rw_or_ro", "drop"]


class Code(StrEnum):
    """Why something is refused."""

    COMMITTED = "committed"  # rw without `replace` on committed weights
    STALE = "stale"  # the hash it was about is not, or no longer, the current one
    BUSY = "busy"  # the session waits or holds something already
    NOT_WRITER = "not_writer"
    TOO_MANY = "too_many"
    BAD_REQUEST = "bad_request"


# -- events


@dataclass(frozen=True, slots=True)
class Ask:
    """A session asks for a lock. `wait_for_writer`: an `ro` stays where it would else be answered EMPTY. With `drop` it
    asks for an empty device instead: what is named in `replace` is to go, since a new one does not fit beside it."""

    session: int
    mode: Mode
    deadline_s: float
    wait_for_writer: bool = False
    replace: str | None = None  # `rw` and `drop`: the hash of the committed weights it means to replace


@dataclass(frozen=True, slots=True)
class Commit:
    """The writer is done. By now its slabs are sealed and the keeper has the record."""

    session: int
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Donate:
    """After vault and keeper both died: a session that still maps a complete generation gives it back.

    The hash was checked against the whole set. With the same weights here already it becomes one more reader.
    """

    session: int
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give up whatever the session holds or waits for; never refused, since it may cross an answer on its way."""

    session: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The connection ended."""

    session: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Ask | Commit | Donate | Release | Gone | Tick


# -- effects


@dataclass(frozen=True, slots=True)
class GrantWrite:
    session: int
    generation: int
    replacing: str | None


@dataclass(frozen=True, slots=True)
class GrantRead:
    session: int
    generation: int
    layout_hash: str


@dataclass(frozen=True, slots=True)
class AnswerEmpty:
    """Nothing is here, and nobody is writing."""

    session: int


@dataclass(frozen=True, slots=True)
class Refuse:
    session: int
    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    session: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The session's generation is the current one, and the session reads it from now on."""

    session: int
    generation: int
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """The writer ended before commit: drop its slabs. It may be gone, so this is news for the vault, not for it."""

    session: int
    generation: int


@dataclass(frozen=True, slots=True)
class Superseded:
    """To a reader of what was current until now: newer weights are here, yours stay as long as you hold them."""

    session: int
    by_hash: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """To a reader of the current weights: somebody waits for their place. Whoever can do without them lets go."""

    session: int


@dataclass(frozen=True, slots=True)
class DropGeneration:
    """Superseded or asked to go, and nobody reads it any more: drop its slabs and its record."""

    generation: int


Effect = (
    GrantWrite | GrantRead | AnswerEmpty | Refuse | TimedOut | Committed | Aborted | Superseded | LetGo | DropGeneration
)
