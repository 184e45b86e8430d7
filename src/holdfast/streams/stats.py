"""What a frontend counts of its streams: gaps between tokens, what each failure cost them, what was lost or refused.

The histogram is on the per-token path, where a call of a metrics library would cost a quarter of the whole frontend
(facts 33): equal gaps of one step, mostly all of them, are counted together, and the metrics page reads the counts.

Always true: every token but a stream's first is counted once; a gap is counted when it ends, so a stall shows as one
long gap, whatever made it; a seam's gap is from the last token before the failure to the first after it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Upper bounds, seconds: a step of a small model, of a large one, then what people notice, then stalls.
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Failures remembered: what a supervisor that asks every second can have missed, and far more.
SEAMS_MAX = 64


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


@dataclass(slots=True)
class Seam:
    """What one worker's failure was to the streams that ran on it."""

    worker: int
    epoch: int  # it led under; 0 for one without a group
    streams: int = 0  # that went on elsewhere
    lost: int = 0  # that did not
    worst_s: float = 0.0  # last token before to first token after


class Seams:
    """The latest failures."""

    def __init__(self) -> None:
        self._seams: dict[tuple[int, int], Seam] = {}

    def went_on(self, worker: tuple[int, int], gap_s: float) -> None:
        """A stream of a failed worker has its next token."""
        seam = self._of(worker)
        seam.streams += 1
        seam.worst_s = max(seam.worst_s, gap_s)

    def lost(self, worker: tuple[int, int]) -> None:
        """A stream of a failed worker ended without its end."""
        self._of(worker).lost += 1

    def latest(self) -> list[Seam]:
        return list(self._seams.values())

    def _of(self, worker: tuple[int, int]) -> Seam:
        seam = self._seams.get(worker)
        if seam is None:
            seam = self._seams[worker] = Seam(*worker)
            if len(self._seams) > SEAMS_MAX:
                del self._seams[next(iter(self._seams))]
        return seam


@dataclass(slots=True)
class DispatchStats:
    """Counted here, shown by the metrics page."""

    resumed: dict[str, int] = field(default_factory=dict)  # by the failure's name
    lost: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # new requests that never ran, by why
    pauses_s: list[float] = field(default_factory=list)  # at a failure, token to token; drained by the metrics page
    gaps: dict[str, TokenGaps] = field(default_factory=dict)  # by model
    seams: Seams = field(default_factory=Seams)
    takeovers: int = 0  # a standby said that it is active now
