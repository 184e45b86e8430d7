"""One worker as routing sees it, and those that can take a request now, with the choice among them.

Theory. Two random choices and the lesser load keep load even without a scan. A worker of weight 0.5 is to get half of
what it would: its load counts double, so that it is kept half as full, and every second time it is chosen another is
instead, so that it is so too where nothing is outstanding anywhere.

Always true: whoever is ready can be drawn, and nobody else; a choice looks at a few workers, however many there are.
Pure; randomness comes in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

# How often another is drawn for one that is to get less: where all are to get less, somebody must be taken.
REDRAWN_MAX = 2


class Slot:
    """One worker, as routing sees it."""

    __slots__ = (
        "admit_max",
        "aside_s",
        "aside_until_s",
        "batch",
        "capacity",
        "counted",
        "in_line",
        "inflight",
        "name",
        "outstanding",
        "reserved",
        "room",
        "routable",
        "trial",
        "unproven",
        "weight",
        "young_until_s",
    )

    def __init__(self, name: int, capacity: int) -> None:
        self.name = name
        self.capacity = capacity  # the places that it has, for running and waiting
        self.batch = capacity  # of those, the ones in which a stream runs at once
        self.admit_max: int | None = None  # a smaller bound while on probation
        self.inflight = 0
        self.outstanding = 0
        self.routable = False
        self.weight = 1.0  # the share that it gets, of what it would; above 0 where it is routable
        self.unproven = 0  # requests that have yet to make their first token here
        self.trial = False  # one of those is a suspect
        self.young_until_s = 0.0  # no suspect is tried on it before; 0: it has served for a while
        self.aside_until_s = 0.0
        self.aside_s = 0.0
        self.in_line = False  # it turned a request away: we may send as much as it has room for us, and no more
        self.reserved = False  # it did so for one that may not have every place: the others are not full for all
        self.room = 0
        self.counted = (0, 0, 0.0)  # what it adds to the table's counts: routable, of those full, places by weight

    @property
    def places(self) -> int:
        return self.capacity if self.admit_max is None else min(self.admit_max, self.capacity)

    @property
    def load(self) -> float:
        """What is outstanding, as heavy as it is for one that is to have this share."""
        return self.outstanding / self.weight

    def __repr__(self) -> str:
        state = "routable" if self.routable else "not routable"
        return f"<Slot {self.name:x} {self.inflight}/{self.capacity} {self.outstanding} tokens {state}>"


class Ready:
    """Workers with a place: a list with swap-removal."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._slots: list[Slot] = []
        self._at: dict[Slot, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._at

    def put(self, slot: Slot, *, ready: bool) -> None:
        """Whether it is one of them from now on."""
        if ready is (slot in self._at):
            return
        if ready:
            self._at[slot] = len(self._slots)
            self._slots.append(slot)
            return
        place, last = self._at.pop(slot), self._slots.pop()
        if last is not slot:
            self._slots[place] = last
            self._at[last] = place

    def choose(self, affine: Slot | None, credit: int) -> Slot | None:
        """The lesser load of two, or `affine`, whose load counts less by `credit`."""
        slots = self._slots
        if len(slots) <= 1:
            return slots[0] if slots else None
        best = self._lesser(*(slots if len(slots) == 2 else self._draw(len(slots))))
        if affine is not None and affine.load - credit <= best.load:
            best = affine
        for _ in range(REDRAWN_MAX):
            if best.weight == 1.0 or self._rng.random() < best.weight:
                break
            best = self._another(best)
        return best

    def _another(self, slot: Slot) -> Slot:
        """As if `slot` were not there."""
        others, own = len(self._slots) - 1, self._at[slot]
        if others == 1:
            return self._slots[1 - own]
        rest = [self._slots[place + (place >= own)] for place in self._places(others)]
        return self._lesser(*rest)

    def _draw(self, count: int) -> list[Slot]:
        return [self._slots[place] for place in self._places(count)]

    def _places(self, count: int) -> tuple[int, int]:
        """Two different ones of so many."""
        first = self._rng.randrange(count)
        second = self._rng.randrange(count - 1)
        return first, second + (second >= first)

    @staticmethod
    def _lesser(one: Slot, other: Slot) -> Slot:
        return one if one.load <= other.load else other
