"""Decides which engine owns the KV pool of one device, and when its predecessors are fenced. A pure machine, no I/O, no
clock.

Theory (facts 1, 4a, 4b). The pool outlives its owner; it is ABSENT, OWNED(epoch) or ORPHANED. The election selects the
owner and gives each winner a larger epoch; the vault grants the pool. Every process that maps the device is a *mapper*:
it is known by its connection, its pidfd and the epoch it works under, if any.
- The *CPU fence* of an epoch has passed when every mapper of an earlier epoch has closed its connection or quiesced. No
  such process can queue new work then.
- The *GPU fence* has passed when the processes of those mappers have ended too. Then no queued work can still write.
- A grant waits for the CPU fence. If a new pool must be made (there is none, or its geometry differs), it also waits
  for the GPU fence.
- No fence passes by timeout. If a frozen owner stays connected, the new owner waits until its own request's deadline.
  Killing the frozen process is the supervisor's task.

A process can become a mapper under an epoch only while that epoch's owner exists, so no fence gets new mappers to wait
for after the owner has gone. A pool can be adopted once its owner has reported it complete. It is then identified by
the epoch it was *made* under, also under later owners, so a client that mapped it earlier can tell if it is the same.

Always true:
- Granted epochs strictly grow, and there is at most one owner.
- There is no grant while a mapper of an earlier epoch is connected and has not quiesced.
- Each grant is preceded by its CPU fence and followed by at most one GPU fence.
- A mapper without epoch (a standby) keeps no fence closed.
- If vault and keeper both died, all mappers are lost. Then only the owner may donate its pool, and it has a limited
  time before another pool is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from holdfast.memory.protocol import DROPPED, GRANTED, MADE, OWNER_GONE, PoolNews

# An election has one winner; a few losers may still be waiting because they do not know the result.
WAITERS_MAX = 64
# Ranks, helpers and standbys of a few engines. Bounded, because a process that never ends stays a mapper.
MAPPERS_MAX = 1024


class PoolRefusal(StrEnum):
    STALE_EPOCH = "stale_epoch"  # not newer than the last granted epoch, or no longer the owner's
    NOT_GRANTED = "not_granted"  # the epoch does not own the pool yet
    NOT_OWNER = "not_owner"
    NOT_REGISTERED = "not_registered"  # the session has named no process that maps the device
    BUSY = "busy"  # the session waits, owns the pool, or has mapped it under an epoch that it has not quiesced
    POOL_HERE = "pool_here"  # a donation while the vault has a pool
    TOO_MANY = "too_many"


# -- events


class _PoolMessage(msgspec.Struct, frozen=True):
    """An event or an effect of this machine."""


class _PoolSessionMessage(_PoolMessage, frozen=True):
    session: int


class MapperJoined(_PoolSessionMessage, frozen=True):
    """A process maps the device. Without an epoch it is a standby, which queues no work on the pool's pages.

    A session registers its processes before it requests the pool. Ranks and helpers of the owner join under its epoch,
    and wait for the acknowledgement before they touch a page.
    """

    epoch: int | None
    process: int


class PoolRequested(_PoolSessionMessage, frozen=True):
    """The election's winner asks for the pool."""

    epoch: int
    geometry_hash: str
    deadline_s: float


class PoolMade(_PoolSessionMessage, frozen=True):
    """The owner's new pool is complete, and its pages and index are recorded: from now on it can be adopted."""

    epoch: int


class PoolDonated(_PoolSessionMessage, frozen=True):
    """The owner, which survived the death of both vault and keeper, donates its pool and stays its owner."""

    epoch: int
    geometry_hash: str
    made_epoch: int  # the epoch under which its pages were made


class OwnerQuiesced(_PoolSessionMessage, frozen=True):
    """The session's processes have drained the device and dropped write access (planned handover)."""

    epoch: int


class CancelAcquire(_PoolSessionMessage, frozen=True):
    """Stop waiting. Never refused, because the answer may already be on its way. `OwnerQuiesced` gives back a
    grant."""


class ClientGone(_PoolSessionMessage, frozen=True):
    """The connection ended: no thread of the process that held it runs any more (facts 4b)."""


class ProcessOver(_PoolMessage, frozen=True):
    """The pidfd is readable: the process and its queued GPU work have ended (facts 1, 4a)."""

    process: int


class Discard(_PoolMessage, frozen=True):
    """The device's memory is needed: drop the pool if it has no owner and no process works on it."""


class PoolTick(_PoolMessage, frozen=True):
    """Time has passed."""


Event = (
    MapperJoined
    | PoolRequested
    | PoolMade
    | PoolDonated
    | OwnerQuiesced
    | CancelAcquire
    | ClientGone
    | ProcessOver
    | Discard
    | PoolTick
)


# -- effects


class CpuFence(_PoolSessionMessage, frozen=True):
    """No process that mapped under an earlier epoch can queue work any more. Comes just before the grant."""

    epoch: int


class GrantPool(_PoolSessionMessage, frozen=True):
    """The session owns the pool made under `made_epoch`. 0: both fences have passed, and it must make a new pool."""

    epoch: int
    made_epoch: int

    @property
    def adopt(self) -> bool:
        return self.made_epoch > 0


class TellPoolMade(_PoolMessage, frozen=True):
    """The pool made under this epoch is complete: it can be mapped, and adopted later."""

    epoch: int


class GpuFence(_PoolSessionMessage, frozen=True):
    """GPU work of earlier epochs has ended: open blocks and direct memory are usable again. Comes after the grant."""

    epoch: int


class Orphaned(_PoolMessage, frozen=True):
    """The owner has ended or quiesced. Pages and index stay if the pool was complete; else `DropPool` follows."""

    epoch: int


class DropPool(_PoolMessage, frozen=True):
    """Drop pages, index and record: the new owner has another geometry, the old owner ended before the pool was
    complete, or the memory is needed."""

    epoch: int


class RefusePool(_PoolSessionMessage, frozen=True):
    code: PoolRefusal
    reason: str


class PoolTimedOut(_PoolSessionMessage, frozen=True):
    """The request's deadline has passed; the session no longer waits."""


Effect = CpuFence | GrantPool | TellPoolMade | GpuFence | Orphaned | DropPool | RefusePool | PoolTimedOut

# -- the state


@dataclass(frozen=True, slots=True)
class Mapper:
    """A process that maps the device, on one connection. One with an epoch stays until it quiesces, or its connection
    *and* process end."""

    session: int
    process: int
    epoch: int | None = None
    closed: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True)
class PoolPages:
    geometry_hash: str
    made_epoch: int = 0  # the epoch under which they were made; 0: not complete yet (granted epochs are never 0)

    @property
    def made(self) -> bool:
        return self.made_epoch > 0


@dataclass(frozen=True, slots=True, repr=False)
class PoolState:
    """The machine's state. `last_epoch` is the last granted epoch: the owner's, while there is an owner."""

    last_epoch: int = 0
    pages: PoolPages | None = None
    owner: int | None = None
    gpu_fence_told: bool = False  # this owner has been told that the GPU fence passed
    mappers: tuple[Mapper, ...] = ()
    waiters: tuple[PoolRequested, ...] = ()
    refill_from_s: float = 0.0  # after a total loss, no new pool is granted before this time; 0: no wait

    def __repr__(self) -> str:
        fence = "" if self.owner is None else f", gpu fence {'passed' if self.gpu_fence_told else 'pending'}"
        mapped = sum(not mapper.closed for mapper in self.mappers)
        return (
            f"{self.phase}{fence}, {mapped} mappers, {len(self.mappers) - mapped} ending, {len(self.waiters)} waiting"
        )

    @property
    def phase(self) -> str:
        if self.owner is not None:
            return f"OWNED({self.last_epoch})"
        return "ABSENT" if self.pages is None else f"ORPHANED({self.last_epoch})"

    def cpu_blockers(self, epoch: int) -> tuple[Mapper, ...]:
        """Return the mappers that keep the CPU fence of an epoch closed."""
        return tuple(s for s in self.mappers if s.epoch is not None and s.epoch < epoch and not s.closed)

    def gpu_blockers(self, epoch: int) -> tuple[Mapper, ...]:
        """Return the mappers that keep the GPU fence closed: still connected, or their process has not ended."""
        return tuple(s for s in self.mappers if s.epoch is not None and s.epoch < epoch)

    def in_use(self) -> tuple[Mapper, ...]:
        """Return the mappers that own the pool or may have work queued on it."""
        return self.gpu_blockers(self.last_epoch + 1)

    def epoch_of(self, session: int) -> int | None:
        return next((s.epoch for s in self.mappers if s.session == session and s.epoch is not None), None)


# -- steps


Step = tuple[PoolState, tuple[Effect, ...]]


def restore(
    last_epoch: int, pages: PoolPages | None, owner: int | None, mappers: Iterable[Mapper], refill_from_s: float = 0.0
) -> Step:
    """Return a new vault's state from the keeper's records. A mapper listed here stays until its `ClientGone` and
    `ProcessOver`.

    `refill_from_s` is set if the keeper lost everything: until that time the owner may donate its pool, and no new
    pool is made. Step a `PoolTick` next: if the GPU fence has passed, it tells the owner so again.
    """
    state = _sweep(PoolState(last_epoch, pages, owner, mappers=tuple(mappers), refill_from_s=refill_from_s))
    assert owner is None or state.epoch_of(owner) == last_epoch, "the owner is no mapper under its epoch"
    if owner is None and pages is not None and not pages.made:
        return replace(state, pages=None), (DropPool(last_epoch),)
    return state, ()


def next_deadline_s(state: PoolState) -> float | None:
    """Return when a `PoolTick` is due, if nothing else happens before."""
    refill = (state.refill_from_s,) if state.waiters and state.refill_from_s else ()
    return min((*refill, *(waiter.deadline_s for waiter in state.waiters)), default=None)


def step(state: PoolState, event: Event, now_s: float) -> Step:
    """Return the state after the event, and its effects, to be carried out in order."""
    if state.refill_from_s <= now_s:
        state = replace(state, refill_from_s=0.0)
    state, applied = _apply(state, event)
    # Nothing is granted after a request's deadline; a request with a timeout of 0 is still evaluated once.
    state, late = _expire(state, now_s, spare=event if isinstance(event, PoolRequested) else None)
    state, granted = _grant(state)
    state, expired = _expire(state, now_s)
    fenced: tuple[Effect, ...] = ()
    if state.owner is not None and not state.gpu_fence_told and not state.gpu_blockers(state.last_epoch):
        fenced = (GpuFence(state.owner, state.last_epoch),)
        state = replace(state, gpu_fence_told=True)
    return state, applied + late + granted + expired + fenced


def _apply(state: PoolState, event: Event) -> Step:
    match event:
        case MapperJoined():
            return _join(state, event)
        case PoolRequested():
            return _acquire(state, event)
        case PoolMade():
            return _made(state, event)
        case PoolDonated():
            return _donate(state, event)
        case OwnerQuiesced():
            return _quiesce(state, event)
        case CancelAcquire():
            return replace(state, waiters=_without(state.waiters, event.session)), ()
        case ClientGone():
            return _gone(state, event.session)
        case ProcessOver():
            mappers = tuple(replace(s, over=True) if s.process == event.process else s for s in state.mappers)
            return _sweep(replace(state, mappers=mappers)), ()
        case Discard():
            if state.pages is None or state.in_use():
                return state, ()
            return replace(state, pages=None), (DropPool(state.last_epoch),)
        case PoolTick():
            return state, ()


def _without(waiters: tuple[PoolRequested, ...], session: int) -> tuple[PoolRequested, ...]:
    return tuple(waiter for waiter in waiters if waiter.session != session)


def _sweep(state: PoolState) -> PoolState:
    return replace(
        state, mappers=tuple(s for s in state.mappers if not s.closed or (s.epoch is not None and not s.over))
    )


# -- mappers


def _join(state: PoolState, event: MapperJoined) -> Step:
    session, epoch = event.session, event.epoch
    if epoch is not None and epoch > state.last_epoch:
        return state, (RefusePool(session, PoolRefusal.NOT_GRANTED, f"epoch {epoch} owns nothing yet"),)
    if epoch is not None and (state.owner is None or epoch < state.last_epoch):
        return state, (RefusePool(session, PoolRefusal.STALE_EPOCH, f"epoch {epoch} is over: {state.phase}"),)
    if epoch is not None and any(waiter.session == session for waiter in state.waiters):
        # It would itself block the fence that it waits for.
        return state, (RefusePool(session, PoolRefusal.BUSY, "this session waits for an epoch of its own"),)
    # A session works under one epoch with all its mappers.
    epoch = state.epoch_of(session) if epoch is None else epoch
    mappers = tuple(replace(s, epoch=epoch) if s.session == session else s for s in state.mappers)
    if all((s.session, s.process) != (session, event.process) for s in mappers):
        mappers = (*mappers, Mapper(session, event.process, epoch))
    if len(mappers) > MAPPERS_MAX:
        return state, (RefusePool(session, PoolRefusal.TOO_MANY, f"{MAPPERS_MAX} processes map this device already"),)
    return replace(state, mappers=mappers), ()


def _quiesce(state: PoolState, event: OwnerQuiesced) -> Step:
    """Clear the epoch of a drained process's mappers, on this connection and on those it has closed."""
    session, epoch = event.session, event.epoch
    processes = {mapper.process for mapper in state.mappers if mapper.session == session}
    if not processes:
        return state, (RefusePool(session, PoolRefusal.NOT_REGISTERED, "this session maps nothing"),)
    if (works_under := state.epoch_of(session)) not in (None, epoch):
        return state, (RefusePool(session, PoolRefusal.STALE_EPOCH, f"this session works under epoch {works_under}"),)
    mappers = tuple(
        replace(s, epoch=None)
        if s.epoch == epoch and (s.session == session or (s.closed and s.process in processes))
        else s
        for s in state.mappers
    )
    return _orphan(_sweep(replace(state, mappers=mappers)), session)


def _gone(state: PoolState, session: int) -> Step:
    mappers = tuple(replace(s, closed=True) if s.session == session else s for s in state.mappers)
    state = _sweep(replace(state, mappers=mappers, waiters=_without(state.waiters, session)))
    return _orphan(state, session)


def _orphan(state: PoolState, session: int) -> Step:
    """If the session was the owner, orphan the pool; drop it if it was not complete."""
    if state.owner != session:
        return state, ()
    orphaned = Orphaned(state.last_epoch)
    if state.pages is not None and state.pages.made:
        return replace(state, owner=None), (orphaned,)
    return replace(state, owner=None, pages=None), (orphaned, DropPool(state.last_epoch))


# -- ownership


def _refusal(state: PoolState, session: int, epoch: int, donated: int | None = None) -> RefusePool | None:
    """Return why the session cannot have the epoch. A donor may already be a mapper under the epoch it owns."""
    if all(mapper.session != session for mapper in state.mappers):
        return RefusePool(session, PoolRefusal.NOT_REGISTERED, "name the process that maps the device first")
    if any(waiter.session == session for waiter in state.waiters):
        return RefusePool(session, PoolRefusal.BUSY, "this session waits already")
    if (works_under := state.epoch_of(session)) not in (None, donated):
        return RefusePool(session, PoolRefusal.BUSY, f"this session works under epoch {works_under}: quiesce first")
    if epoch <= state.last_epoch:
        return RefusePool(session, PoolRefusal.STALE_EPOCH, f"epoch {epoch} is not newer than {state.last_epoch}")
    return None


def _acquire(state: PoolState, event: PoolRequested) -> Step:
    refusal = _refusal(state, event.session, event.epoch)
    if refusal is None and len(state.waiters) >= WAITERS_MAX:
        refusal = RefusePool(event.session, PoolRefusal.TOO_MANY, f"{WAITERS_MAX} sessions wait for the pool already")
    if refusal is not None:
        return state, (refusal,)
    return replace(state, waiters=(*state.waiters, event)), ()


def _made(state: PoolState, event: PoolMade) -> Step:
    if state.owner != event.session or state.last_epoch != event.epoch or state.pages is None:
        return state, (RefusePool(event.session, PoolRefusal.NOT_OWNER, f"the pool is {state.phase}"),)
    if state.pages.made:
        return state, ()  # the pool is complete already
    return replace(state, pages=replace(state.pages, made_epoch=event.epoch)), (TellPoolMade(event.epoch),)


def _donate(state: PoolState, event: PoolDonated) -> Step:
    refusal = _refusal(state, event.session, event.epoch, donated=event.epoch)
    if refusal is None and (state.pages is not None or state.cpu_blockers(event.epoch)):
        refusal = RefusePool(event.session, PoolRefusal.POOL_HERE, f"another pool is here: {state.phase}")
    if refusal is None and not 0 < event.made_epoch <= event.epoch:
        refusal = RefusePool(
            event.session, PoolRefusal.NOT_GRANTED, f"epoch {event.made_epoch} made no pool of {event.epoch}"
        )
    if refusal is not None:
        return state, (refusal,)
    pages = PoolPages(event.geometry_hash, event.made_epoch)
    state, effects = _become_owned(state, event.session, event.epoch, pages)
    return state, (*effects, TellPoolMade(event.made_epoch))


def _expire(state: PoolState, now_s: float, spare: PoolRequested | None = None) -> Step:
    late = tuple(w for w in state.waiters if w.deadline_s <= now_s and w is not spare)
    waiters = tuple(w for w in state.waiters if w.deadline_s > now_s or w is spare)
    return replace(state, waiters=waiters), tuple(PoolTimedOut(waiter.session) for waiter in late)


def _grant(state: PoolState) -> Step:
    """Grant the pool if possible. Only the waiter with the largest epoch is considered: it won the last election."""
    top = max(state.waiters, key=lambda waiter: waiter.epoch, default=None)
    if top is None or state.cpu_blockers(top.epoch):
        return state, ()
    pages = state.pages
    dropped: tuple[Effect, ...] = ()
    if pages is None or pages.geometry_hash != top.geometry_hash:
        # A new pool needs memory that dead processes still hold; their queued work must not write to it (facts 1, 4b).
        if state.gpu_blockers(top.epoch) or state.refill_from_s:
            return state, ()
        dropped = () if pages is None else (DropPool(state.last_epoch),)
        pages = PoolPages(top.geometry_hash)
    state = replace(state, waiters=_without(state.waiters, top.session))
    state, granted = _become_owned(state, top.session, top.epoch, pages)
    return state, (*dropped, *granted)


def _become_owned(state: PoolState, session: int, epoch: int, pages: PoolPages) -> Step:
    assert state.owner is None, f"two owners: {state!r}"
    assert epoch > state.last_epoch, f"epoch {epoch} after {state!r}"
    mappers = tuple(replace(s, epoch=epoch) if s.session == session else s for s in state.mappers)
    state = replace(state, last_epoch=epoch, pages=pages, owner=session, mappers=mappers)
    state = replace(state, gpu_fence_told=False, refill_from_s=0.0)
    stale = tuple(waiter for waiter in state.waiters if waiter.epoch <= epoch)
    state = replace(state, waiters=tuple(waiter for waiter in state.waiters if waiter.epoch > epoch))
    refusals = (
        RefusePool(w.session, PoolRefusal.STALE_EPOCH, f"epoch {w.epoch} is not newer than {epoch}") for w in stale
    )
    return state, (CpuFence(session, epoch), GrantPool(session, epoch, pages.made_epoch), *refusals)


# -- notices to all clients that map the device


_NEWS: Mapping[type, str] = {Orphaned: OWNER_GONE, DropPool: DROPPED, GrantPool: GRANTED, TellPoolMade: MADE}


def news_of(effect: Effect) -> PoolNews | None:
    if isinstance(effect, RefusePool | PoolTimedOut) or type(effect) not in _NEWS:
        return None
    return PoolNews(_NEWS[type(effect)], effect.epoch)


def missed(state: PoolState) -> tuple[PoolNews, ...]:
    """Return the notices that a client has missed when it connects or reconnects, oldest first.

    A vault that never granted a pool returns none: after a total loss the owner may still donate its pool.
    """
    if not state.last_epoch:
        return ()
    pages, epoch = state.pages, state.last_epoch
    pool = (PoolNews(MADE, pages.made_epoch),) if pages is not None and pages.made else ()
    if state.owner is not None:
        return PoolNews(GRANTED, epoch), *pool
    return (*pool, PoolNews(OWNER_GONE, epoch)) if pool else (PoolNews(OWNER_GONE, epoch), PoolNews(DROPPED, epoch))
