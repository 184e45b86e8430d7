"""Who has the lock that a lock server keeps: a pure machine, no I/O, no clock.

Theory. The holder's connection is the lock: when it ends, the next waiter in line is granted at once, for a client
whose kernel has closed the connection is dead or has let go. Two things end a connection without proving that:
the server's own restart, and a broken network (a reset, a host that does not answer). After those the holder on
record is *awaited* for a window, in which it alone may come back, by its id; its own bound is shorter than that
window (client.py) and is counted from an earlier moment, so it has stopped emitting before anyone else is granted.

What was promised to a holder outlives the server's settings: after a restart the window is the longer of the server's
own and the one on record.

The record is the only witness. If it cannot be read the holder is *unknown*: a full window in which nobody is granted,
not even who says it held the lock, for its word is all there is, and two may give it. Who says so is told at once that
the lock is lost, so it stops emitting now and not at its bound. A server's own writes never leave such a file; it
takes a bad disk or somebody's hand, and costs one failover. A record that is not there means that nobody held the lock
(a first start). Whoever removes the file of a held lock and restarts the server makes it free at once: the holder is
told that it has lost the lock when it comes back, but for up to its bound there can be two holders, of which the vault
admits one (facts 4d).

`TABLE` is the whole of admission.

Always true: at most one connection holds; a connection that ended is granted nothing; a new grant's record is saved
before it is told; grant numbers grow while the record lives; inside a window nobody is granted but who is awaited.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

# A lock's waiters are one engine's standbys; past some hundreds somebody asks in a loop, and each step stays short.
WAITERS_MAX = 256

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

# -- the state, and the table of who is answered what


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


# -- steps


Step = tuple[LockState, tuple[Effect, ...]]


def begin(record: Record | None, readable: bool, window_s: float, now_s: float, unix_s: float) -> LockState:
    """A new server's state from what was found on disk. `record` None and `readable`: there was none."""
    state = LockState(window_s, unix_s - now_s)
    if not readable:
        return replace(state, until_s=now_s + window_s)
    if record is None:
        return state
    grant = record.grant
    until_s = None if grant is None else now_s + max(window_s, grant.window_s)
    return replace(state, last_grant=record.last_grant, grant=grant, until_s=until_s)


def next_deadline_s(state: LockState) -> float | None:
    """When a `Tick` is due, if nothing else happens before."""
    return state.until_s


def step(state: LockState, event: Event, now_s: float) -> Step:
    """What becomes of an event. Effects are to be carried out in their order."""
    before = state.record
    state, passed = _end_window(state, now_s)
    state, applied = _apply(state, event, now_s)
    state, granted = _settle(state, now_s)
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
        case Ended():
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
        case Answer.GRANT:
            return _grant(state, waiter, now_s)
        case Answer.WAIT if len(state.waiters) < WAITERS_MAX:
            return replace(state, waiters=(*state.waiters, waiter)), ()
        case Answer.WAIT:
            return state, (Refuse(event.connection, TOO_MANY, f"{WAITERS_MAX} wait here already"),)
        case Answer.BACK:
            return _come_back(state, event.connection)
        case Answer.LOST:
            return state, (Refuse(event.connection, LOST, _why_lost(state, event.grant)),)


def _grant(state: LockState, waiter: Waiter, now_s: float) -> Step:
    assert state.situation is Situation.FREE, f"two holders: {state!r}"
    grant = Grant(state.last_grant + 1, waiter.client, state.unix_at_zero_s + now_s, state.window_s)
    state = replace(state, last_grant=grant.number, grant=grant, connection=waiter.connection)
    return state, (GrantTo(waiter.connection, grant, back=False, waited_s=now_s - waiter.since_s),)


def _come_back(state: LockState, connection: int) -> Step:
    assert state.grant is not None
    dropped = () if state.connection is None else (Drop(state.connection),)
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


def _settle(state: LockState, now_s: float) -> Step:
    if state.situation is not Situation.FREE or not state.waiters:
        return state, ()
    first, *others = state.waiters
    return _grant(replace(state, waiters=tuple(others)), first, now_s)


def _freed(state: LockState, grant: Grant, why: str, now_s: float) -> Freed:
    return Freed(grant, why, state.unix_at_zero_s + now_s - grant.since_unix_s)


def _why_lost(state: LockState, number: int) -> str:
    if state.situation is Situation.UNKNOWN:
        return f"grant {number} cannot be verified: this server's record could not be read"
    if state.situation is Situation.FREE:
        return f"grant {number} is not on record here"
    assert state.grant is not None
    return f"grant {state.grant.number} of {state.grant.client.who} stands here, not grant {number}"
