"""The KV pool of one device, as the vault serves it: the pool machine's effects carried out.

Always true: the pool is granted to one epoch only, and not before the keeper knows; pages and index survive their
owner; a pool of another geometry is dropped before the new owner may make its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.memory.devices.contract import DeviceError
from holdfast.memory.devices.fds import FdKind, check_slab_fd, fd_kind
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, close_all
from holdfast.memory.layout import SLABS_MAX
from holdfast.memory.pool_machine import (
    Acquire,
    Cancel,
    CpuFence,
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
from holdfast.memory.protocol import AcquirePool, AddPoolSlabs, Done, Failed, Fence, Mapping, PoolGranted, Slabs
from holdfast.memory.protocol import Quiesced as QuiescedCall
from holdfast.memory.vault_weights import TIMEOUT_MS_MAX

if TYPE_CHECKING:
    from holdfast.memory.kept import KeptRecords
    from holdfast.memory.sessions import Session

KEY = "pool"


class PoolRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a restarted vault must know; the descriptors beside it are the index's and then the pages'."""

    last_epoch: int
    geometry: str | None
    made: bool
    owner: int | None
    sizes: list[int]


_decode = msgspec.msgpack.Decoder(PoolRecord).decode


class VaultPool:
    """Tag `kv_cache`."""

    def __init__(
        self,
        device: str,
        kept: KeptRecords,
        sessions: dict[int, Session],
        clock: Callable[[], float],
        note: Callable[[str], None],
    ) -> None:
        self._device = device
        self._kept = kept
        self._sessions = sessions
        self._clock = clock
        self._note = note
        self.state = Pool()
        self.sizes: list[int] = []  # the index, then the pages
        self._uploaded: list[int] = []  # descriptors of a pool being made; then they are the record's

    def adopt(self, seats: list[Seat]) -> None:
        """Take over what the keeper had; the owner's seat is among `seats` if its process lives."""
        kept = self._kept.records.get(KEY)
        if kept is None:
            return
        record = _decode(kept.blob)
        self.sizes = list(record.sizes)
        pages = Pages(record.geometry, record.made) if record.geometry is not None else None
        seated = {seat.session for seat in seats if seat.epoch == record.last_epoch}
        owner = record.owner if record.owner in seated else None
        self.state, effects = restore(record.last_epoch, pages, owner, seats)
        self._perform(effects)

    def kept_bytes(self) -> int:
        return sum(self.sizes)

    def deadline_s(self) -> float | None:
        return next_deadline(self.state)

    # -- calls

    def join(self, session: Session, message: Mapping) -> None:
        if self._refused(session, message.call, MapperJoined(session.number, message.epoch, session.number)):
            return
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
        why = self._cannot_add(session, message.sizes, fds)
        if why is not None:
            close_all(fds)
            session.fail(message.call, *why)
            return
        self.sizes += message.sizes
        self._uploaded += fds
        if message.last:
            self.step(PoolMade(session.number, self.state.last_epoch))
            uploaded, self._uploaded = self._uploaded, []
            self._remember(session, uploaded)
        session.reply(Done(message.call))

    def _cannot_add(self, session: Session, sizes: list[int], fds: list[int]) -> tuple[str, str] | None:
        pages = self.state.pages
        if self.state.owner != session.number or pages is None or pages.made:
            return "not_owner", "only the owner of a fresh pool hands over its pages"
        if len(sizes) != len(fds) or len(self._uploaded) + len(fds) > SLABS_MAX:
            return "bad_request", f"{len(sizes)} sizes came with {len(fds)} descriptors; at most {SLABS_MAX} slabs"
        for place, fd in enumerate(fds):
            is_index = not self._uploaded and place == 0
            try:
                if is_index and fd_kind(fd) is not FdKind.MEMFD:
                    return "wrong_fd", "the first descriptor is the index's, a memfd"
                if not is_index:
                    check_slab_fd(self._device, fd)
            except DeviceError as error:
                return "wrong_fd", f"slab {place}: {error}"
        return None

    def fetch(self, session: Session, call: int) -> None:
        """Index and pages, for the owner and for mappers of the device (a standby keeps them mapped)."""
        if not session.maps:
            session.fail(call, "not_registered", "say that this process maps the device first")
            return
        if self.state.pages is None or not self.state.pages.made:
            session.fail(call, "absent", "there is no pool here")
            return
        fds = self._kept.records[KEY].fds
        for start in range(0, len(self.sizes), FDS_PER_FRAME_MAX):
            end = start + FDS_PER_FRAME_MAX
            session.reply(Slabs(call, self.sizes[start:end], more=end < len(self.sizes)), fds[start:end])

    def quiesce(self, session: Session, message: QuiescedCall) -> None:
        if self._refused(session, message.call, Quiesced(session.number, message.epoch)):
            return
        self._seat(session)
        session.reply(Done(message.call))

    def cancel(self, session: Session) -> None:
        session.pool_call = 0
        self.step(Cancel(session.number))

    # -- events and effects

    def gone(self, session: Session) -> None:
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
        for effect in effects:
            if isinstance(effect, DropPool):
                close_all(self._uploaded)
                self.sizes, self._uploaded = [], []
                self._remember(None, [])
                self._note(f"the pool of epoch {effect.epoch} is dropped")
            elif isinstance(effect, Orphaned):
                self._remember(None)
                self._note(f"the pool is orphaned: the owner of epoch {effect.epoch} has ended")
            else:
                session = self._sessions.get(effect.session)
                if session is not None:
                    self._tell(session, effect)

    def _tell(self, session: Session, effect: Effect) -> None:
        call = session.pool_call
        match effect:
            case GrantPool():
                session.pool_call = 0
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
        session.maps = any(seat.session == session.number for seat in self.state.seats)
        session.epoch = self.state.epoch_of(session.number)
        session.remember()

    def _remember(self, session: Session | None, fds: list[int] | None = None) -> None:
        """Put the pool's record (with new descriptors, or those it has); what `session` is told next waits for it."""
        state = self.state
        if fds is None:
            old = self._kept.records.get(KEY)
            fds = old.fds if old is not None else []
        geometry = state.pages.geometry_hash if state.pages is not None else None
        made = state.pages is not None and state.pages.made
        record = PoolRecord(state.last_epoch, geometry, made, state.owner, self.sizes if made else [])
        if session is not None:
            session.wait_for_keeper()
        then = session.acknowledge if session is not None else _nothing
        self._kept.put(KEY, msgspec.msgpack.encode(record), fds if made else [], then)


def _nothing() -> None:
    """Nobody waits for it."""
