"""What the vault's two tags, `weights` and `kv_cache`, have in common: what they share, how effects are carried out.

Always true: effects are carried out in their order, also where carrying one out is an event of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from holdfast.core.ports import Clock
from holdfast.memory.vault.uploads import Budget

if TYPE_CHECKING:
    from holdfast.memory.vault.kept import KeptRecords
    from holdfast.memory.vault.sessions import Session

Effect = TypeVar("Effect")


@dataclass(frozen=True)
class Shared:
    """One vault, as its tags see it."""

    device: str
    budget: Budget
    kept: KeptRecords
    sessions: dict[int, Session]  # by number
    now_s: Callable[[], float]  # the event loop's
    clock: Clock
    note: Callable[[str], None]  # for the history that people read
    mark: Callable[[str], None]  # for whoever follows this vault (`VaultSettings.marker`)


class InOrder(Generic[Effect]):
    """Telling one client may find another's connection broken, which is the next event: its effects come after."""

    def __init__(self, carry_out: Callable[[Effect], None]) -> None:
        self._carry_out = carry_out
        self._due: deque[Effect] = deque()
        self._at_work = False
        self.counts: Counter[str] = Counter()  # effects by name, for the metrics

    def __call__(self, effects: Iterable[Effect]) -> None:
        self._due += effects
        if self._at_work:
            return
        self._at_work = True
        try:
            while self._due:
                effect = self._due.popleft()
                self.counts[type(effect).__name__] += 1
                self._carry_out(effect)
        finally:
            self._at_work = False
