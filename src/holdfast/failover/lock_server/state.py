"""The lock server's state, and the table of who is answered what. Pure.

Always true: `connection` is set only with a `grant`; `until_s` only without a `connection`; nobody waits while the lock
is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.failover.lock_server.words import Client, Grant, Record


class Situation(StrEnum):
    FREE = "free"
    HELD = "held"
    AWAITED = "awaited"  # the holder is known and away; until the window ends it alone may come
    UNKNOWN = "unknown"  # there may be a holder, and nobody can say who; until the window ends nobody may come


class Claim(StrEnum):
    NEW = "new"  # holds nothing, and is not the holder on record
    OWN = "own"  # the holder on record, by its id; if it names a grant, it is the recorded one
    STALE = "stale"  # says it holds a grant that is not on record as its own


class Answer(StrEnum):
    GRANT = "grant"
    WAIT = "wait"
    BACK = "back"  # the same grant, from now on by this connection
    LOST = "lost"


TABLE: dict[tuple[Situation, Claim], Answer] = {
    (Situation.FREE, Claim.NEW): Answer.GRANT,
    (Situation.FREE, Claim.STALE): Answer.LOST,
    (Situation.HELD, Claim.NEW): Answer.WAIT,
    (Situation.HELD, Claim.OWN): Answer.BACK,
    (Situation.HELD, Claim.STALE): Answer.LOST,
    (Situation.AWAITED, Claim.NEW): Answer.WAIT,
    (Situation.AWAITED, Claim.OWN): Answer.BACK,
    (Situation.AWAITED, Claim.STALE): Answer.LOST,
    (Situation.UNKNOWN, Claim.NEW): Answer.WAIT,
    (Situation.UNKNOWN, Claim.STALE): Answer.LOST,
}


@dataclass(frozen=True, slots=True)
class Waiter:
    connection: int
    client: Client
    since_s: float


@dataclass(frozen=True, slots=True)
class LockState:
    """Everything one lock server decides by."""

    window_s: float
    unix_at_zero_s: float  # wall time when the machine's time was 0: for people
    last_grant: int = 0
    grant: Grant | None = None
    connection: int | None = None  # the holder's
    until_s: float | None = None
    waiters: tuple[Waiter, ...] = ()

    def __post_init__(self) -> None:
        assert self.connection is None or self.grant is not None, "a holder without a grant"
        assert (self.until_s is not None) == (self.situation in (Situation.AWAITED, Situation.UNKNOWN)), f"{self!r}"

    def __repr__(self) -> str:
        holder = f" by {self.grant.client.who}, grant {self.grant.number}" if self.grant is not None else ""
        until = f" until {self.until_s:.1f}" if self.until_s is not None else ""
        return f"{self.situation.upper()}{holder}{until}, {len(self.waiters)} waiting"

    @property
    def situation(self) -> Situation:
        if self.connection is not None:
            return Situation.HELD
        if self.grant is not None:
            return Situation.AWAITED
        return Situation.FREE if self.until_s is None else Situation.UNKNOWN

    @property
    def record(self) -> Record | None:
        """What a restart must find; None: what is on disk already is all that can be said."""
        return None if self.situation is Situation.UNKNOWN else Record(self.last_grant, self.grant)

    def holds(self, connection: int) -> bool:
        return self.connection == connection

    def has(self, connection: int) -> bool:
        return self.holds(connection) or any(waiter.connection == connection for waiter in self.waiters)


def claim_of(state: LockState, client: Client, grant: int) -> Claim:
    if state.grant is not None and state.grant.client.id == client.id and grant in (0, state.grant.number):
        return Claim.OWN
    return Claim.NEW if grant == 0 else Claim.STALE
