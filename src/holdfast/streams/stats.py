"""A frontend's counts of its streams: gaps between tokens, the cost of each failure, lost and refused requests.

The histogram is on the per-token path, where calls to a metrics library would cost a quarter of the whole frontend
(facts 33). So equal gaps of one step (mostly all of them) are counted together, and the metrics page reads the counts.

Always true: every token but a stream's first is counted once. A gap is counted when it ends, so a stall shows as one
long gap, whatever its cause. A failure's gap is from the last token before the failure to the first after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

# Upper bounds in seconds: a step of a small model, of a large one, pauses that people notice, stalls.
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Failures remembered: far more than happen between two polls of a supervisor that asks every second.
FAILURES_MAX = 64
PAUSES_MAX = 65_536  # bounded if no scrape drains it
TARGETS_MAX = 64  # receiving workers named per failure: more than take one worker's streams
MOVED_MAX = 256  # pairs of groups: all pairs of sixteen groups; beyond that, the most recent


class TokenGaps:
    """Gaps of one model's streams, by bucket. Slotted and mutable: it is stepped for every frame."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, since_s: float, now_s: float, count: int) -> None:
        """Count `count` streams that got a token now and their previous one at `since_s` (0: none before)."""
        if since_s and count:
            gap_s = now_s - since_s
            self.counts[bisect_left(GAP_BOUNDS_S, gap_s)] += count
            self.sum_s += gap_s * count


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A worker that a stream left or came to."""

    worker: int
    epoch: int = 0  # under which it led; 0 without a group
    group: str = ""  # the group's name; without a group the worker's
    name: str = ""  # the worker's
    ejections: int = 0  # number of its last known ejection (`health.standing`)
    wrong: bool = False  # its output may be wrong

    def method(self, target: StreamPlace) -> str:
        """Return how a stream continues at another place, as a metrics label. It is always sent again; only at a
        standby of the same group is its KV there already."""
        return "token_mismatch" if self.wrong else "takeover" if self.group == target.group else "reprefill"


HANDOVER = "handover"  # the method of streams that left a draining worker


@dataclass(slots=True, eq=False)
class WorkerFailure:
    """The cost of one failure of a worker: it covers all streams that fail until the worker serves again."""

    place: StreamPlace  # as it was when the last stream failed
    survived: bool = False  # the worker serves again: the next failure is a new one
    streams: int = 0  # resumed
    lost: int = 0  # not resumed
    worst_s: float = 0.0  # longest gap from the last token before to the first after
    replayed: int = 0  # tokens that had been shown and were sent to the next worker
    recomputed: int = 0  # tokens that were computed again because their KV was not found
    to: dict[str, int] = field(default_factory=dict)  # resumed streams, by the worker that made their next token

    @property
    def key(self) -> tuple[int, int]:
        return self.place.worker, self.place.epoch

    def stream_resumed(self, gap_s: float, replayed: int, to: str, recomputed: int = 0) -> None:
        """Count a stream that got its next token from the worker `to`."""
        self.streams += 1
        self.worst_s = max(self.worst_s, gap_s)
        self.replayed += replayed
        self.recomputed += recomputed
        if to in self.to or len(self.to) < TARGETS_MAX:
            self.to[to] = self.to.get(to, 0) + 1


@dataclass(slots=True)
class DispatchStats:
    """Counts of what happened to streams, for the metrics page."""

    dispatched: dict[str, int] = field(default_factory=dict)  # streams sent to a worker, each attempt, by model
    resumed: dict[str, int] = field(default_factory=dict)  # by the failure's name
    lost: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # new requests that never ran, by code
    shed: Counter[tuple[str, str]] = field(default_factory=Counter)  # refused to save capacity: by tier and reason
    # Moved streams by the group they left, the group they came to, and the method.
    moved: dict[tuple[str, str, str], int] = field(default_factory=dict)
    pauses_s: list[tuple[str, float]] = field(default_factory=list)  # method, token to token; drained by a scrape
    gaps: dict[str, TokenGaps] = field(default_factory=dict)  # by model
    failures: deque[WorkerFailure] = field(default_factory=lambda: deque(maxlen=FAILURES_MAX))  # the latest
    takeovers: int = 0  # standbys that became active

    def stream_resumed(self, source: StreamPlace, target: StreamPlace, pause_s: float) -> None:
        """Count a stream that failed at `source` and got a token from `target`, `pause_s` after its last."""
        method = source.method(target)
        self.count_move(source, target, method)
        if len(self.pauses_s) < PAUSES_MAX:
            self.pauses_s.append((method, pause_s))

    def count_move(self, source: StreamPlace, target: StreamPlace, method: str) -> None:
        """Count a stream that moved from `source` to `target`."""
        key = source.group, target.group, method
        self.moved[key] = self.moved.pop(key, 0) + 1
        if len(self.moved) > MOVED_MAX:  # drop the least recently counted pair
            del self.moved[next(iter(self.moved))]

    def stream_handed_over(self, source: StreamPlace, target: StreamPlace, *, replayed: int) -> None:
        """Count a stream that left a draining worker and continues at `target`."""
        self.count_move(source, target, HANDOVER)
        self.failure_at(source, survived=False).stream_resumed(0.0, replayed, target.name)

    def failure_at(self, place: StreamPlace, *, survived: bool) -> WorkerFailure:
        """Return the failure record for a stream that just failed at `place`: an open one, or a new one. `survived`:
        only streams failed, and the worker still serves."""
        key = place.worker, place.epoch
        if survived:
            found = next(reversed(self.failures), None)
            failure = found if found and found.survived and found.key == key else None
        else:
            failure = self._unsurvived(*key)
        if failure is None:
            failure = WorkerFailure(place, survived)
            self.failures.append(failure)
        failure.place = place
        return failure

    def worker_serves(self, worker: int, epoch: int) -> None:
        """Note that a worker can take work or makes tokens: it survived its last failure."""
        if self.failures and (failure := self._unsurvived(worker, epoch)) is not None:
            failure.survived = True

    def _unsurvived(self, worker: int, epoch: int) -> WorkerFailure | None:
        key = (worker, epoch)
        return next((failure for failure in self.failures if not failure.survived and failure.key == key), None)
