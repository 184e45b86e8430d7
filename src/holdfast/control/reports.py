"""Sums what all frontends report about each worker. Pure.

Theory. A report has a frontend's counts since its start. They only grow, so the next report makes up for a missed one;
the difference to the last report is what happened. A frontend's first report only sets the start of counting, because
an earlier leader counted what came before. A frontend that left the store is remembered: after a restart of the store
all frontends are missing for a moment, and their earlier counts must not count again. Streams that failed by the same
broken connection or stall count as one failure, also over several frontends.

Always true: nothing is counted twice, and nothing from before a frontend's first report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.health.breaker import Attempts, FailureKind
from holdfast.health.records import ReportRecord, WorkerSeen

# The time over which a pace is measured: shorter than the 5 s that slowness must last, and long enough for a worker
# which is twenty times slower than usual to make a token.
PACE_S = 3.0
FRONTENDS_MAX = 256  # last reports that are kept; those of the longest silent frontends are dropped first
# How far back possibly wrong answers can be counted, in seconds that had answers; canaries are far more frequent.
ENDED_SLOTS_MAX = 3600
ONE_CAUSE = frozenset({FailureKind.DISCONNECTED, FailureKind.STALLED, FailureKind.TIMEOUT})
# All frontends report the same cause within this time: each reports at most a second after it noticed it.
ONE_CAUSE_S = 2.5
KINDS = frozenset(FailureKind)


@dataclass(slots=True)
class WorkerSum:
    """What happened to one worker since the last `flush`."""

    succeeded: int = 0
    failed: dict[FailureKind, int] = field(default_factory=dict)
    outlived: int = 0
    excused: int = 0
    tokens: int = 0
    stream_s: float = 0.0

    def attempts(self) -> Attempts:
        failed = {kind: count for kind, count in self.failed.items() if count}
        return Attempts(self.succeeded, failed, self.outlived, self.excused)


class ReportTally:
    """Sums reports, by the worker's instance in hex, from `began_s` on."""

    def __init__(self, began_s: float = 0.0) -> None:
        self._began_s = began_s
        self._last: dict[str, Mapping[str, WorkerSeen]] = {}  # by frontend
        self._since: dict[str, WorkerSum] = {}
        self._paces: dict[str, deque[tuple[float, int, float]]] = {}  # by instance: when, tokens, streams' seconds
        self._caused_s: dict[tuple[str, FailureKind], float] = {}  # when a failure that streams share was last counted
        self._ended: dict[str, deque[tuple[float, int]]] = {}  # by instance: when, streams

    def add_report(self, frontend: str, report: ReportRecord) -> None:
        before = self._last.pop(frontend, None)
        if before is not None:
            for instance, seen in report.workers.items():
                self._add(instance, before.get(instance, WorkerSeen()), seen)
        self._last[frontend] = report.workers  # moved to the end: the order is by the last report
        if len(self._last) > FRONTENDS_MAX:
            del self._last[next(iter(self._last))]

    def _add(self, instance: str, old: WorkerSeen, new: WorkerSeen) -> None:
        if old == new:
            return
        happened = self._since.setdefault(instance, WorkerSum())
        happened.succeeded += max(0, new.succeeded - old.succeeded)
        happened.outlived += max(0, new.outlived - old.outlived)
        happened.excused += max(0, new.excused - old.excused)
        happened.tokens += max(0, new.tokens - old.tokens)
        happened.stream_s += max(0.0, new.stream_s - old.stream_s)
        for word, count in new.failed.items():
            kind = FailureKind(word) if word in KINDS else FailureKind.ENGINE_ERROR  # unknown: from a newer frontend
            happened.failed[kind] = happened.failed.get(kind, 0) + max(0, count - old.failed.get(word, 0))

    def flush(self, now_s: float) -> dict[str, WorkerSum]:
        """Return what happened since the last call, by instance, and start again from zero."""
        happened, self._since = self._since, {}
        for instance, one in happened.items():
            self._join_causes(instance, one, now_s)
            self._paces.setdefault(instance, deque()).append((now_s, one.tokens, one.stream_s))
            if one.succeeded:
                self._ended.setdefault(instance, deque(maxlen=ENDED_SLOTS_MAX)).append((now_s, one.succeeded))
        return happened

    def _join_causes(self, instance: str, happened: WorkerSum, now_s: float) -> None:
        """Count failures of one cause once: frontends report the same break or stall at different times."""
        for kind in ONE_CAUSE & happened.failed.keys():
            since_s = now_s - self._caused_s.get((instance, kind), float("-inf"))
            happened.failed[kind] = 0 if since_s < ONE_CAUSE_S else min(happened.failed[kind], 1)
            if happened.failed[kind]:
                self._caused_s[instance, kind] = now_s

    def paces(self, now_s: float) -> dict[str, float]:
        """Return seconds per token over `PACE_S`, for workers that made tokens; without a token there is no pace."""
        measured: dict[str, float] = {}
        for instance, slots in list(self._paces.items()):
            while slots and slots[0][0] <= now_s - PACE_S:
                slots.popleft()
            if not slots:
                del self._paces[instance]
                continue
            tokens, stream_s = sum(slot[1] for slot in slots), sum(slot[2] for slot in slots)
            if stream_s > 0.0 and tokens:
                measured[instance] = stream_s / tokens
        return measured

    def streams_since(self, instance: str, since_s: float) -> tuple[int, bool]:
        """Return how many reported streams of the worker are open or ended well since `since_s`. Also return whether
        that is all of them: False if counting began later, or older counts were dropped."""
        slots = self._ended.get(instance, deque())
        streams = sum(count for at_s, count in slots if at_s >= since_s)
        streams += sum(workers[instance].open for workers in self._last.values() if instance in workers)
        return streams, since_s >= self._began_s and (len(slots) < ENDED_SLOTS_MAX or slots[0][0] <= since_s)

    def forget(self, instance: str) -> None:
        self._paces.pop(instance, None)
        self._ended.pop(instance, None)
        self._caused_s = {key: at_s for key, at_s in self._caused_s.items() if key[0] != instance}
