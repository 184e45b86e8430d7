"""Finds the slow workers of a set, and tells them apart from a set that is slow as a whole. Pure: no I/O, no clock.

Theory (facts 24). Slowness is no failure: a busy machine, long prompts or a cold cache make every worker slow, and
taking work off slow workers then only overloads the others. So a worker is never compared with a fixed number, but with
the other workers of its set, at the same time and in the same unit. Its *pace* (seconds per token, or a canary's time
over its usual time) is divided by the median of the others' paces:
- If all are slow, the median is slow too, and none is an outlier.
- If half of the others are slow, it is unknown which half is normal, and none is an outlier.
- A single worker has no other to be compared with.
A worker must exceed the bound for a while to be slow, and stay within a smaller bound for a while to be normal again,
so that a long prefill or noise changes nothing.

Always true:
- A worker is CRAWLING only if every measurement over at least `CRAWL_S` was at `CRAWL_RATIO` or more.
- A worker that is not measured keeps its pace class.
- Of workers that are measured together at least one is not CRAWLING: a whole set is never drained for slowness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

# A worker three times slower must be found despite noise: 2.5. A wrong verdict costs half its traffic.
SLOW_RATIO = 2.5
# A long prefill makes a worker slow for a second or two.
SLOW_S = 5.0
# A worker twenty times slower must be CRAWLING, one three times slower must not: 10 is far from both.
CRAWL_RATIO = 10.0
CRAWL_S = 10.0
# Normal again: well below the bound that made it slow, for as long as CRAWL_S.
NORMAL_RATIO = 1.5
NORMAL_S = 10.0
# After a gap this long between measurements the durations start again: nothing is known about the gap.
GAP_S = 15.0


class PaceClass(StrEnum):
    NORMAL = "in pace"
    SLOW = "slow"
    CRAWLING = "crawling"


@dataclass(frozen=True, slots=True)
class Paced:
    """One worker's pace class has changed; `ratio` is its pace over the median of the others."""

    name: str
    pace: PaceClass
    ratio: float

    @property
    def reason(self) -> str:
        return f"{self.pace}: {self.ratio:.1f} times the time of its set's median"


class _PacedWorker:
    def __init__(self, pace: PaceClass) -> None:
        self.pace = pace
        self.measured_s: float | None = None
        # Since when every measurement met SLOW_RATIO, CRAWL_RATIO or NORMAL_RATIO; None: the last did not.
        self.slow_since_s: float | None = None
        self.crawls_since_s: float | None = None
        self.normal_since_s: float | None = None

    def measure(self, ratio: float, now_s: float) -> PaceClass:
        if self.measured_s is not None and now_s - self.measured_s > GAP_S:
            self.slow_since_s = self.crawls_since_s = self.normal_since_s = None
        self.measured_s = now_s
        self.slow_since_s = _since(self.slow_since_s, ratio >= SLOW_RATIO, now_s)
        self.crawls_since_s = _since(self.crawls_since_s, ratio >= CRAWL_RATIO, now_s)
        self.normal_since_s = _since(self.normal_since_s, ratio <= NORMAL_RATIO, now_s)
        if _lasted(self.crawls_since_s, CRAWL_S, now_s):
            return PaceClass.CRAWLING
        if self.pace is PaceClass.NORMAL and _lasted(self.slow_since_s, SLOW_S, now_s):
            return PaceClass.SLOW
        if _lasted(self.normal_since_s, NORMAL_S, now_s):
            return PaceClass.NORMAL
        return self.pace


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _lasted(since_s: float | None, for_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= for_s


class Outliers:
    """Compares the paces of one set's workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _PacedWorker] = {}

    def restore(self, name: str, pace: PaceClass) -> None:
        """Set a worker's pace class from its record; measurements change it later."""
        self._workers[name] = _PacedWorker(pace)

    def forget(self, name: str) -> None:
        self._workers.pop(name, None)

    def measure(self, paces: Mapping[str, float], now_s: float, only: str | None = None) -> tuple[Paced, ...]:
        """Compare the paces of workers that recently made tokens or answered a canary, and return the changes. Callers
        leave out quarantined workers, but not those drained for slowness. `only`: the one worker that was measured
        now."""
        before = {name: self._workers.setdefault(name, _PacedWorker(PaceClass.NORMAL)).pace for name in paces}
        measured = paces if only is None else (only,)
        ratios = {name: ratio for name in measured if (ratio := ratio_of(name, paces)) is not None}
        # The fastest first, so that a worker is back in pace before another is found to crawl.
        for name in sorted(ratios, key=ratios.__getitem__):
            worker = self._workers[name]
            pace = worker.measure(ratios[name], now_s)
            spared = pace is PaceClass.CRAWLING and all(
                self._workers[other].pace is PaceClass.CRAWLING for other in paces if other != name
            )
            worker.pace = max(worker.pace, PaceClass.SLOW, key=list(PaceClass).index) if spared else pace
        return tuple(
            Paced(name, self._workers[name].pace, ratios[name])
            for name in ratios
            if self._workers[name].pace is not before[name]
        )


def ratio_of(name: str, paces: Mapping[str, float]) -> float | None:
    """Return this worker's pace over the median of the others; None if there is no other."""
    others = [pace for other, pace in paces.items() if other != name]
    middle = median(others) if others else 0.0
    return paces[name] / middle if middle > 0.0 else None
