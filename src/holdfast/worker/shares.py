"""Who gets the next place of a worker that is full: those in line, the one with the fewest streams here first. Pure.

Theory. Several frontends share a worker, and none of them knows of the others: only the worker can be fair. A request
that finds no place is turned away (it never ran, so nothing failed), and its frontend stands in line. A place that
comes free is *kept* for whoever in line has the fewest streams here, and it is told so; it answers with a request, or
it passes and leaves the line. So a frontend that wants little always gets it, those that want much get the same, and
what nobody in line wants is anybody's.

While capacity is short, some requests may not have every place (`routing.degradation`). They *leave* so many free, for
those that may; nothing is kept for whoever was turned away with one while there are no more; and what is kept for one
that may have every place is not for them. A frontend that gave such a request up does not hear that it was turned away
by its bound, and waits for any place: then it is told of any.

Always true: kept places are free places; whoever is not in line gets no kept place; a kept place is given up after
`KEEP_S`, for a frozen frontend must not hold one. Whoever was turned away is in line until it passes or is gone: it
sends nothing before it hears of room, so the worker may not forget it. One that was too slow is offered nothing before
it has said something.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)

# A frontend answers an offer in the pass that reads it: a millisecond, on a swamped machine some hundreds.
KEEP_S = 1.0


@dataclass(slots=True)
class _Turn:
    kept: int = 0
    until_s: float = 0.0  # meant only while places are kept
    leaves: int = 0  # free places that are not for it
    kept_for: int = 0  # what `leaves` was when they were kept: for requests that leave no more
    silent: bool = False  # it has not answered its last offer, which is given up


class Shares(Generic[Who]):
    """The line before one worker."""

    def __init__(self) -> None:
        self._line: dict[Who, _Turn] = {}  # who was offered a place last stands last
        self.kept = 0

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, who: Who) -> bool:
        return who in self._line

    def turn_away(self, who: Who, leaves: int = 0) -> None:
        """It found no place: it stands in line from now on, or still, for what it asked for last."""
        self._line.setdefault(who, _Turn()).leaves = leaves

    def take(self, who: Who, free: int, leaves: int = 0) -> bool:
        """Whether a request of `who` may have one of `free` places; one that was kept for it is used up."""
        turn = self._line.get(who)
        if turn is not None:
            turn.silent = False
        if turn is not None and turn.kept:
            turn.kept -= 1
            self.kept -= 1
            if leaves <= turn.kept_for:
                leaves = 0  # it was kept for such a one
        return free - leaves > self.kept

    def leave(self, who: Who) -> None:
        """It wants no more, or is gone; what was kept for it is free."""
        turn = self._line.pop(who, None)
        if turn is not None:
            self.kept -= turn.kept

    def decline(self, who: Who) -> None:
        """It does not want what was kept for it, and stays in line."""
        turn = self._line.get(who)
        if turn is not None:
            self.kept -= turn.kept
            turn.kept, turn.silent = 0, False

    def forget_bound(self, who: Who) -> None:
        """A request of its that may be the one it was turned away with last is gone: it may wait with another."""
        turn = self._line.get(who)
        if turn is not None:
            turn.leaves = 0

    def clear(self) -> None:
        self._line.clear()
        self.kept = 0

    def offer(self, free: int, streams_of: Callable[[Who], int], now_s: float) -> dict[Who, int]:
        """Keep places for those in line; how many for whom. Who has not answered its last offer gets no other."""
        for turn in self._line.values():
            if turn.kept and turn.until_s <= now_s:
                self.kept -= turn.kept
                turn.kept, turn.silent = 0, True
        spare = free - self.kept
        fewest = [
            (streams_of(who), place, who)
            for place, (who, turn) in enumerate(self._line.items())
            if not (turn.kept or turn.silent)
        ]
        offers: dict[Who, int] = {}
        heapq.heapify(fewest)
        while fewest and spare > 0:
            streams, place, who = fewest[0]
            if spare <= self._line[who].leaves:
                heapq.heappop(fewest)
                continue
            heapq.heapreplace(fewest, (streams + 1, place, who))  # places differ: `who` is never compared
            offers[who] = offers.get(who, 0) + 1
            spare -= 1
        for who, places in offers.items():
            turn = self._line[who] = self._line.pop(who)
            turn.kept, turn.until_s, turn.kept_for = places, now_s + KEEP_S, turn.leaves
            self.kept += places
        return offers

    @property
    def given_up_at_s(self) -> float | None:
        """When the first kept place is given up; None while none is kept."""
        return min((turn.until_s for turn in self._line.values() if turn.kept), default=None)

    def __repr__(self) -> str:
        return f"<Shares {len(self._line)} in line, {self.kept} places kept>"
