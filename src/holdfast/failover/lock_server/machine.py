"""Decides which client holds a lock server's lock: a state machine without I/O or clock.

Theory. The holder's connection is the lock. When the client or its kernel closes the connection, the client is dead or
has released the lock, so the first waiter gets it at once. Two things end a connection without proving that: the
server's own restart, and a broken network (a reset, a host that does not answer). After those the server waits one
window for the recorded holder (*awaited*): only the holder may return, by its id. The holder's own bound is shorter
than the window (client.py) and counted from an earlier moment. So the holder has stopped emitting before another client
is granted the lock.

A grant keeps the window that it was promised: after a restart the longer of the server's window and the recorded one
applies.

The record is the only evidence of the holder:

- If it cannot be read, the holder is *unknown*: for a full window no client is granted the lock. A client that claims
  to hold it gets `LOST` at once, because two clients might claim that, and stops emitting now and not at its bound.
  Only a bad disk or a manual edit makes the file unreadable; it costs one failover.
- If it is missing, the lock was not held (a first start). If an operator removes the file of a held lock and restarts
  the server, the lock is free at once. The old holder learns of it when it returns. Until its bound there can be two
  holders, of which the vault admits one (facts 4d).

`TABLE` has the answer to every request for the lock.

Always true: at most one connection holds the lock; an ended connection is granted nothing; a new grant's record is
saved before the grant is sent; grant numbers grow as long as the record exists; within a window only the awaited holder
is granted the lock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

# A lock's waiters are one engine's standbys; hundreds mean that a client asks in a loop. It also keeps steps short.
WAITERS_MAX = 256

# Why a connection is refused the lock.
LOST = "Lost"  # it claims a grant that is not, or not provably, its own
TOO_MANY = "TooMany"
BUSY = "Busy"


class Client(msgspec.Struct, frozen=True, rename={"engine": "who"}):
    """A connected client. Decisions use `id` only; the rest is for logs."""

    id: str
    engine: str  # stored as `who`
    pid: int = 0
    start_ticks: int = 0


class Grant(msgspec.Struct, frozen=True):
    """The lock as held by a client. `window_s` is the window promised to the holder; a later server keeps it."""

    number: int
    client: Client
    since_unix_s: float
    window_s: float


class ElectionRecord(msgspec.Struct, frozen=True):
    """What a restarted server must know: the last grant's number, and the current grant, if there is one."""

    last_grant: int
    grant: Grant | None


# -- events


@dataclass(frozen=True, slots=True)
class Acquire:
    """A connection asks for the lock. `grant` is the number of the grant that it claims to hold, else 0."""

    connection: int
    client: Client
    grant: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """A connection gives up the lock or its position in the queue. Never refused: a grant may be on its way to it."""

    connection: int


@dataclass(frozen=True, slots=True)
class ClientEnded:
    """The connection has ended. `sure`: the client's own kernel closed it, so the client is dead or has released the
    lock."""

    connection: int
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Acquire | Release | ClientEnded | Tick


# -- effects


@dataclass(frozen=True, slots=True)
class Save:
    """Make the record durable. Always the first effect: a restart must not forget what a client was told."""

    record: ElectionRecord


@dataclass(frozen=True, slots=True)
class GrantTo:
    """Send the grant. `back`: it is the same grant, and its holder has returned."""

    connection: int
    grant: Grant
    back: bool
    waited_s: float


@dataclass(frozen=True, slots=True)
class GrantFreed:
    """Log that a grant has ended."""

    grant: Grant
    why: str
    held_s: float


@dataclass(frozen=True, slots=True)
class Missing:
    """Log that the holder's connection broke; until `until_s` only the holder may return."""

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
class DropClient:
    """Close this connection: the holder has another one now."""

    connection: int


Effect = Save | GrantTo | GrantFreed | Missing | Refuse | ConfirmRelease | DropClient

# -- the state, and the table of answers


class Situation(StrEnum):
    FREE = "free"
    HELD = "held"
    AWAITED = "awaited"  # the holder is disconnected; until the window ends only it may return
    UNKNOWN = "unknown"  # the record is unreadable; until the window ends no client is granted the lock


class ElectionClaim(StrEnum):
    NEW = "new"  # claims no grant, and is not the recorded holder
    OWN = "own"  # the recorded holder, by its id; if it names a grant, it is the recorded one
    STALE = "stale"  # claims a grant that is not recorded as its own


class ElectionAnswer(StrEnum):
    GRANT = "grant"
    WAIT = "wait"
    BACK = "back"  # the same grant, from now on through this connection
    LOST = "lost"


TABLE: dict[tuple[Situation, ElectionClaim], ElectionAnswer] = {
    (Situation.FREE, ElectionClaim.NEW): ElectionAnswer.GRANT,
    (Situation.FREE, ElectionClaim.STALE): ElectionAnswer.LOST,
    (Situation.HELD, ElectionClaim.NEW): ElectionAnswer.WAIT,
    (Situation.HELD, ElectionClaim.OWN): ElectionAnswer.BACK,
    (Situation.HELD, ElectionClaim.STALE): ElectionAnswer.LOST,
    (Situation.AWAITED, ElectionClaim.NEW): ElectionAnswer.WAIT,
    (Situation.AWAITED, ElectionClaim.OWN): ElectionAnswer.BACK,
    (Situation.AWAITED, ElectionClaim.STALE): ElectionAnswer.LOST,
    (Situation.UNKNOWN, ElectionClaim.NEW): ElectionAnswer.WAIT,
    (Situation.UNKNOWN, ElectionClaim.STALE): ElectionAnswer.LOST,
}


@dataclass(frozen=True, slots=True)
class Waiter:
    connection: int
    client: Client
    since_s: float


@dataclass(frozen=True, slots=True)
class LockState:
    """The state of one lock."""

    window_s: float
    unix_at_zero_s: float  # wall time when the machine's time was 0: for logs
    last_grant: int = 0
    grant: Grant | None = None
    connection: int | None = None  # the holder's
    until_s: float | None = None
    waiters: tuple[Waiter, ...] = ()

    def __post_init__(self) -> None:
        assert self.connection is None or self.grant is not None, "a holder without a grant"
        assert (self.until_s is not None) == (self.situation in (Situation.AWAITED, Situation.UNKNOWN)), f"{self!r}"

    def __repr__(self) -> str:
        holder = f" by {self.grant.client.engine}, grant {self.grant.number}" if self.grant is not None else ""
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
    def record(self) -> ElectionRecord | None:
        """Return what must be on disk for a restart; None: keep what is there."""
        return None if self.situation is Situation.UNKNOWN else ElectionRecord(self.last_grant, self.grant)

    def holds(self, connection: int) -> bool:
        return self.connection == connection

    def has(self, connection: int) -> bool:
        return self.holds(connection) or any(waiter.connection == connection for waiter in self.waiters)


def claim_of(state: LockState, client: Client, grant: int) -> ElectionClaim:
    if state.grant is not None and state.grant.client.id == client.id and grant in (0, state.grant.number):
        return ElectionClaim.OWN
    return ElectionClaim.NEW if grant == 0 else ElectionClaim.STALE


# -- steps


Step = tuple[LockState, tuple[Effect, ...]]


def begin(record: ElectionRecord | None, readable: bool, window_s: float, now_s: float, unix_s: float) -> LockState:
    """Return a new server's state from the record on disk. `record` None and `readable`: there was none."""
    state = LockState(window_s, unix_s - now_s)
    if not readable:
        return replace(state, until_s=now_s + window_s)
    if record is None:
        return state
    grant = record.grant
    until_s = None if grant is None else now_s + max(window_s, grant.window_s)
    return replace(state, last_grant=record.last_grant, grant=grant, until_s=until_s)


def next_deadline_s(state: LockState) -> float | None:
    """Return when a `Tick` is due if no event comes before."""
    return state.until_s


def step(state: LockState, event: Event, now_s: float) -> Step:
    """Return the state after an event, and the effects to carry out, in order."""
    before = state.record
    state, passed = _end_window(state, now_s)
    state, applied = _apply(state, event, now_s)
    state, granted = _grant_next(state, now_s)
    after = state.record
    saved = (Save(after),) if after is not None and after != before else ()
    return state, saved + passed + applied + granted


def _end_window(state: LockState, now_s: float) -> Step:
    if state.until_s is None or now_s < state.until_s:
        return state, ()
    freed = () if state.grant is None else (_freed(state, state.grant, "did not come back", now_s),)
    return replace(state, grant=None, until_s=None), freed


def _apply(state: LockState, event: Event, now_s: float) -> Step:
    match event:
        case Acquire():
            return _acquire(state, event, now_s)
        case Release():
            state, freed = _leave(state, event.connection, "released", now_s)
            return state, (*freed, ConfirmRelease(event.connection))
        case ClientEnded():
            if state.holds(event.connection) and not event.sure:
                return _await_holder(state, now_s)
            return _leave(state, event.connection, "gone", now_s)
        case Tick():
            return state, ()


def _acquire(state: LockState, event: Acquire, now_s: float) -> Step:
    if state.has(event.connection):
        return state, (Refuse(event.connection, BUSY, "this connection holds the lock or waits for it already"),)
    waiter = Waiter(event.connection, event.client, now_s)
    match TABLE[state.situation, claim_of(state, event.client, event.grant)]:
        case ElectionAnswer.GRANT:
            return _grant(state, waiter, now_s)
        case ElectionAnswer.WAIT if len(state.waiters) < WAITERS_MAX:
            return replace(state, waiters=(*state.waiters, waiter)), ()
        case ElectionAnswer.WAIT:
            return state, (Refuse(event.connection, TOO_MANY, f"{WAITERS_MAX} wait here already"),)
        case ElectionAnswer.BACK:
            return _come_back(state, event.connection)
        case ElectionAnswer.LOST:
            return state, (Refuse(event.connection, LOST, _why_lost(state, event.grant)),)


def _grant(state: LockState, waiter: Waiter, now_s: float) -> Step:
    assert state.situation is Situation.FREE, f"two holders: {state!r}"
    grant = Grant(state.last_grant + 1, waiter.client, state.unix_at_zero_s + now_s, state.window_s)
    state = replace(state, last_grant=grant.number, grant=grant, connection=waiter.connection)
    return state, (GrantTo(waiter.connection, grant, back=False, waited_s=now_s - waiter.since_s),)


def _come_back(state: LockState, connection: int) -> Step:
    assert state.grant is not None
    dropped = () if state.connection is None else (DropClient(state.connection),)
    back = GrantTo(connection, state.grant, back=True, waited_s=0.0)
    return replace(state, connection=connection, until_s=None), (*dropped, back)


def _await_holder(state: LockState, now_s: float) -> Step:
    assert state.grant is not None
    until_s = now_s + max(state.window_s, state.grant.window_s)
    return replace(state, connection=None, until_s=until_s), (Missing(state.grant, until_s),)


def _leave(state: LockState, connection: int, why: str, now_s: float) -> Step:
    if state.holds(connection):
        assert state.grant is not None
        return replace(state, grant=None, connection=None), (_freed(state, state.grant, why, now_s),)
    return replace(state, waiters=tuple(w for w in state.waiters if w.connection != connection)), ()


def _grant_next(state: LockState, now_s: float) -> Step:
    if state.situation is not Situation.FREE or not state.waiters:
        return state, ()
    first, *others = state.waiters
    return _grant(replace(state, waiters=tuple(others)), first, now_s)


def _freed(state: LockState, grant: Grant, why: str, now_s: float) -> GrantFreed:
    return GrantFreed(grant, why, state.unix_at_zero_s + now_s - grant.since_unix_s)


def _why_lost(state: LockState, number: int) -> str:
    if state.situation is Situation.UNKNOWN:
        return f"grant {number} cannot be verified: this server's record could not be read"
    if state.situation is Situation.FREE:
        return f"grant {number} is not on record here"
    assert state.grant is not None
    return f"grant {state.grant.number} of {state.grant.client.engine} stands here, not grant {number}"
