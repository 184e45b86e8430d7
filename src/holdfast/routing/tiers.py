"""The queue of waiting requests, ordered by tier. Pure.

Theory. A higher tier comes before a lower one, and within a tier the earlier request. A full queue keeps the first
requests of this order. So a higher tier pushes out waiting requests of a lower one, a new request of the lowest tier is
refused, and a request that returns gets its former position.

Always true:
- A queue never holds more than its bound. For each request that joins a full queue exactly one leaves: the last that
  need not stay, or the new one.
- A request is never pushed out by a lower tier, or by a later request of its tier.
- Running streams are not in a queue, so it cannot affect them.
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
class QueueEntry(Generic[Item]):
    item: Item
    tier: Tier
    since_s: float
    number: int  # orders requests that wait since the same moment


class TierQueue(Generic[Item]):
    """Requests that wait for a place, in the order in which places are given."""

    def __init__(self, waiting_max: int | None, stays: Callable[[Item], bool] = lambda item: False) -> None:
        self._waiting_max = waiting_max  # None: only requests join that ran before, which bounds their number
        self._stays = stays  # returns True for a request that must not be pushed out any more
        self._numbers = itertools.count()
        self._waiting: dict[Item, QueueEntry[Item]] = {}
        # Sorted lists: nearly all join at the end, and moving a thousand pointers costs less than a microsecond.
        self._rows: dict[Tier, list[tuple[float, int, Item]]] = {tier: [] for tier in Tier}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: Item) -> bool:
        return item in self._waiting

    def __iter__(self) -> Iterator[QueueEntry[Item]]:
        """Iterate over all waiting requests, in order; requests may leave during the iteration."""
        return iter([self._waiting[item] for row in self._rows.values() for _, _, item in row])

    def join(self, item: Item, tier: Tier, since_s: float) -> Item | None:
        """Add a request that has waited since `since_s`. Return the request that is pushed out, which may be `item`;
        None if there is room."""
        assert item not in self, "one waits once"
        waiting = self._waiting[item] = QueueEntry(item, tier, since_s, next(self._numbers))
        insort(self._rows[tier], (since_s, waiting.number, item), key=_position)
        if self._waiting_max is None or len(self._waiting) <= self._waiting_max:
            return None
        backwards = (other for row in reversed(self._rows.values()) for *_, other in reversed(row))
        last = next(other for other in backwards if other is item or not self._stays(other))
        self.leave(last)
        return last

    def leave(self, item: Item) -> None:
        """Remove a request: it got a worker, or its client left. Does nothing if it is not in the queue."""
        waiting = self._waiting.pop(item, None)
        if waiting is not None:
            row = self._rows[waiting.tier]
            del row[bisect_left(row, (waiting.since_s, waiting.number), key=_position)]

    def first(self) -> QueueEntry[Item] | None:
        """Return the request that gets the next place."""
        return next((self._waiting[row[0][2]] for row in self._rows.values() if row), None)

    def count(self, tier: Tier) -> int:
        return len(self._rows[tier])


def _position(entry: tuple[float, int, Item]) -> tuple[float, int]:
    return entry[:2]
