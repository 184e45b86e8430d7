"""The vault's service for the KV pool of one device: handles clients' calls, steps the pool machine, sends notices.

Always true:
- Pages and index survive their owner.
- A pool of another geometry is dropped before the new owner may make its own.
- The pool is granted to one epoch only, after the keeper has the record.
- Only notices (`PoolNews`) are sent before the keeper has the record, because a standby waits for them to wake. They
  are hints: a client asks the vault before it acts on one.
- A session that becomes a mapper, or reconnects as one, gets the notices it has missed.
"""

from __future__ import annotations

import msgspec

from holdfast.memory import protocol
from holdfast.memory.fdsocket import close_all
from holdfast.memory.vault import pool_machine as machine
from holdfast.memory.vault.pool_machine import PoolPages
from holdfast.memory.vault.sessions import Session, Upload
from holdfast.memory.vault.tags import InOrder, Shared, Why, wrong_pool_slab
from holdfast.memory.vault.weights import TIMEOUT_MS_MAX

# The pool has two records in the keeper. The owner's is a few bytes and changes during a failover. The pages' has many
# descriptors: it is put once, before the owner's record marks the pool complete, and dropped after that record says
# there is no pool. A record of a complete pool is valid only together with the pages' record.
KEY = "pool"
PAGES_KEY = "pool/pages"
# An epoch is the last one plus 1, or unix milliseconds. One more than a day ahead of the clock is a bug, and would keep
# out every later leader until the clock reaches it.
EPOCH_AHEAD_MS = 24 * 3600 * 1000


class PoolRecord(msgspec.Struct, frozen=True, array_like=True):
    last_epoch: int = 0
    geometry: str | None = None
    made_epoch: int = 0  # 0: not complete
    owner: int | None = None

    def pages(self) -> PoolPages | None:
        return None if self.geometry is None else PoolPages(self.geometry, self.made_epoch)


class PagesRecord(msgspec.Struct, frozen=True, array_like=True):
    """The pages' record. Its descriptors are the index's, then the pages'."""

    made_epoch: int
    sizes: list[int]


_decode_pool = msgspec.msgpack.Decoder(PoolRecord).decode
_decode_pages = msgspec.msgpack.Decoder(PagesRecord).decode


class VaultPool:
    """Carries out what the pool's machine decides, for tag `kv_cache`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.state = machine.PoolState()
        self._sizes: list[int] = []  # sizes of the index, then of the pages, as recorded
        self.perform = InOrder(self._carry_out)
        self._upload = Upload()  # slabs of a pool being made or donated
        self._lost = False  # True after a total loss: a living owner may donate its pool

    def adopt(self, mappers: list[machine.Mapper], *, lost: bool, donation_s: float) -> None:
        """Restore the pool from the keeper's records. `mappers` has the owner if its process lives."""
        record = self._load_record()
        self._lost = lost and record is None
        refill_from_s = self._shared.now_s() + donation_s if self._lost else 0.0
        record = record or PoolRecord()  # there may be mappers even without a record
        if not record.made_epoch:
            self._drop_pages()
        sessions = {mapper.session for mapper in mappers if mapper.epoch == record.last_epoch}
        owner = record.owner if record.owner in sessions else None
        self.state, effects = machine.restore(record.last_epoch, record.pages(), owner, mappers, refill_from_s)
        self.perform(effects)

    def _load_record(self) -> PoolRecord | None:
        """Return the keeper's record, if it is complete."""
        records = self._shared.records.by_key
        record = _decode_pool(records[KEY].blob) if KEY in records else None
        if record is None or not record.made_epoch:
            return record
        pages = _decode_pages(records[PAGES_KEY].blob) if PAGES_KEY in records else None
        if pages is None or pages.made_epoch != record.made_epoch:
            return None
        self._sizes = pages.sizes
        return record

    def _record(self, session: Session | None = None) -> None:
        """Record the state in the keeper. Further messages to `session` wait until the keeper has it."""
        state, pages = self.state, self.state.pages
        record = PoolRecord(state.last_epoch, owner=state.owner)
        if pages is not None:
            record = PoolRecord(state.last_epoch, pages.geometry_hash, pages.made_epoch, state.owner)
        if session is not None:
            session.wait_for_keeper()
        then = session.acknowledge if session is not None else None
        self._shared.records.put(KEY, msgspec.msgpack.encode(record), [], then)

    def _record_pages(self, upload: Upload, made_epoch: int) -> None:
        self._sizes = upload.sizes
        self._shared.records.put(PAGES_KEY, msgspec.msgpack.encode(PagesRecord(made_epoch, upload.sizes)), upload.fds)

    def _drop_pages(self) -> None:
        self._sizes = []
        self._shared.records.drop(PAGES_KEY)

    def used_bytes(self) -> int:
        return sum(self._sizes) + sum(self._upload.sizes)

    def facts(self) -> dict[str, object]:
        return {
            "pool": self.state.phase,
            "pool_bytes": self.used_bytes(),
            "mappers": len(self.state.mappers),
            "pool_epoch": self.state.last_epoch,
        }

    # -- calls

    def join(self, session: Session, message: protocol.Mapping) -> None:
        for process in session.processes:
            if self._refused(session, message.call, machine.MapperJoined(session.number, message.epoch, process)):
                return
            if not session.lives(process):
                self.step(machine.ProcessOver(process))
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
        self.step(machine.PoolRequested(session.number, message.epoch, message.geometry, deadline_s))

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
            self._record_pages(self._upload.take(), self.state.last_epoch)
            self.step(machine.PoolMade(session.number, self.state.last_epoch))
            self._record(session)
        session.reply(protocol.Done(message.call))

    def _cannot_add(self, session: Session, message: protocol.AddPoolSlabs, fds: list[int]) -> Why | None:
        pages = self.state.pages
        if self.state.owner != session.number or pages is None or pages.made:
            return "not_owner", "only the owner of a fresh pool hands over its pages"
        return wrong_pool_slab(
            self._shared.device, self._upload, message.sizes, fds, last=message.last
        ) or self._shared.budget.exceeded(message.sizes)

    def donate(self, session: Session, message: protocol.DonatePool, fds: list[int]) -> None:
        """Take the pool back from its owner after vault and keeper both died. The owner stays the owner."""
        if self.state.owner == session.number and session.epoch == message.epoch:
            close_all(fds)  # the pool was not lost
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
        self._record_pages(upload.take(), message.made_epoch)
        event = machine.PoolDonated(session.number, message.epoch, message.geometry, message.made_epoch)
        if self._refused(session, message.call, event):
            self._drop_pages()
        else:
            session.reply(protocol.Done(message.call))

    def _cannot_donate(self, upload: Upload, message: protocol.DonatePool, fds: list[int]) -> Why | None:
        if not self._lost or self.state.pages is not None:
            return "stale", f"nothing was lost here: the pool is {self.state.phase}"
        return self._too_far(message.epoch) or wrong_pool_slab(
            self._shared.device, upload, message.sizes, fds, last=message.last
        )

    def fetch(self, session: Session, message: protocol.FetchPool) -> None:
        """Send index and pages to the owner and to mappers of the device (a standby keeps them mapped)."""
        if not session.maps:
            session.fail(message.call, "not_registered", "say that this process maps the device first")
            return
        pages = self.state.pages
        if pages is None or not pages.made:
            session.fail(message.call, "absent", "there is no pool here")
            return
        # Only after the keeper has the pool. Otherwise, if the vault dies now, the owner may make another pool under
        # the same epoch at the next vault, and a client would take the one it mapped for that pool.
        self._record(session)
        fds = self._shared.records.by_key[PAGES_KEY].fds
        session.reply_slabs(message.call, self._sizes, fds, pages.made_epoch, pages.geometry_hash)

    def quiesce(self, session: Session, message: protocol.Quiesced) -> None:
        if self._refused(session, message.call, machine.OwnerQuiesced(session.number, message.epoch)):
            return
        self._seat(session)
        session.reply(protocol.Done(message.call))

    def cancel(self, session: Session) -> None:
        session.pool_call = 0
        self.step(machine.CancelAcquire(session.number))

    def give_up(self, session: Session) -> None:
        """Take back a grant that the session does not know of, so that it has touched nothing."""
        session.pool_granted = 0
        if session.epoch is not None:
            self.step(machine.OwnerQuiesced(session.number, session.epoch))
            self._seat(session)

    def come_back(self, session: Session, epoch: int | None) -> None:
        """Handle a client that reconnects after a restart of the vault: check its epoch, resend fences and notices."""
        if epoch != session.epoch:
            self.disown(session, epoch)
            self.give_up(session)
        elif self.state.owner == session.number and epoch is not None:
            session.reply(protocol.Fence("cpu", epoch))
            if self.state.gpu_fence_told:
                session.reply(protocol.Fence("gpu", epoch))
        if self.is_mapper(session):
            self._tell_missed(session)

    def disown(self, session: Session, epoch: int | None) -> None:
        """Tell a session that it no longer owns the pool of `epoch`: another one may own the pages it writes to. After
        a total loss the vault knows no epochs and sends nothing: the session may donate its pool."""
        if epoch is not None and epoch <= self.state.last_epoch:
            session.reply(
                protocol.Deposed(epoch, f"epoch {epoch} does not own the pool any more: it is {self.state.phase}")
            )

    def _tell_missed(self, session: Session) -> None:
        for news in machine.missed(self.state):
            session.tell_at_once(news)

    # -- events

    def cut_off(self, session: Session) -> None:
        """Handle a lost connection of a living process: it stays a mapper and keeps its pool, but unfinished uploads
        are dropped."""
        session.pool_donation.drop()
        if self.state.owner == session.number:
            self._upload.drop()

    def gone(self, session: Session) -> None:
        self.cut_off(session)
        self.step(machine.ClientGone(session.number))

    # -- effects

    def is_mapper(self, session: Session) -> bool:
        return any(mapper.session == session.number for mapper in self.state.mappers)

    def step(self, event: machine.Event) -> None:
        self.state, effects = machine.step(self.state, event, self._shared.now_s())
        self.perform(effects)

    def _refused(self, session: Session, call: int, event: machine.Event) -> bool:
        """Step the event of a call; if the machine refuses it, answer so and return True."""
        self.state, effects = machine.step(self.state, event, self._shared.now_s())
        mine = [
            effect for effect in effects if isinstance(effect, machine.RefusePool) and effect.session == session.number
        ]
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
            self._record()
            self._drop_pages()
            self._shared.note(f"the pool of epoch {effect.epoch} is dropped")
        elif isinstance(effect, machine.Orphaned):
            self._record()
            self._shared.note(f"the pool is orphaned: the owner of epoch {effect.epoch} has ended")
        elif (
            not isinstance(effect, machine.TellPoolMade)
            and (session := self._shared.sessions.get(effect.session)) is not None
        ):
            self._tell(session, effect)
        if news is not None and isinstance(effect, machine.GrantPool):
            self._spread(news)  # after the owner, which needs its message first

    def _spread(self, news: protocol.PoolNews) -> None:
        for number in {mapper.session for mapper in self.state.mappers if not mapper.closed}:
            if (session := self._shared.sessions.get(number)) is not None:
                session.tell_at_once(news)

    def _tell(self, session: Session, effect: machine.Effect) -> None:
        call = session.pool_call
        match effect:
            case machine.GrantPool():
                session.pool_call, session.pool_granted = 0, call
                self._lost = False
                self._record(session)  # the mapper was recorded with the CPU fence just before
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
            case machine.PoolTimedOut():
                session.pool_call = 0
                session.reply(protocol.Failed(call, "timeout", f"an earlier owner may still be there: {self.state!r}"))
            case machine.RefusePool():
                session.pool_call = 0
                session.reply(protocol.Failed(call, effect.code, effect.reason))

    def _seat(self, session: Session) -> None:
        session.maps = self.is_mapper(session)
        session.epoch = self.state.epoch_of(session.number)
        session.remember()
