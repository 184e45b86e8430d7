"""Streams waiting for a place: resumed ones, then suspects, then new ones; of each, the higher tiers first. Pure.

Streams that wait for one particular worker stand *apart*: they hold up no other stream and are not taken by `first`.

Always true: a stream that ran before is never refused a place in line; new ones have `fresh_max` places there, which
those keep who stand first (`routing.tiers`); every held stream leaves by being taken, cancelled, pushed out or overdue;
one that comes back (a worker turned it away) stands where it stood.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from holdfast.core.tiers import Tier
from holdfast.routing.table import Standing
from holdfast.routing.tiers import InLine, TierLine

Stream = TypeVar("Stream", bound=Hashable)

# Only a hint, but clients obey it: sooner than a second would be a burden, later than half a minute a lost client.
RETRY_AFTER_S_MIN = 1.0
RETRY_AFTER_S_MAX = 30.0
# How much one gap counts against those before it: about the last ten matter.
WEIGHT = 0.1


class HoldQueue(Generic[Stream]):
    """Held streams of one worker set, in the order they will be taken up again. `stays`: a new one that nobody may push
    out any more."""

    def __init__(self, fresh_max: int, stays: Callable[[Stream], bool] = lambda stream: False) -> None:
        self._lines: dict[Standing, TierLine[Stream]] = {
            standing: TierLine(fresh_max if standing is Standing.FRESH else None, stays) for standing in Standing
        }
        self._apart: TierLine[Stream] = TierLine(None)

    @property
    def _all(self) -> list[TierLine[Stream]]:
        return [self._apart, *self._lines.values()]

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def __contains__(self, stream: Stream) -> bool:
        return any(stream in line for line in self._all)

    def hold(self, stream: Stream, tier: Tier, since_s: float, standing: Standing) -> Stream | None:
        """Keep a stream that waits since then. Whoever has no place in line any more is returned: itself, or a new one
        that stood last."""
        assert stream not in self, "a stream is held once"
        return self._lines[standing].join(stream, tier, since_s)

    def hold_apart(self, stream: Stream, tier: Tier, since_s: float) -> None:
        """Keep a stream that waits since then for one particular worker."""
        assert stream not in self, "a stream is held once"
        self._apart.join(stream, tier, since_s)

    def apart(self) -> list[InLine[Stream]]:
        """Return those that wait for one particular worker, in order."""
        return list(self._apart)

    def rejoin(self, stream: Stream, standing: Standing) -> None:
        """A stream that stood apart waits for any worker from now on, where it would stand had it waited there."""
        held = next(held for held in self._apart if held.item == stream)
        self._apart.leave(stream)
        self._lines[standing].join(stream, held.tier, held.since_s)

    def drop(self, stream: Stream) -> None:
        for line in self._all:
            line.leave(stream)

    def first(self) -> InLine[Stream] | None:
        """Who is next."""
        return next((line.first() for line in self._lines.values() if len(line)), None)

    @property
    def suspects(self) -> int:
        return len(self._lines[Standing.SUSPECT])

    def overdue(self, now_s: float, patience_s: Callable[[InLine[Stream]], float]) -> list[InLine[Stream]]:
        """Take out all who have waited for as long as they may."""
        late = [held for held in self if now_s - held.since_s >= patience_s(held)]
        for held in late:
            self.drop(held.item)
        return late

    def __iter__(self) -> Iterator[InLine[Stream]]:
        for line in self._all:
            yield from line


class Pace:
    """How soon a place comes free, from how soon the last ones did: when to tell a refused client to come back.
    `full_since_s`: when the workers were seen to be full; 0: they are not, and whoever takes a place then waited for
    nobody's end."""

    __slots__ = ("_gap_s", "_last_s", "_seen")

    def __init__(self) -> None:
        self._last_s = 0.0
        self._gap_s = RETRY_AFTER_S_MIN  # until one was seen: a line is told more than one who stands alone
        self._seen = 0

    def came_free(self, now_s: float, full_since_s: float) -> None:
        if full_since_s:
            self._seen += 1  # the first count in full
            gap_s = min(self._waited_s(now_s, full_since_s), RETRY_AFTER_S_MAX)
            self._gap_s += max(WEIGHT, 1 / self._seen) * (gap_s - self._gap_s)
        self._last_s = now_s

    def retry_after_s(self, waiting: int, now_s: float, full_since_s: float) -> float:
        """When whoever comes now, behind `waiting` others, could have a place. None came free for some time already,
        and the next may take as long again."""
        gap_s = max(self._gap_s, self._waited_s(now_s, full_since_s))
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, gap_s * (waiting + 1)))

    def _waited_s(self, now_s: float, full_since_s: float) -> float:
        """For how long none has come free."""
        return now_s - max(self._last_s, full_since_s) if full_since_s else 0.0
