"""What a frontend counts of its streams: gaps between tokens, what each failure cost them, what was lost or refused.

The histogram is on the per-token path, where a call of a metrics library would cost a quarter of the whole frontend
(facts 33): equal gaps of one step, mostly all of them, are counted together, and the metrics page reads the counts.

Always true: every token but a stream's first is counted once; a gap is counted when it ends, so a stall shows as one
long gap, whatever made it; a seam's gap is from the last token before the failure to the first after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

# Upper bounds, seconds: a step of a small model, of a large one, then what people notice, then stalls.
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Failures remembered: what a supervisor that asks every second can have missed, and far more.
SEAMS_MAX = 64
PAUSES_MAX = 65_536  # bounded if nobody scrapes


class TokenGaps:
    """Gaps of one model's streams, by bucket. Slotted and mutable: it is stepped for every frame."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, since_s: float, now_s: float, count: int) -> None:
        """So many streams have a token now, and had the one before it then (0: none before)."""
        if since_s and count:
            gap_s = now_s - since_s
            self.counts[bisect_left(GAP_BOUNDS_S, gap_s)] += count
            self.sum_s += gap_s * count

    def add_together(self, count: int) -> None:
        """So many tokens came together with the one before them."""
        self.counts[0] += count


@dataclass(slots=True, eq=False)
class Seam:
    """What one failure of a worker was to the streams that ran on it: all that fail until it serves again."""

    worker: int
    epoch: int  # it led under; 0 for one without a group
    survived: bool = False  # it serves again: whatever comes next is another failure
    streams: int = 0  # that went on elsewhere
    lost: int = 0  # that did not
    worst_s: float = 0.0  # last token before to first token after

    def went_on(self, gap_s: float) -> None:
        """A stream of it has its next token."""
        self.streams += 1
        self.worst_s = max(self.worst_s, gap_s)


@dataclass(slots=True)
class DispatchStats:
    """Counted here, shown by the metrics page."""

    resumed: dict[str, int] = field(default_factory=dict)  # by the failure's name
    lost: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # new requests that never ran, by why
    shed: Counter[tuple[str, str]] = field(default_factory=Counter)  # new requests too, by tier and reason
    pauses_s: list[float] = field(default_factory=list)  # at a failure, token to token; drained by the metrics page
    gaps: dict[str, TokenGaps] = field(default_factory=dict)  # by model
    seams: deque[Seam] = field(default_factory=lambda: deque(maxlen=SEAMS_MAX))  # the latest
    takeovers: int = 0  # a standby said that it is active now
    handed_over: int = 0  # streams that left a draining worker by plan

    def paused(self, pause_s: float) -> None:
        """A stream went on so long after its last token."""
        if len(self.pauses_s) < PAUSES_MAX:
            self.pauses_s.append(pause_s)

    def seam(self, worker: int, epoch: int, *, survived: bool) -> Seam:
        """Of the failure that a stream on this worker has just met: with others, or as its first. `survived`: the
        worker serves on, because only streams failed."""
        if survived:
            found = next(reversed(self.seams), None)
            seam = found if found and (found.worker, found.epoch, found.survived) == (worker, epoch, True) else None
        else:
            seam = self._unsurvived(worker, epoch)
        if seam is None:
            seam = Seam(worker, epoch, survived)
            self.seams.append(seam)
        return seam

    def serves(self, worker: int, epoch: int) -> None:
        """It can take work, or makes tokens: whatever it failed, it survived."""
        if self.seams and (seam := self._unsurvived(worker, epoch)) is not None:
            seam.survived = True

    def _unsurvived(self, worker: int, epoch: int) -> Seam | None:
        key = (worker, epoch)
        return next((seam for seam in self.seams if not seam.survived and (seam.worker, seam.epoch) == key), None)
