"""The KV pool of one device, as the vault serves it: its clients' calls, and what else happens to them.

Always true: pages and index survive their owner; a pool of another geometry is dropped before the new owner may make
its own; who takes a mapper's seat, or comes back to it, is told how the pool stands.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast.memory.fdsocket import close_all
from holdfast.memory.protocol import AcquirePool, AddPoolSlabs, Deposed, DonatePool, Done, Fence, Mapping
from holdfast.memory.protocol import Quiesced as QuiescedCall
from holdfast.memory.vault.pool_effects import PoolEffects
from holdfast.memory.vault.pool_machine import (
    Acquire,
    Cancel,
    Donate,
    Gone,
    MapperJoined,
    PoolMade,
    ProcessOver,
    Quiesced,
    Seat,
    Tick,
    next_deadline,
    restore,
)
from holdfast.memory.vault.pool_news import missed
from holdfast.memory.vault.pool_record import KEY, PAGES_KEY, PoolRecord, decode_pages, decode_pool
from holdfast.memory.vault.uploads import Upload, Why, wrong_pool_slab
from holdfast.memory.vault.weights import TIMEOUT_MS_MAX

if TYPE_CHECKING:
    from holdfast.memory.vault.sessions import Session


# After a loss of vault and keeper together, how long an owner that lives has to give its pool back before another one
# is made. It reattaches as soon as the socket answers; and if it died too, its streams stand still for just as long.
DONATION_S = 1.0


# An epoch is one more than the last, or unix milliseconds. Past that and a clock that is a day off it is a mistake, and
# would keep every later leader out for as long.
EPOCH_AHEAD_MS = 24 * 3600 * 1000
TOO_FAR = "epoch {} is far in the future: epochs are unix milliseconds, or one more than the last"


class VaultPool(PoolEffects):
    """Tag `kv_cache`."""

    def adopt(self, seats: list[Seat], *, lost: bool) -> None:
        """Take over what the keeper had; the owner's seat is among `seats` if its process lives."""
        record = self._record()
        self._lost = lost and record is None
        refill_from_s = self._clock() + DONATION_S if self._lost else 0.0
        record = record or PoolRecord()  # seats there may be all the same
        if not record.made_epoch:
            self._drop_pages()
        seated = {seat.session for seat in seats if seat.epoch == record.last_epoch}
        owner = record.owner if record.owner in seated else None
        self.state, effects = restore(record.last_epoch, record.pages(), owner, seats, refill_from_s)
        self._perform(effects)

    def _record(self) -> PoolRecord | None:
        """What the keeper knows, if it knows all of it."""
        kept, pages = self._kept.records.get(KEY), self._kept.records.get(PAGES_KEY)
        record = decode_pool(kept.blob) if kept is not None else None
        if record is None or not record.made_epoch:
            return record
        known = decode_pages(pages.blob) if pages is not None else None
        if known is None or known.made_epoch != record.made_epoch:
            return None
        self.sizes = known.sizes
        return record

    def kept_bytes(self) -> int:
        return sum(self.sizes) + sum(self._upload.sizes)

    def deadline_s(self) -> float | None:
        return next_deadline(self.state)

    # -- calls

    def join(self, session: Session, message: Mapping) -> None:
        for process in session.processes:
            if self._refused(session, message.call, MapperJoined(session.number, message.epoch, process)):
                return
            if not session.lives(process):
                self.process_over(process)
        self._seat(session)
        self._tell_missed(session)
        session.reply(Done(message.call))

    def acquire(self, session: Session, message: AcquirePool) -> None:
        if session.pool_call:
            session.fail(message.call, "busy", "this session waits for the pool already")
            return
        if self._too_far(session, message.call, message.epoch):
            return
        session.pool_call = message.call
        deadline_s = self._clock() + min(max(0, message.timeout_ms), TIMEOUT_MS_MAX) / 1000
        self.step(Acquire(session.number, message.epoch, message.geometry, deadline_s))

    def _too_far(self, session: Session, call: int, epoch: int) -> bool:
        if self._is_too_far(epoch):
            session.fail(call, "bad_request", TOO_FAR.format(epoch))
            return True
        return False

    def _is_too_far(self, epoch: int) -> bool:
        return epoch > max(self.state.last_epoch, time.time_ns() // 1_000_000) + EPOCH_AHEAD_MS

    def add_slabs(self, session: Session, message: AddPoolSlabs, fds: list[int]) -> None:
        why = self._cannot_add(session, message, fds)
        if why is not None:
            close_all(fds)
            session.fail(message.call, *why)
            return
        self._upload.sizes += message.sizes
        self._upload.fds += fds
        if message.last:
            upload, self._upload = self._upload, Upload()
            self._keep_pages(upload, self.state.last_epoch)
            self.step(PoolMade(session.number, self.state.last_epoch))
            self._remember(session)
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
        if why is None and self._is_too_far(message.epoch):
            why = "bad_request", TOO_FAR.format(message.epoch)
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
        self._keep_pages(upload, message.made_epoch)
        event = Donate(session.number, message.epoch, message.geometry, message.made_epoch)
        if self._refused(session, message.call, event):
            self._drop_pages()
        else:
            session.reply(Done(message.call))

    def fetch(self, session: Session, call: int) -> None:
        """Index and pages, for the owner and for mappers of the device (a standby keeps them mapped)."""
        if not session.maps:
            session.fail(call, "not_registered", "say that this process maps the device first")
            return
        if self.state.pages is None or not self.state.pages.made:
            session.fail(call, "absent", "there is no pool here")
            return
        # Not before the keeper has the pool: else its owner, not told that it is made, may make another under the
        # same epoch at the next vault, and what was mapped would pass for that one.
        self._remember(session)
        session.reply_slabs(call, self.sizes, self._kept.records[PAGES_KEY].fds, self.state.pages.made_epoch)

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
            self.disown(session, epoch)
            self.give_up(session)
        elif self.state.owner == session.number and epoch is not None:
            session.reply(Fence("cpu", epoch))
            if self.state.gpu_fence_told:
                session.reply(Fence("gpu", epoch))
        if self.has_seat(session):
            self._tell_missed(session)

    def disown(self, session: Session, epoch: int | None) -> None:
        """It says that it owns the pool, and does not. After a total loss, which knows of no epochs, it may give it
        back; else another owns or may own the very pages that it writes to."""
        if epoch is not None and epoch <= self.state.last_epoch:
            session.reply(Deposed(epoch, f"epoch {epoch} does not own the pool any more: it is {self.state.phase}"))

    def _tell_missed(self, session: Session) -> None:
        for news in missed(self.state):
            session.tell_at_once(news)

    # -- events

    def cut_off(self, session: Session) -> None:
        """Its connection ended and it did not: it has its seat and its pool, but for what was not handed over yet."""
        close_all(session.pool_donation.fds)
        session.pool_donation = Upload()
        if self.state.owner == session.number:
            close_all(self._upload.fds)
            self._upload = Upload()

    def gone(self, session: Session) -> None:
        self.cut_off(session)
        self.step(Gone(session.number))

    def process_over(self, number: int) -> None:
        self.step(ProcessOver(number))

    def tick(self) -> None:
        self.step(Tick())
