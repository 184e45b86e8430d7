"""What is said to and by the lock server's machine (lock_machine.py): events and effects, nothing else.

Always true: a connection is a number that is never used again; times are points in the time that `step` is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

# Why a connection is refused the lock.
LOST = "Lost"  # what it says it holds is not, or no longer, or not provably its own
TOO_MANY = "TooMany"
BUSY = "Busy"


class Client(msgspec.Struct, frozen=True):
    """Who connected. Only `id` decides anything; the rest is for people."""

    id: str
    who: str
    pid: int = 0
    start_ticks: int = 0


class Grant(msgspec.Struct, frozen=True):
    """The lock in somebody's hands. `window_s`: what its holder was promised, whatever a later server is set to."""

    number: int
    client: Client
    since_unix_s: float
    window_s: float


class Record(msgspec.Struct, frozen=True):
    """What a restarted server must know: the last number, and the grant that still stands, if one does."""

    last_grant: int
    grant: Grant | None


# -- events


@dataclass(frozen=True, slots=True)
class Acquire:
    """A connection asks for the lock. `grant`: the number under which it says it holds it already; else 0."""

    connection: int
    client: Client
    grant: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """Give up whatever the connection holds or waits for; never refused, since it may cross a grant on its way."""

    connection: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The connection is over. `sure`: the client's own kernel closed it, so the client is dead or let go."""

    connection: int
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Acquire | Release | Ended | Tick


# -- effects


@dataclass(frozen=True, slots=True)
class Save:
    """Make the record durable. Always first: nobody is told anything that a restart would forget."""

    record: Record


@dataclass(frozen=True, slots=True)
class GrantTo:
    """`back`: the holder of this same grant has come back."""

    connection: int
    grant: Grant
    back: bool
    waited_s: float


@dataclass(frozen=True, slots=True)
class Freed:
    """News for the log: a grant is over."""

    grant: Grant
    why: str
    held_s: float


@dataclass(frozen=True, slots=True)
class Missing:
    """News for the log: the holder's connection broke, and only the holder may come back until then."""

    grant: Grant
    until_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    connection: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConfirmRelease:
    connection: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The holder has another connection now: close this one."""

    connection: int


Effect = Save | GrantTo | Freed | Missing | Refuse | ConfirmRelease | Drop
