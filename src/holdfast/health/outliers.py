"""Which worker of a set is slow, told apart from a set that is slow as a whole. Pure: no I/O, no clock.

Theory (facts 24). Slowness is no failure: a busy machine, long prompts or a cold cache make every worker slow, and
taking work off slow workers then only loads the next ones. So a worker is measured against the others of its set, at
the same time and with the same unit, never against a fixed number: its pace (seconds per token, or a canary's time over
its own usual time) divided by the median of the others' paces. When all are slow the median is slow too, and nobody
stands out; when half of the others are slow it is not known who is right, and nobody does; a worker alone has nobody to
be slower than. It must stand out for a while, and be back within a smaller bound for a while, so that a long prefill or
a noisy boundary changes nothing.

Always true: nobody is CRAWLING who did not stand out by `CRAWL_RATIO` in every measurement of `CRAWL_S`, the first
and the last being that far apart; who is not measured keeps its pace, in both directions; and among those that are
measured together one at least is not CRAWLING, whatever is measured: a set is never drained for slowness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

# Three times slower must be found and is measured with noise: 2.5. Half the traffic is what it costs to be wrong.
SLOW_RATIO = 2.5
# A long prefill makes a worker slow for a second or two.
SLOW_S = 5.0
# Twenty times slower must be found, three times never. Half of twenty; far from both.
CRAWL_RATIO = 10.0
CRAWL_S = 10.0
# Back in pace: well within the bound that made it slow, for as long as it takes to be drained.
NORMAL_RATIO = 1.5
NORMAL_S = 10.0
# A worker that was not measured for so long begins anew: what it did before its pause proves nothing about a duration.
GAP_S = 15.0


class Pace(StrEnum):
    NORMAL = "in pace"
    SLOW = "slow"
    CRAWLING = "crawling"


@dataclass(frozen=True, slots=True)
class Paced:
    """One worker's pace changed; `ratio`: to the median of the others."""

    name: str
    pace: Pace
    ratio: float

    @property
    def reason(self) -> str:
        return f"{self.pace}: {self.ratio:.1f} times the time of its set's median"


class _Worker:
    __slots__ = ("crawls_since_s", "measured_s", "normal_since_s", "pace", "slow_since_s")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.measured_s: float | None = None
        # Since when each measurement was at least, or at most, that far from the median; None: the last was not.
        self.slow_since_s: float | None = None
        self.crawls_since_s: float | None = None
        self.normal_since_s: float | None = None

    def measure(self, ratio: float, now_s: float) -> Pace:
        if self.measured_s is not None and now_s - self.measured_s > GAP_S:
            self.slow_since_s = self.crawls_since_s = self.normal_since_s = None
        self.measured_s = now_s
        self.slow_since_s = _since(self.slow_since_s, ratio >= SLOW_RATIO, now_s)
        self.crawls_since_s = _since(self.crawls_since_s, ratio >= CRAWL_RATIO, now_s)
        self.normal_since_s = _since(self.normal_since_s, ratio <= NORMAL_RATIO, now_s)
        if _lasted(self.crawls_since_s, CRAWL_S, now_s):
            return Pace.CRAWLING
        if self.pace is Pace.NORMAL and _lasted(self.slow_since_s, SLOW_S, now_s):
            return Pace.SLOW
        if _lasted(self.normal_since_s, NORMAL_S, now_s):
            return Pace.NORMAL
        return self.pace


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _lasted(since_s: float | None, for_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= for_s


class Outliers:
    """The workers of one set, compared."""

    __slots__ = ("_workers",)

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def __repr__(self) -> str:
        slow = {name: str(worker.pace) for name, worker in self._workers.items() if worker.pace is not Pace.NORMAL}
        return f"<Outliers {slow or 'none'}>"

    def restore(self, name: str, pace: Pace) -> None:
        """What is written down of a worker: it keeps that until measurements say otherwise."""
        self._workers[name] = _Worker(pace)

    def forget(self, name: str) -> None:
        """It is gone, or another process now."""
        self._workers.pop(name, None)

    def measure(self, paces: Mapping[str, float], now_s: float, only: str | None = None) -> tuple[Paced, ...]:
        """Take the paces of workers that made tokens lately, or answered a canary, and could take each other's place
        (who is quarantined cannot; who was drained for slowness can); whose pace changed. `only`: one of them was
        measured now, beside what is known of the others."""
        before = {name: self._workers.setdefault(name, _Worker(Pace.NORMAL)).pace for name in paces}
        measured = paces if only is None else (only,)
        ratios = {name: ratio for name in measured if (ratio := ratio_of(name, paces)) is not None}
        # The fastest first, so that who is back in pace is so before another is found to crawl.
        for name in sorted(ratios, key=ratios.__getitem__):
            worker = self._workers[name]
            pace = worker.measure(ratios[name], now_s)
            spared = pace is Pace.CRAWLING and all(
                self._workers[other].pace is Pace.CRAWLING for other in paces if other != name
            )
            worker.pace = max(worker.pace, Pace.SLOW, key=list(Pace).index) if spared else pace
        return tuple(
            Paced(name, self._workers[name].pace, ratios[name])
            for name in ratios
            if self._workers[name].pace is not before[name]
        )


def ratio_of(name: str, paces: Mapping[str, float]) -> float | None:
    """How much slower this worker is than the median of the others; None: there is nothing to compare it with."""
    others = [pace for other, pace in paces.items() if other != name]
    middle = median(others) if others else 0.0
    return paces[name] / middle if middle > 0.0 else None
