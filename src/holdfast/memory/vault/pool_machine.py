"""Who may own the KV pool of one device, and when its predecessors are fenced: a pure machine, no I/O, no clock.

Theory (facts 1, 4a, 4b). The pool outlives its owner: ABSENT, OWNED(epoch), ORPHANED. The election decides who should
own it and gives each winner a larger epoch; the vault admits. Every process that maps the device has a *seat*: its
connection, its pidfd and the epoch it works under, if any. The *CPU fence* of an epoch has passed when every seat of
an earlier epoch has closed its connection or quiesced: nothing new can be queued. The *GPU fence* has passed when the
processes of those seats are over too: nothing queued is left to land. A grant waits for the CPU fence; if a pool must
be made (none is there, or another geometry), for the GPU fence as well. Never for a time: a frozen owner that is still
connected keeps the newcomer waiting until the newcomer's own deadline; killing it is the supervisor's business.

A seat is taken under an epoch only while that epoch's owner is there, so once orphaned the seats that hold a fence
closed can only become fewer. A pool counts as adoptable once its owner has said that it is complete; from then on it is
known by the epoch it was *made* under, through all its owners, so whoever mapped it ahead knows whether it still is it.

Always true: granted epochs strictly grow; at most one owner; no grant while a seat of an earlier epoch is connected
and has not quiesced; for each grant the CPU fence comes first and the GPU fence at most once, after it; a seat without
epoch (a standby) fences nobody; a total loss forgets the seats, so only the owner itself may donate its pool, and has
some time for it before another one is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from holdfast.memory.protocol import DROPPED, GRANTED, MADE, OWNER_GONE, PoolNews

# An election has one winner; a few that lost it may not know yet.
WAITERS_MAX = 64
# Ranks, helpers and standbys of a few engines; a process that never ends keeps its seat, so they are counted.
SEATS_MAX = 1024


class Code(StrEnum):
    """Why something is refused."""

    STALE_EPOCH = "stale_epoch"  # not newer than one already granted, or no longer the owner's
    NOT_GRANTED = "not_granted"  # an epoch that owns nothing yet
    NOT_OWNER = "not_owner"
    NOT_REGISTERED = "not_registered"  # the session has named no process that maps the device
    BUSY = "busy"  # the session waits, owns, or has mapped under an epoch it has not quiesced
    POOL_HERE = "pool_here"  # a donation where a pool is
    TOO_MANY = "too_many"


# -- events


class _Word(msgspec.Struct, frozen=True):
    """What the machine is told, or tells."""


class _OfSession(_Word, frozen=True):
    session: int


class MapperJoined(_OfSession, frozen=True):
    """A process maps the device. Without an epoch it is a standby, which queues no work on the pool's pages.

    A session names its process before it acquires, and one connection may name several. Ranks and helpers of the owner
    join under its epoch and are acknowledged before they touch a page.
    """

    epoch: int | None
    process: int


class Acquire(_OfSession, frozen=True):
    """The election's winner asks for the pool."""

    epoch: int
    geometry_hash: str
    deadline_s: float


class PoolMade(_OfSession, frozen=True):
    """The owner's fresh pool is complete, its pages and index recorded: from now on it can be adopted."""

    epoch: int


class Donate(_OfSession, frozen=True):
    """After vault and keeper both died: the owner, alive all the time, gives its pool back and goes on owning it."""

    epoch: int
    geometry_hash: str
    made_epoch: int  # under which its pages were made


class Quiesced(_OfSession, frozen=True):
    """The session's processes have drained the device and dropped write access (planned handover)."""

    epoch: int


class Cancel(_OfSession, frozen=True):
    """Stop waiting; never refused, since it may cross an answer on its way. A grant is given back by `Quiesced`."""


class Gone(_OfSession, frozen=True):
    """The connection ended: no thread of whoever held it runs any more (facts 4b)."""


class ProcessOver(_Word, frozen=True):
    """The pidfd is readable: what the process had queued on the GPU is over (facts 1, 4a)."""

    process: int


class Discard(_Word, frozen=True):
    """The device's memory is wanted back: a pool that nobody owns, and nobody works on, goes. Any other stays."""


class Tick(_Word, frozen=True):
    """Time has passed."""


Event = MapperJoined | Acquire | PoolMade | Donate | Quiesced | Cancel | Gone | ProcessOver | Discard | Tick


# -- effects


class CpuFence(_OfSession, frozen=True):
    """Nobody who mapped under an earlier epoch can queue work any more. Always just before the grant."""

    epoch: int


class GrantPool(_OfSession, frozen=True):
    """The pool is this session's: the one made under `made_epoch`, or (0) one it is to make, past both fences."""

    epoch: int
    made_epoch: int

    @property
    def adopt(self) -> bool:
        return self.made_epoch > 0


class Made(_Word, frozen=True):
    """The pool made under this epoch is complete: it can be mapped, and adopted later."""

    epoch: int


class GpuFence(_OfSession, frozen=True):
    """What they had queued is over too: blocks that were open, and direct memory, are usable again. After the grant."""

    epoch: int


class Orphaned(_Word, frozen=True):
    """The owner has ended or stepped back; pages and index stay, if the pool was complete (else `DropPool` follows)."""

    epoch: int


class DropPool(_Word, frozen=True):
    """Drop pages, index and record: another geometry takes over, the owner ended before the pool was complete, or
    their memory is wanted back."""

    epoch: int


class Refuse(_OfSession, frozen=True):
    code: Code
    reason: str


class TimedOut(_OfSession, frozen=True):
    """Its deadline has come, and it waits no longer."""


Effect = CpuFence | GrantPool | Made | GpuFence | Orphaned | DropPool | Refuse | TimedOut

# -- the state


@dataclass(frozen=True, slots=True)
class Seat:
    """One process on one connection. A seat with an epoch stays until it has quiesced, or is closed *and* over."""

    session: int
    process: int
    epoch: int | None = None
    closed: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True)
class Pages:
    geometry_hash: str
    made_epoch: int = 0  # under which they were made; 0: not complete yet (no epoch that is granted is 0)

    @property
    def made(self) -> bool:
        return self.made_epoch > 0


@dataclass(frozen=True, slots=True, repr=False)
class Pool:
    """The state. `last_epoch` is the last one granted; it is the owner's while there is an owner."""

    last_epoch: int = 0
    pages: Pages | None = None
    owner: int | None = None
    gpu_fence_told: bool = False  # to this owner
    seats: tuple[Seat, ...] = ()
    waiters: tuple[Acquire, ...] = ()
    refill_from_s: float = 0.0  # after a total loss no fresh pool is granted before; 0: no such wait

    def __repr__(self) -> str:
        fence = "" if self.owner is None else f", gpu fence {'passed' if self.gpu_fence_told else 'pending'}"
        mapped = sum(not seat.closed for seat in self.seats)
        return f"{self.phase}{fence}, {mapped} mappers, {len(self.seats) - mapped} ending, {len(self.waiters)} waiting"

    @property
    def phase(self) -> str:
        if self.owner is not None:
            return f"OWNED({self.last_epoch})"
        return "ABSENT" if self.pages is None else f"ORPHANED({self.last_epoch})"

    def cpu_blockers(self, epoch: int) -> tuple[Seat, ...]:
        """Who keeps the CPU fence of an epoch closed."""
        return tuple(s for s in self.seats if s.epoch is not None and s.epoch < epoch and not s.closed)

    def gpu_blockers(self, epoch: int) -> tuple[Seat, ...]:
        """Who keeps the GPU fence closed: a seat that is connected, or whose process is not over."""
        return tuple(s for s in self.seats if s.epoch is not None and s.epoch < epoch)

    def in_use(self) -> tuple[Seat, ...]:
        """Who owns the pool, or may have work queued on it."""
        return self.gpu_blockers(self.last_epoch + 1)

    def epoch_of(self, session: int) -> int | None:
        """The epoch a session works under."""
        return next((s.epoch for s in self.seats if s.session == session and s.epoch is not None), None)


# -- steps


Step = tuple[Pool, tuple[Effect, ...]]


def restore(
    last_epoch: int, pages: Pages | None, owner: int | None, seats: Iterable[Seat], refill_from_s: float = 0.0
) -> Step:
    """A new vault's state from the keeper's records. A seat listed here is kept until its `Gone` and `ProcessOver`.

    With `refill_from_s` all was lost: until then an owner that lives may give its pool back, and none is made anew.
    The owner is told again that the GPU fence has passed, by the first step after it has: step a `Tick` next.
    """
    state = _sweep(Pool(last_epoch, pages, owner, seats=tuple(seats), refill_from_s=refill_from_s))
    assert owner is None or state.epoch_of(owner) == last_epoch, "the owner has no seat under its epoch"
    if owner is None and pages is not None and not pages.made:
        return replace(state, pages=None), (DropPool(last_epoch),)
    return state, ()


def next_deadline_s(state: Pool) -> float | None:
    """When a `Tick` is due, if nothing else happens before."""
    refill = (state.refill_from_s,) if state.waiters and state.refill_from_s else ()
    return min((*refill, *(waiter.deadline_s for waiter in state.waiters)), default=None)


def step(state: Pool, event: Event, now_s: float) -> Step:
    """What becomes of an event. Effects are to be carried out in their order."""
    if state.refill_from_s <= now_s:
        state = replace(state, refill_from_s=0.0)
    state, applied = _apply(state, event)
    # Past its deadline nobody is granted anything; but who asks with no time at all is still judged once.
    state, late = _expire(state, now_s, spare=event if isinstance(event, Acquire) else None)
    state, granted = _grant(state)
    state, expired = _expire(state, now_s)
    state, fenced = _tell_gpu_fence(state)
    return state, applied + late + granted + expired + fenced


def _apply(state: Pool, event: Event) -> Step:
    match event:
        case MapperJoined():
            return _join(state, event)
        case Acquire():
            return _acquire(state, event)
        case PoolMade():
            return _made(state, event)
        case Donate():
            return _donate(state, event)
        case Quiesced():
            return _quiesce(state, event)
        case Cancel():
            return replace(state, waiters=_without(state.waiters, event.session)), ()
        case Gone():
            return _gone(state, event.session)
        case ProcessOver():
            seats = tuple(replace(s, over=True) if s.process == event.process else s for s in state.seats)
            return _sweep(replace(state, seats=seats)), ()
        case Discard():
            if state.pages is None or state.in_use():
                return state, ()
            return replace(state, pages=None), (DropPool(state.last_epoch),)
        case Tick():
            return state, ()


def _without(waiters: tuple[Acquire, ...], session: int) -> tuple[Acquire, ...]:
    return tuple(waiter for waiter in waiters if waiter.session != session)


def _sweep(state: Pool) -> Pool:
    """Seats that fence nobody any more go."""
    return replace(state, seats=tuple(s for s in state.seats if not s.closed or (s.epoch is not None and not s.over)))


# -- seats


def _join(state: Pool, event: MapperJoined) -> Step:
    session, epoch = event.session, event.epoch
    if epoch is not None and epoch > state.last_epoch:
        return state, (Refuse(session, Code.NOT_GRANTED, f"epoch {epoch} owns nothing yet"),)
    if epoch is not None and (state.owner is None or epoch < state.last_epoch):
        return state, (Refuse(session, Code.STALE_EPOCH, f"epoch {epoch} is over: {state.phase}"),)
    if epoch is not None and any(waiter.session == session for waiter in state.waiters):
        # It would keep closed the very fence it waits for.
        return state, (Refuse(session, Code.BUSY, "this session waits for an epoch of its own"),)
    # A session works under one epoch with everything it maps.
    epoch = state.epoch_of(session) if epoch is None else epoch
    seats = tuple(replace(s, epoch=epoch) if s.session == session else s for s in state.seats)
    if all((s.session, s.process) != (session, event.process) for s in seats):
        seats = (*seats, Seat(session, event.process, epoch))
    if len(seats) > SEATS_MAX:
        return state, (Refuse(session, Code.TOO_MANY, f"{SEATS_MAX} processes map this device already"),)
    return replace(state, seats=seats), ()


def _quiesce(state: Pool, event: Quiesced) -> Step:
    """A process vouches for its own queue: for this connection, and for those it has closed."""
    session, epoch = event.session, event.epoch
    processes = {seat.process for seat in state.seats if seat.session == session}
    if not processes:
        return state, (Refuse(session, Code.NOT_REGISTERED, "this session maps nothing"),)
    if (works_under := state.epoch_of(session)) not in (None, epoch):
        return state, (Refuse(session, Code.STALE_EPOCH, f"this session works under epoch {works_under}"),)
    seats = tuple(
        replace(s, epoch=None)
        if s.epoch == epoch and (s.session == session or (s.closed and s.process in processes))
        else s
        for s in state.seats
    )
    return _orphan(_sweep(replace(state, seats=seats)), session)


def _gone(state: Pool, session: int) -> Step:
    seats = tuple(replace(s, closed=True) if s.session == session else s for s in state.seats)
    state = _sweep(replace(state, seats=seats, waiters=_without(state.waiters, session)))
    return _orphan(state, session)


def _orphan(state: Pool, session: int) -> Step:
    """If it was the owner that ended: the pool stays if it was complete."""
    if state.owner != session:
        return state, ()
    orphaned = Orphaned(state.last_epoch)
    if state.pages is not None and state.pages.made:
        return replace(state, owner=None), (orphaned,)
    return replace(state, owner=None, pages=None), (orphaned, DropPool(state.last_epoch))


# -- ownership


def _refusal(state: Pool, session: int, epoch: int, donated: int | None = None) -> Refuse | None:
    """Why an epoch is not to be had; a donor may still be known to work under the one it owns."""
    if all(seat.session != session for seat in state.seats):
        return Refuse(session, Code.NOT_REGISTERED, "name the process that maps the device first")
    if any(waiter.session == session for waiter in state.waiters):
        return Refuse(session, Code.BUSY, "this session waits already")
    if (works_under := state.epoch_of(session)) not in (None, donated):
        return Refuse(session, Code.BUSY, f"this session works under epoch {works_under}: quiesce first")
    if epoch <= state.last_epoch:
        return Refuse(session, Code.STALE_EPOCH, f"epoch {epoch} is not newer than {state.last_epoch}")
    return None


def _acquire(state: Pool, event: Acquire) -> Step:
    refusal = _refusal(state, event.session, event.epoch)
    if refusal is None and len(state.waiters) >= WAITERS_MAX:
        refusal = Refuse(event.session, Code.TOO_MANY, f"{WAITERS_MAX} sessions wait for the pool already")
    if refusal is not None:
        return state, (refusal,)
    return replace(state, waiters=(*state.waiters, event)), ()


def _made(state: Pool, event: PoolMade) -> Step:
    if state.owner != event.session or state.last_epoch != event.epoch or state.pages is None:
        return state, (Refuse(event.session, Code.NOT_OWNER, f"the pool is {state.phase}"),)
    if state.pages.made:
        return state, ()  # it stays the pool that it is
    return replace(state, pages=replace(state.pages, made_epoch=event.epoch)), (Made(event.epoch),)


def _donate(state: Pool, event: Donate) -> Step:
    refusal = _refusal(state, event.session, event.epoch, donated=event.epoch)
    if refusal is None and (state.pages is not None or state.cpu_blockers(event.epoch)):
        refusal = Refuse(event.session, Code.POOL_HERE, f"another pool is here: {state.phase}")
    if refusal is None and not 0 < event.made_epoch <= event.epoch:
        refusal = Refuse(event.session, Code.NOT_GRANTED, f"epoch {event.made_epoch} made no pool of {event.epoch}")
    if refusal is not None:
        return state, (refusal,)
    pages = Pages(event.geometry_hash, event.made_epoch)
    state, effects = _become_owned(state, event.session, event.epoch, pages)
    return state, (*effects, Made(event.made_epoch))


def _expire(state: Pool, now_s: float, spare: Acquire | None = None) -> Step:
    late = tuple(w for w in state.waiters if w.deadline_s <= now_s and w is not spare)
    waiters = tuple(w for w in state.waiters if w.deadline_s > now_s or w is spare)
    return replace(state, waiters=waiters), tuple(TimedOut(waiter.session) for waiter in late)


def _grant(state: Pool) -> Step:
    """The largest epoch is the election's last word: only its asker is considered."""
    top = max(state.waiters, key=lambda waiter: waiter.epoch, default=None)
    if top is None or state.cpu_blockers(top.epoch):
        return state, ()
    pages = state.pages
    dropped: tuple[Effect, ...] = ()
    if pages is None or pages.geometry_hash != top.geometry_hash:
        # A new pool needs memory that the dead still hold, and what they queued must not land in it (facts 1, 4b).
        if state.gpu_blockers(top.epoch) or state.refill_from_s:
            return state, ()
        dropped = () if pages is None else (DropPool(state.last_epoch),)
        pages = Pages(top.geometry_hash)
    state = replace(state, waiters=_without(state.waiters, top.session))
    state, granted = _become_owned(state, top.session, top.epoch, pages)
    return state, (*dropped, *granted)


def _become_owned(state: Pool, session: int, epoch: int, pages: Pages) -> Step:
    assert state.owner is None, f"two owners: {state!r}"
    assert epoch > state.last_epoch, f"epoch {epoch} after {state!r}"
    seats = tuple(replace(s, epoch=epoch) if s.session == session else s for s in state.seats)
    state = replace(state, last_epoch=epoch, pages=pages, owner=session, seats=seats)
    state = replace(state, gpu_fence_told=False, refill_from_s=0.0)
    stale = tuple(waiter for waiter in state.waiters if waiter.epoch <= epoch)
    state = replace(state, waiters=tuple(waiter for waiter in state.waiters if waiter.epoch > epoch))
    refusals = (Refuse(w.session, Code.STALE_EPOCH, f"epoch {w.epoch} is not newer than {epoch}") for w in stale)
    return state, (CpuFence(session, epoch), GrantPool(session, epoch, pages.made_epoch), *refusals)


def _tell_gpu_fence(state: Pool) -> Step:
    if state.owner is None or state.gpu_fence_told or state.gpu_blockers(state.last_epoch):
        return state, ()
    return replace(state, gpu_fence_told=True), (GpuFence(state.owner, state.last_epoch),)


# -- what everyone who maps the device is told


def news_of(effect: Effect) -> PoolNews | None:
    match effect:
        case Orphaned(epoch):
            return PoolNews(OWNER_GONE, epoch)
        case DropPool(epoch):
            return PoolNews(DROPPED, epoch)
        case GrantPool(_, epoch):
            return PoolNews(GRANTED, epoch)
        case Made(epoch):
            return PoolNews(MADE, epoch)
        case _:
            return None


def missed(state: Pool) -> tuple[PoolNews, ...]:
    """All that matters of what one who comes now, or comes back, has not heard, in the order it happened.

    A vault that never granted anything says nothing: after a total loss the owner may still give its pool back.
    """
    if not state.last_epoch:
        return ()
    pages, epoch = state.pages, state.last_epoch
    pool = (PoolNews(MADE, pages.made_epoch),) if pages is not None and pages.made else ()
    if state.owner is not None:
        return PoolNews(GRANTED, epoch), *pool
    return (*pool, PoolNews(OWNER_GONE, epoch)) if pool else (PoolNews(OWNER_GONE, epoch), PoolNews(DROPPED, epoch))
