"""The KV pool of one device in the vault: the pool machine stepped, its effects carried out, its news told.

Always true: effects are carried out in their order, also when carrying one out ends another client's connection; the
pool is granted to one epoch only, and not before the keeper knows. News alone goes out at once, ahead of the keeper: a
standby's wake waits for it, and it is a hint that nobody acts on without asking.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.memory.fdsocket import close_all
from holdfast.memory.protocol import Failed, Fence, PoolGranted, PoolNews
from holdfast.memory.vault.kept import nothing
from holdfast.memory.vault.pool_machine import (
    CpuFence,
    DropPool,
    Effect,
    Event,
    GpuFence,
    GrantPool,
    Made,
    Orphaned,
    Pool,
    Refuse,
    TimedOut,
    step,
)
from holdfast.memory.vault.pool_news import news_of
from holdfast.memory.vault.pool_record import KEY, PAGES_KEY, PagesRecord, record_of
from holdfast.memory.vault.uploads import Budget, Upload

if TYPE_CHECKING:
    from holdfast.memory.vault.kept import KeptRecords
    from holdfast.memory.vault.sessions import Session


class PoolEffects:
    """What the calls (vault_pool.py) stand on."""

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
        self._lost = False  # everything: an owner that lives may give its pool back
        self._due: deque[Effect] = deque()
        self._performing = False

    def has_seat(self, session: Session) -> bool:
        """Whether it is counted by the fences."""
        return any(seat.session == session.number for seat in self.state.seats)

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
        """Telling somebody may find its connection broken, which is an event of its own: its effects come after."""
        self._due += effects
        if self._performing:
            return
        self._performing = True
        try:
            while self._due:
                self._carry_out(self._due.popleft())
        finally:
            self._performing = False

    def _carry_out(self, effect: Effect) -> None:
        self.counts[type(effect).__name__] += 1
        news = news_of(effect)
        if news is not None and not isinstance(effect, GrantPool):
            self._spread(news)
        if isinstance(effect, DropPool):
            close_all(self._upload.fds)
            self._upload = Upload()
            self._remember(None)
            self._drop_pages()
            self._note(f"the pool of epoch {effect.epoch} is dropped")
        elif isinstance(effect, Orphaned):
            self._remember(None)
            self._note(f"the pool is orphaned: the owner of epoch {effect.epoch} has ended")
        elif not isinstance(effect, Made) and (session := self._sessions.get(effect.session)) is not None:
            self._tell(session, effect)
        if news is not None and isinstance(effect, GrantPool):
            self._spread(news)  # after its owner: nobody waits for it as that one does

    def _spread(self, news: PoolNews) -> None:
        """To everyone who maps the device, at once."""
        for number in {seat.session for seat in self.state.seats if not seat.closed}:
            session = self._sessions.get(number)
            if session is not None:
                session.tell_at_once(news)

    def _tell(self, session: Session, effect: Effect) -> None:
        call = session.pool_call
        match effect:
            case GrantPool():
                session.pool_call, session.pool_granted = 0, call
                self._lost = False
                self._remember(session)  # the fence just before it has recorded the seat
                session.reply(PoolGranted(call, effect.epoch, effect.adopt, effect.made_epoch))
                self._note(f"{session!r} owns the pool, epoch {effect.epoch}, {'adopted' if effect.adopt else 'fresh'}")
            case CpuFence():
                self._seat(session)
                session.reply(Fence("cpu", effect.epoch))
            case GpuFence():
                session.reply(Fence("gpu", effect.epoch))
                self._note(f"gpu fence of epoch {effect.epoch} has passed")
            case TimedOut():
                session.pool_call = 0
                session.reply(Failed(call, "timeout", f"an earlier owner may still be there: {self.state!r}"))
            case Refuse():
                session.pool_call = 0
                session.reply(Failed(call, effect.code, effect.reason))

    def _seat(self, session: Session) -> None:
        session.maps = self.has_seat(session)
        session.epoch = self.state.epoch_of(session.number)
        session.remember()

    def _remember(self, session: Session | None) -> None:
        """Put the pool's record; what `session` is told next waits for it."""
        if session is not None:
            session.wait_for_keeper()
        then = session.acknowledge if session is not None else nothing
        self._kept.put(KEY, msgspec.msgpack.encode(record_of(self.state)), [], then)

    def _keep_pages(self, upload: Upload, made_epoch: int) -> None:
        """Ahead of the record that says the pool is complete."""
        self.sizes = upload.sizes
        record = PagesRecord(made_epoch, upload.sizes)
        self._kept.put(PAGES_KEY, msgspec.msgpack.encode(record), upload.fds, nothing)

    def _drop_pages(self) -> None:
        """After the record that says there is no pool."""
        self.sizes = []
        self._kept.drop(PAGES_KEY)
