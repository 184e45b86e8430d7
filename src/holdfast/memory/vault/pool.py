"""The KV pool of one device, as the vault serves it: its clients' calls, the pool machine stepped, its news told.

Always true: pages and index survive their owner; a pool of another geometry is dropped before the new owner may make
its own; the pool is granted to one epoch only, and not before the keeper knows. News alone goes out at once, ahead of
the keeper: a standby's wake waits for it, and it is a hint that nobody acts on without asking. Who takes a mapper's
seat, or comes back to it, is told how the pool stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.memory import protocol
from holdfast.memory.fdsocket import close_all
from holdfast.memory.vault import pool_machine as machine
from holdfast.memory.vault.pool_record import KeptPool, PoolRecord
from holdfast.memory.vault.tags import InOrder, Shared
from holdfast.memory.vault.uploads import Upload, Why, wrong_pool_slab
from holdfast.memory.vault.weights import TIMEOUT_MS_MAX

if TYPE_CHECKING:
    from holdfast.memory.vault.sessions import Session

# An epoch is one more than the last, or unix milliseconds. Past that and a clock that is a day off it is a mistake, and
# would keep every later leader out for as long.
EPOCH_AHEAD_MS = 24 * 3600 * 1000


class VaultPool:
    """Tag `kv_cache`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._kept = KeptPool(shared.kept)
        self.state = machine.Pool()
        self.perform = InOrder(self._carry_out)
        self._upload = Upload()  # of a pool being made or given back
        self._lost = False  # everything: an owner that lives may give its pool back

    def adopt(self, seats: list[machine.Seat], *, lost: bool, donation_s: float) -> None:
        """Take over what the keeper had; the owner's seat is among `seats` if its process lives."""
        record = self._kept.load()
        self._lost = lost and record is None
        refill_from_s = self._shared.now_s() + donation_s if self._lost else 0.0
        record = record or PoolRecord()  # seats there may be all the same
        if not record.made_epoch:
            self._kept.drop_pages()
        seated = {seat.session for seat in seats if seat.epoch == record.last_epoch}
        owner = record.owner if record.owner in seated else None
        self.state, effects = machine.restore(record.last_epoch, record.pages(), owner, seats, refill_from_s)
        self.perform(effects)

    def kept_bytes(self) -> int:
        return sum(self._kept.sizes) + sum(self._upload.sizes)

    def facts(self) -> dict[str, object]:
        return {
            "pool": self.state.phase,
            "pool_bytes": self.kept_bytes(),
            "mappers": len(self.state.seats),
            "pool_epoch": self.state.last_epoch,
        }

    def deadline_s(self) -> float | None:
        return machine.next_deadline_s(self.state)

    # -- calls

    def join(self, session: Session, message: protocol.Mapping) -> None:
        for process in session.processes:
            if self._refused(session, message.call, machine.MapperJoined(session.number, message.epoch, process)):
                return
            if not session.lives(process):
                self.process_over(process)
        self._seat(session)
        self._tell_missed(session)
        session.reply(protocol.Done(message.call))

    def acquire(self, session: Session, message: protocol.AcquirePool) -> None:
        why = ("busy", "this session waits for the pool already") if session.pool_call else self._too_far(message.epoch)
        if why is not None:
            session.fail(message.call, *why)
            return
        session.pool_call = message.call
        deadline_s = self._shared.now_s() + min(max(0, message.timeout_ms), TIMEOUT_MS_MAX) / 1000
        self.step(machine.Acquire(session.number, message.epoch, message.geometry, deadline_s))

    def _too_far(self, epoch: int) -> Why | None:
        if epoch <= max(self.state.last_epoch, int(self._shared.clock.unix_s() * 1000)) + EPOCH_AHEAD_MS:
            return None
        reason = f"epoch {epoch} is far in the future: epochs are unix milliseconds, or one more than the last"
        return "bad_request", reason

    def add_slabs(self, session: Session, message: protocol.AddPoolSlabs, fds: list[int]) -> None:
        why = self._cannot_add(session, message, fds)
        if why is not None:
            close_all(fds)
            session.fail(message.call, *why)
            return
        self._upload.add(message.sizes, fds)
        if message.last:
            self._kept.put_pages(self._upload.take(), self.state.last_epoch)
            self.step(machine.PoolMade(session.number, self.state.last_epoch))
            self._kept.put(self.state, session)
        session.reply(protocol.Done(message.call))

    def _cannot_add(self, session: Session, message: protocol.AddPoolSlabs, fds: list[int]) -> Why | None:
        pages = self.state.pages
        if self.state.owner != session.number or pages is None or pages.made:
            return "not_owner", "only the owner of a fresh pool hands over its pages"
        return wrong_pool_slab(
            self._shared.device, self._upload, message.sizes, fds, last=message.last
        ) or self._shared.budget.exceeded(message.sizes)

    def donate(self, session: Session, message: protocol.DonatePool, fds: list[int]) -> None:
        """Everything was lost here: the owner, alive all the time, gives its pool back and goes on owning it."""
        if self.state.owner == session.number and session.epoch == message.epoch:
            close_all(fds)  # it was not lost after all
            session.reply(protocol.Done(message.call))
            return
        upload = session.pool_donation
        why = self._cannot_donate(upload, message, fds)
        upload.add(message.sizes, fds)
        if why is not None:
            upload.drop()
            session.fail(message.call, *why)
            return
        if not message.last:
            session.reply(protocol.Done(message.call))
            return
        self._kept.put_pages(upload.take(), message.made_epoch)
        event = machine.Donate(session.number, message.epoch, message.geometry, message.made_epoch)
        if self._refused(session, message.call, event):
            self._kept.drop_pages()
        else:
            session.reply(protocol.Done(message.call))

    def _cannot_donate(self, upload: Upload, message: protocol.DonatePool, fds: list[int]) -> Why | None:
        if not self._lost or self.state.pages is not None:
            return "stale", f"nothing was lost here: the pool is {self.state.phase}"
        return self._too_far(message.epoch) or wrong_pool_slab(
            self._shared.device, upload, message.sizes, fds, last=message.last
        )

    def fetch(self, session: Session, call: int) -> None:
        """Index and pages, for the owner and for mappers of the device (a standby keeps them mapped)."""
        if not session.maps:
            session.fail(call, "not_registered", "say that this process maps the device first")
            return
        pages = self.state.pages
        if pages is None or not pages.made:
            session.fail(call, "absent", "there is no pool here")
            return
        # Not before the keeper has the pool: else its owner, not told that it is made, may make another under the
        # same epoch at the next vault, and what was mapped would pass for that one.
        self._kept.put(self.state, session)
        session.reply_slabs(call, self._kept.sizes, self._kept.fds, pages.made_epoch, pages.geometry_hash)

    def quiesce(self, session: Session, message: protocol.Quiesced) -> None:
        if self._refused(session, message.call, machine.Quiesced(session.number, message.epoch)):
            return
        self._seat(session)
        session.reply(protocol.Done(message.call))

    def cancel(self, session: Session) -> None:
        session.pool_call = 0
        self.step(machine.Cancel(session.number))

    def give_up(self, session: Session) -> None:
        """It was granted an epoch that it does not know of, and so has touched nothing."""
        session.pool_granted = 0
        if session.epoch is not None:
            self.step(machine.Quiesced(session.number, session.epoch))
            self._seat(session)

    def come_back(self, session: Session, epoch: int | None) -> None:
        """Connected again after a restart of the vault: what it works under, and what it may not have heard."""
        if epoch != session.epoch:
            self.disown(session, epoch)
            self.give_up(session)
        elif self.state.owner == session.number and epoch is not None:
            session.reply(protocol.Fence("cpu", epoch))
            if self.state.gpu_fence_told:
                session.reply(protocol.Fence("gpu", epoch))
        if self.has_seat(session):
            self._tell_missed(session)

    def disown(self, session: Session, epoch: int | None) -> None:
        """It says that it owns the pool, and does not. After a total loss, which knows of no epochs, it may give it
        back; else another owns or may own the very pages that it writes to."""
        if epoch is not None and epoch <= self.state.last_epoch:
            session.reply(
                protocol.Deposed(epoch, f"epoch {epoch} does not own the pool any more: it is {self.state.phase}")
            )

    def _tell_missed(self, session: Session) -> None:
        for news in machine.missed(self.state):
            session.tell_at_once(news)

    # -- events

    def cut_off(self, session: Session) -> None:
        """Its connection ended and it did not: it has its seat and its pool, but for what was not handed over yet."""
        session.pool_donation.drop()
        if self.state.owner == session.number:
            self._upload.drop()

    def gone(self, session: Session) -> None:
        self.cut_off(session)
        self.step(machine.Gone(session.number))

    def process_over(self, number: int) -> None:
        self.step(machine.ProcessOver(number))

    def discard(self) -> None:
        """The device's memory is wanted: a pool that nobody owns goes."""
        self.step(machine.Discard())

    def tick(self) -> None:
        self.step(machine.Tick())

    # -- effects

    def has_seat(self, session: Session) -> bool:
        """Whether it is counted by the fences."""
        return any(seat.session == session.number for seat in self.state.seats)

    def step(self, event: machine.Event) -> None:
        self.state, effects = machine.step(self.state, event, self._shared.now_s())
        self.perform(effects)

    def _refused(self, session: Session, call: int, event: machine.Event) -> bool:
        """Step an event that is a call; answer and tell if it was refused."""
        self.state, effects = machine.step(self.state, event, self._shared.now_s())
        mine = [effect for effect in effects if isinstance(effect, machine.Refuse) and effect.session == session.number]
        self.perform(tuple(effect for effect in effects if effect not in mine))
        for refusal in mine:
            session.fail(call, refusal.code, refusal.reason)
        return bool(mine)

    def _carry_out(self, effect: machine.Effect) -> None:
        news = machine.news_of(effect)
        if news is not None and not isinstance(effect, machine.GrantPool):
            self._spread(news)
        if isinstance(effect, machine.DropPool):
            self._upload.drop()
            self._kept.put(self.state)
            self._kept.drop_pages()
            self._shared.note(f"the pool of epoch {effect.epoch} is dropped")
        elif isinstance(effect, machine.Orphaned):
            self._kept.put(self.state)
            self._shared.note(f"the pool is orphaned: the owner of epoch {effect.epoch} has ended")
        elif (
            not isinstance(effect, machine.Made) and (session := self._shared.sessions.get(effect.session)) is not None
        ):
            self._tell(session, effect)
        if news is not None and isinstance(effect, machine.GrantPool):
            self._spread(news)  # after its owner: nobody waits for it as that one does

    def _spread(self, news: protocol.PoolNews) -> None:
        """To everyone who maps the device, at once."""
        for number in {seat.session for seat in self.state.seats if not seat.closed}:
            if (session := self._shared.sessions.get(number)) is not None:
                session.tell_at_once(news)

    def _tell(self, session: Session, effect: machine.Effect) -> None:
        call = session.pool_call
        match effect:
            case machine.GrantPool():
                session.pool_call, session.pool_granted = 0, call
                self._lost = False
                self._kept.put(self.state, session)  # the fence just before it has recorded the seat
                session.reply(protocol.PoolGranted(call, effect.epoch, effect.adopt, effect.made_epoch))
                self._shared.note(
                    f"{session!r} owns the pool, epoch {effect.epoch}, {'adopted' if effect.adopt else 'fresh'}"
                )
            case machine.CpuFence():
                self._seat(session)
                session.reply(protocol.Fence("cpu", effect.epoch))
            case machine.GpuFence():
                session.reply(protocol.Fence("gpu", effect.epoch))
                self._shared.note(f"gpu fence of epoch {effect.epoch} has passed")
            case machine.TimedOut():
                session.pool_call = 0
                session.reply(protocol.Failed(call, "timeout", f"an earlier owner may still be there: {self.state!r}"))
            case machine.Refuse():
                session.pool_call = 0
                session.reply(protocol.Failed(call, effect.code, effect.reason))

    def _seat(self, session: Session) -> None:
        session.maps = self.has_seat(session)
        session.epoch = self.state.epoch_of(session.number)
        session.remember()
