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
TARGETS_MAX = 64  # workers that are named of one failure: more than take one worker's streams
MOVED_MAX = 256  # pairs of groups: all of sixteen; of more, those that streams went between lately


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


@dataclass(frozen=True, slots=True)
class Place:
    """A worker as its streams leave it, or come to it."""

    worker: int
    epoch: int = 0  # it led under; 0 for one without a group
    group: str = ""  # its name, or the worker's, which is a group of its own
    name: str = ""  # the worker's
    fall: int = 0  # the last that is known of it (`health.standing`)
    wrong: bool = False  # what it makes cannot be believed

    def method(self, target: Place) -> str:
        """How a stream goes on at another place, in a word for metrics. All send it anew; only at a standby of the same
        group is its KV there already."""
        return "token_mismatch" if self.wrong else "takeover" if self.group == target.group else "reprefill"


HANDOVER = "handover"  # the method of streams that left by plan


@dataclass(slots=True, eq=False)
class Seam:
    """What one failure of a worker was to the streams that ran on it: all that fail until it serves again."""

    place: Place  # as it was when the last of them failed
    survived: bool = False  # it serves again: whatever comes next is another failure
    streams: int = 0  # that went on elsewhere
    lost: int = 0  # that did not
    worst_s: float = 0.0  # last token before to first token after
    replayed: int = 0  # tokens that had been shown and were sent again
    recomputed: int = 0  # tokens of their texts whose KV was not found where they went on
    to: dict[str, int] = field(default_factory=dict)  # streams that went on, by the worker that made their next token

    @property
    def key(self) -> tuple[int, int]:
        return self.place.worker, self.place.epoch

    def went_on(self, gap_s: float, replayed: int, to: str, recomputed: int = 0) -> None:
        """A stream of it has its next token, of the worker `to`."""
        self.streams += 1
        self.worst_s = max(self.worst_s, gap_s)
        self.replayed += replayed
        self.recomputed += recomputed
        if to in self.to or len(self.to) < TARGETS_MAX:
            self.to[to] = self.to.get(to, 0) + 1


@dataclass(slots=True)
class DispatchStats:
    """Counted here, shown by the metrics page."""

    resumed: dict[str, int] = field(default_factory=dict)  # by the failure's name
    lost: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # new requests that never ran, by why
    shed: Counter[tuple[str, str]] = field(default_factory=Counter)  # for want of capacity: by tier and reason
    # Streams that have their next token elsewhere: by the group they left, the one they came to, and how.
    moved: dict[tuple[str, str, str], int] = field(default_factory=dict)
    pauses_s: list[tuple[str, float]] = field(default_factory=list)  # how, and token to token; drained by a scrape
    gaps: dict[str, TokenGaps] = field(default_factory=dict)  # by model
    seams: deque[Seam] = field(default_factory=lambda: deque(maxlen=SEAMS_MAX))  # the latest
    takeovers: int = 0  # a standby said that it is active now

    def went_on(self, source: Place, target: Place, pause_s: float) -> None:
        """A stream that failed at `source` has a token of `target`, so long after its last."""
        method = source.method(target)
        self.move(source, target, method)
        if len(self.pauses_s) < PAUSES_MAX:
            self.pauses_s.append((method, pause_s))

    def move(self, source: Place, target: Place, method: str) -> None:
        """One more, from here to there."""
        key = source.group, target.group, method
        self.moved[key] = self.moved.pop(key, 0) + 1
        if len(self.moved) > MOVED_MAX:  # the pair that was last seen longest ago
            del self.moved[next(iter(self.moved))]

    def handed_over(self, source: Place, target: Place, *, replayed: int) -> None:
        """A stream left by plan, and went on there."""
        self.move(source, target, HANDOVER)
        self.seam(source, survived=False).went_on(0.0, replayed, target.name)

    def seam(self, place: Place, *, survived: bool) -> Seam:
        """Of the failure that a stream at this place has just met: with others, or as its first. `survived`: the
        worker serves on, because only streams failed."""
        key = place.worker, place.epoch
        if survived:
            found = next(reversed(self.seams), None)
            seam = found if found and found.survived and found.key == key else None
        else:
            seam = self._unsurvived(*key)
        if seam is None:
            seam = Seam(place, survived)
            self.seams.append(seam)
        seam.place = place
        return seam

    def serves(self, worker: int, epoch: int) -> None:
        """It can take work, or makes tokens: whatever it failed, it survived."""
        if self.seams and (seam := self._unsurvived(worker, epoch)) is not None:
            seam.survived = True

    def _unsurvived(self, worker: int, epoch: int) -> Seam | None:
        key = (worker, epoch)
        return next((seam for seam in self.seams if not seam.survived and seam.key == key), None)
