"""The KV pool of one device, as the vault serves it: the pool machine's effects carried out.

Always true: the pool is granted to one epoch only, and not before the keeper knows; pages and index survive their
owner; a pool of another geometry is dropped before the new owner may make its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.memory.fdsocket import close_all
from holdfast.memory.kept import nothing
from holdfast.memory.pool_machine import (
    Acquire,
    Cancel,
    CpuFence,
    Donate,
    DropPool,
    Effect,
    Event,
    Gone,
    GpuFence,
    GrantPool,
    MapperJoined,
    Orphaned,
    Pages,
    Pool,
    PoolMade,
    ProcessOver,
    Quiesced,
    Refuse,
    Seat,
    Tick,
    TimedOut,
    next_deadline,
    restore,
    step,
)
from holdfast.memory.pool_record import KEY, decode_pool, record_of
from holdfast.memory.protocol import (
    AcquirePool,
    AddPoolSlabs,
    DonatePool,
    Done,
    Failed,
    Fence,
    Mapping,
    MemoryLost,
    PoolGranted,
)
from holdfast.memory.protocol import Quiesced as QuiescedCall
from holdfast.memory.vault_uploads import Budget, Upload, Why, wrong_pool_slab
from holdfast.memory.vault_weights import TIMEOUT_MS_MAX

if TYPE_CHECKING:
    from holdfast.memory.kept import KeptRecords
    from holdfast.memory.sessions import Session


class VaultPool:
    """Tag `kv_cache`."""

    def __init__(
        self,
        device: str,
        budget: Budget,
        kept: KeptRecords,
        sessions: dict[int, Session],
        clock: Callable[[], float],
        note: Callable[[str], None],
    ) -> None:
        self._device = device
        self._budget = budget
        self._kept = kept
        self._sessions = sessions
        self._clock = clock
        self._note = note
        self.state = Pool()
        self.counts: Counter[str] = Counter()  # effects by name, for the metrics
        self.sizes: list[int] = []  # the index, then the pages
        self._upload = Upload()  # of a pool being made or given back
        self._donated: list[int] = []
        self._lost = False  # everything: an owner that lives may give its pool back

    def adopt(self, seats: list[Seat], *, lost: bool) -> None:
        """Take over what the keeper had; the owner's seat is among `seats` if its process lives."""
        kept = self._kept.records.get(KEY)
        self._lost = lost and kept is None
        if kept is None:
            return
        record = decode_pool(kept.blob)
        self.sizes = list(record.sizes)
        pages = Pages(record.geometry, record.made) if record.geometry is not None else None
        seated = {seat.session for seat in seats if seat.epoch == record.last_epoch}
        owner = record.owner if record.owner in seated else None
        self.state, effects = restore(record.last_epoch, pages, owner, seats)
        self._perform(effects)

    def kept_bytes(self) -> int:
        return sum(self.sizes) + sum(self._upload.sizes)

    def deadline_s(self) -> float | None:
        return next_deadline(self.state)

    def has_seat(self, session: Session) -> bool:
        """Whether it is counted by the fences."""
        return any(seat.session == session.number for seat in self.state.seats)

    # -- calls

    def join(self, session: Session, message: Mapping) -> None:
        for process in session.processes:
            if self._refused(session, message.call, MapperJoined(session.number, message.epoch, process)):
                return
            if not session.lives(process):
                self.process_over(process)
        self._seat(session)
        session.reply(Done(message.call))

    def acquire(self, session: Session, message: AcquirePool) -> None:
        if session.pool_call:
            session.fail(message.call, "busy", "this session waits for the pool already")
            return
        session.pool_call = message.call
        deadline_s = self._clock() + min(max(0, message.timeout_ms), TIMEOUT_MS_MAX) / 1000
        self.step(Acquire(session.number, message.epoch, message.geometry, deadline_s))

    def add_slabs(self, session: Session, message: AddPoolSlabs, fds: list[int]) -> None:
        why = self._cannot_add(session, message, fds)
        if why is not None:
            close_all(fds)
            session.fail(message.call, *why)
            return
        self._upload.sizes += message.sizes
        self._upload.fds += fds
        if message.last:
            self.step(PoolMade(session.number, self.state.last_epoch))
            upload, self._upload = self._upload, Upload()
            self.sizes = upload.sizes
            self._remember(session, upload.fds)
        session.reply(Done(message.call))

    def _cannot_add(self, session: Session, message: AddPoolSlabs, fds: list[int]) -> Why | None:
        pages = self.state.pages
        if self.state.owner != session.number or pages is None or pages.made:
            return "not_owner", "only the owner of a fresh pool hands over its pages"
        return wrong_pool_slab(
            self._device, self._upload, message.sizes, fds, last=message.last
        ) or self._budget.exceeded(message.sizes)

    def donate(self, session: Session, message: DonatePool, fds: list[int]) -> None:
        """Everything was lost here: the owner, alive all the time, gives its pool back and goes on owning it."""
        if self.state.owner == session.number and session.epoch == message.epoch:
            close_all(fds)  # it was not lost after all
            session.reply(Done(message.call))
            return
        upload = session.pool_donation
        why: Why | None = None
        if not self._lost or self.state.pages is not None:
            why = "stale", f"nothing was lost here: the pool is {self.state.phase}"
        why = why or wrong_pool_slab(self._device, upload, message.sizes, fds, last=message.last)
        upload.sizes += message.sizes
        upload.fds += fds
        if why is None and not message.last:
            session.reply(Done(message.call))
            return
        session.pool_donation = Upload()
        if why is not None:
            close_all(upload.fds)
            session.fail(message.call, *why)
            return
        self.sizes, self._donated = upload.sizes, upload.fds  # the grant's record takes them
        if self._refused(session, message.call, Donate(session.number, message.epoch, message.geometry)):
            self.sizes = []
            close_all(upload.fds)
        else:
            session.reply(Done(message.call))
        self._donated = []

    def fetch(self, session: Session, call: int) -> None:
        """Index and pages, for the owner and for mappers of the device (a standby keeps them mapped)."""
        if not session.maps:
            session.fail(call, "not_registered", "say that this process maps the device first")
            return
        if self.state.pages is None or not self.state.pages.made:
            session.fail(call, "absent", "there is no pool here")
            return
        session.reply_slabs(call, self.sizes, self._kept.records[KEY].fds)

    def quiesce(self, session: Session, message: QuiescedCall) -> None:
        if self._refused(session, message.call, Quiesced(session.number, message.epoch)):
            return
        self._seat(session)
        session.reply(Done(message.call))

    def cancel(self, session: Session) -> None:
        session.pool_call = 0
        self.step(Cancel(session.number))

    def give_up(self, session: Session) -> None:
        """It was granted an epoch that it does not know of, and so has touched nothing."""
        session.pool_granted = 0
        if session.epoch is not None:
            self.step(Quiesced(session.number, session.epoch))
            self._seat(session)

    def come_back(self, session: Session, epoch: int | None) -> None:
        """Connected again after a restart of the vault: what it works under, and what it may not have heard."""
        if epoch != session.epoch:
            if epoch is not None:
                session.reply(MemoryLost(f"the pool of epoch {epoch} is not kept: {self.state.phase}"))
            self.give_up(session)
        elif self.state.owner == session.number and epoch is not None:
            session.reply(Fence("cpu", epoch))
            if self.state.gpu_fence_told:
                session.reply(Fence("gpu", epoch))

    # -- events and effects

    def gone(self, session: Session) -> None:
        close_all(session.pool_donation.fds)
        session.pool_donation = Upload()
        self.step(Gone(session.number))

    def process_over(self, number: int) -> None:
        self.step(ProcessOver(number))

    def tick(self) -> None:
        self.step(Tick())

    def step(self, event: Event) -> None:
        self.state, effects = step(self.state, event, self._clock())
        self._perform(effects)

    def _refused(self, session: Session, call: int, event: Event) -> bool:
        """Step an event that is a call; answer and tell if it was refused."""
        self.state, effects = step(self.state, event, self._clock())
        mine = [effect for effect in effects if isinstance(effect, Refuse) and effect.session == session.number]
        self._perform(tuple(effect for effect in effects if effect not in mine))
        for refusal in mine:
            session.fail(call, refusal.code, refusal.reason)
        return bool(mine)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        self.counts.update(type(effect).__name__ for effect in effects)
        for effect in effects:
            if isinstance(effect, DropPool):
                close_all(self._upload.fds)
                self.sizes, self._upload = [], Upload()
                self._remember(None, [])
                self._note(f"the pool of epoch {effect.epoch} is dropped")
            elif isinstance(effect, Orphaned):
                self._remember(None)
                self._note(f"the pool is orphaned: the owner of epoch {effect.epoch} has ended")
            elif (session := self._sessions.get(effect.session)) is not None:
                self._tell(session, effect)

    def _tell(self, session: Session, effect: Effect) -> None:
        call = session.pool_call
        match effect:
            case GrantPool():
                session.pool_call, session.pool_granted = 0, call
                self._lost = False
                self._seat(session)
                self._remember(session)
                session.reply(PoolGranted(call, effect.epoch, effect.adopt))
                self._note(f"{session!r} owns the pool, epoch {effect.epoch}, {'adopted' if effect.adopt else 'fresh'}")
            case CpuFence():
                self._seat(session)
                session.reply(Fence("cpu", effect.epoch))
            case GpuFence():
                session.reply(Fence("gpu", effect.epoch))
                self._note(f"gpu fence of epoch {effect.epoch} has passed")
            case TimedOut():
                session.pool_call = 0
                session.reply(Failed(call, "timeout", f"an earlier owner is still connected: {self.state!r}"))
            case Refuse():
                session.pool_call = 0
                session.reply(Failed(call, effect.code, effect.reason))

    def _seat(self, session: Session) -> None:
        session.maps = self.has_seat(session)
        session.epoch = self.state.epoch_of(session.number)
        session.remember()

    def _remember(self, session: Session | None, fds: list[int] | None = None) -> None:
        """Put the pool's record (with new descriptors, or those it has); what `session` is told next waits for it."""
        state = self.state
        if fds is None:
            old = self._kept.records.get(KEY)
            fds = old.fds if old is not None else self._donated
        record = record_of(state, self.sizes)
        if session is not None:
            session.wait_for_keeper()
        then = session.acknowledge if session is not None else nothing
        self._kept.put(KEY, msgspec.msgpack.encode(record), fds if record.made else [], then)
