"""Streams waiting for a place: resumed ones, then suspects, then new ones, longest waiting first. Pure.

Always true: a stream that ran before is never refused a place in line; new ones are refused beyond `fresh_max`; every
held stream leaves by being taken, cancelled or overdue; one that comes back (a worker turned it away) stands where it
stood.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.routing.table import Standing

Stream = TypeVar("Stream", bound=Hashable)

# Only a hint, but clients obey it: sooner than a second would be a burden, later than half a minute a lost client.
RETRY_AFTER_S_MIN = 1.0
RETRY_AFTER_S_MAX = 30.0
# How much one gap counts against those before it: about the last ten matter.
WEIGHT = 0.1


@dataclass(slots=True)
class Held(Generic[Stream]):
    stream: Stream
    since_s: float
    standing: Standing
    number: int  # among those that wait since the same moment


class HoldQueue(Generic[Stream]):
    """Held streams of one worker set, in the order they will be taken up again."""

    def __init__(self, fresh_max: int) -> None:
        self._fresh_max = fresh_max
        self._numbers = itertools.count()
        self._held: dict[Stream, Held[Stream]] = {}
        self._counts = dict.fromkeys(Standing, 0)
        self._heap: list[tuple[Standing, float, int, Held[Stream]]] = []  # with some that are held no longer

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._held

    def hold(self, stream: Stream, since_s: float, standing: Standing) -> bool:
        """Keep a stream that waits since then; False if there is no room for another new one."""
        assert stream not in self, "a stream is held once"
        if standing is Standing.FRESH and self._counts[standing] >= self._fresh_max:
            return False
        held = self._held[stream] = Held(stream, since_s, standing, next(self._numbers))
        self._counts[standing] += 1
        heapq.heappush(self._heap, (standing, since_s, held.number, held))
        return True

    def drop(self, stream: Stream) -> None:
        held = self._held.pop(stream, None)
        if held is None:
            return
        self._counts[held.standing] -= 1
        if len(self._heap) > 2 * len(self._held) + 64:  # mostly of those who left: they cost memory only
            self._heap = [entry for entry in self._heap if self._is_held(entry[3])]
            heapq.heapify(self._heap)

    def first(self) -> Held[Stream] | None:
        """Who is next, still held."""
        while self._heap and not self._is_held(self._heap[0][3]):
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    @property
    def suspects(self) -> int:
        return self._counts[Standing.SUSPECT]

    def overdue(self, now_s: float, patience_s: Callable[[Held[Stream]], float]) -> list[Held[Stream]]:
        """Take out all who have waited for as long as they may."""
        late = [held for held in self if now_s - held.since_s >= patience_s(held)]
        for held in late:
            self.drop(held.stream)
        return late

    def __iter__(self) -> Iterator[Held[Stream]]:
        yield from sorted(self._held.values(), key=lambda held: (held.standing, held.since_s, held.number))

    def _is_held(self, held: Held[Stream]) -> bool:
        return self._held.get(held.stream) is held


class Pace:
    """How soon a place comes free, from how soon the last ones did: when to tell a refused client to come back."""

    __slots__ = ("_gap_s", "_last_s")

    def __init__(self) -> None:
        self._last_s = -1.0  # before the first
        self._gap_s = 0.0

    def came_free(self, now_s: float) -> None:
        if self._last_s >= 0.0:
            gap_s = min(now_s - self._last_s, RETRY_AFTER_S_MAX)
            self._gap_s += WEIGHT * (gap_s - self._gap_s)
        self._last_s = now_s

    def retry_after_s(self, waiting: int) -> float:
        """When whoever comes now, behind `waiting` others, could have a place."""
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, self._gap_s * (waiting + 1)))
