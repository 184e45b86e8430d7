"""The line in which requests wait by tier. Pure.

Theory. In a line a higher tier stands before a lower one, and within a tier whoever came first. A full line keeps those
who stand first: that one rule lets a higher tier push out a lower one's waiting work, refuses a newcomer of the lowest
tier, and is fair within a tier, also to one who comes back to where it stood.

Always true: a line never holds more than its bound; for each who joins a full line exactly one leaves it, the last who
need not stay, or the newcomer itself; nobody is pushed out by a lower tier, nor within its own tier by one who came
later. Running streams are not in a line, so nothing here can touch them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.core.tiers import Tier

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True, slots=True)
class InLine(Generic[Item]):
    """One who waits."""

    item: Item
    tier: Tier
    since_s: float
    number: int  # among those who wait since the same moment


class TierLine(Generic[Item]):
    """Who waits for a place, in the order in which places are given."""

    def __init__(self, waiting_max: int | None, stays: Callable[[Item], bool] = lambda item: False) -> None:
        self._waiting_max = waiting_max  # None: only those join who ran before, and were bounded then
        self._stays = stays  # whom nobody may push out any more
        self._numbers = itertools.count()
        self._waiting: dict[Item, InLine[Item]] = {}
        # Sorted. Nearly all join at the end, and moving a thousand pointers costs less than a microsecond.
        self._rows: dict[Tier, list[tuple[float, int, Item]]] = {tier: [] for tier in Tier}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: Item) -> bool:
        return item in self._waiting

    def __iter__(self) -> Iterator[InLine[Item]]:
        """All who wait, in order; they may leave meanwhile."""
        return iter([self._waiting[item] for row in self._rows.values() for _, _, item in row])

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(row)} {tier.word}" for tier, row in self._rows.items())
        return f"<TierLine of {self._waiting_max}: {counts}>"

    def join(self, item: Item, tier: Tier, since_s: float) -> Item | None:
        """Let it wait, since that time. Whoever has no place in the line any more is returned: `item` itself if the
        line is full of those who stand before it; None while there is room."""
        assert item not in self, "one waits once"
        waiting = self._waiting[item] = InLine(item, tier, since_s, next(self._numbers))
        insort(self._rows[tier], (since_s, waiting.number, item), key=_stands)
        if self._waiting_max is None or len(self._waiting) <= self._waiting_max:
            return None
        backwards = (other for row in reversed(self._rows.values()) for *_, other in reversed(row))
        last = next(other for other in backwards if other is item or not self._stays(other))
        self.leave(last)
        return last

    def leave(self, item: Item) -> None:
        """It got its place, or its client left. Whoever is not in the line is no concern."""
        waiting = self._waiting.pop(item, None)
        if waiting is not None:
            row = self._rows[waiting.tier]
            del row[bisect_left(row, (waiting.since_s, waiting.number), key=_stands)]

    def first(self) -> InLine[Item] | None:
        """Who gets the next place."""
        return next((self._waiting[row[0][2]] for row in self._rows.values() if row), None)

    def count(self, tier: Tier) -> int:
        return len(self._rows[tier])


def _stands(entry: tuple[float, int, Item]) -> tuple[float, int]:
    return entry[:2]
