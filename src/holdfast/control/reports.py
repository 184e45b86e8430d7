"""What all frontends together saw of each worker, from reports whose counts only grow. Pure.

Theory. A report is a frontend's counts since it began, so that one that was missed is in the next; what happened is the
difference to the last one. A frontend's first report is where counting begins: what it saw before was somebody else's
to judge. One that is not in the store any more is remembered: after a store's restart all of them are so for a moment,
and what they counted before must not count again. The streams that one broken connection or one stall took have one
cause, and are one failure, on whatever frontends they were.

Always true: nothing is counted twice, and nothing that a frontend had counted before it was known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.health.breaker import Attempts, Kind
from holdfast.health.records import Report, Seen

# Over which a pace is measured. Shorter than the 5 s that slowness must last; long enough that a worker which is twenty
# times slower than usual makes a token meanwhile.
PACE_S = 3.0
FRONTENDS_MAX = 256  # of which the last report is remembered; the longest silent go first
# For how long back answers can be counted that may be wrong; a canary comes far more often.
ENDED_SLOTS_MAX = 3600
ONE_CAUSE = frozenset({Kind.DISCONNECTED, Kind.STALLED, Kind.TIMEOUT})
# Within this all frontends have told of it: each reports at most a second after it saw it.
ONE_CAUSE_S = 2.5
KINDS = frozenset(Kind)


@dataclass(slots=True)
class Happened:
    """To one worker since the last time it was asked for."""

    succeeded: int = 0
    failed: dict[Kind, int] = field(default_factory=dict)
    outlived: int = 0
    excused: int = 0
    tokens: int = 0
    stream_s: float = 0.0

    def attempts(self) -> Attempts:
        failed = {kind: count for kind, count in self.failed.items() if count}
        return Attempts(self.succeeded, failed, self.outlived, self.excused)


class Tally:
    """Sums of reports, by worker's instance in hex, from `began_s` on."""

    def __init__(self, began_s: float = 0.0) -> None:
        self._began_s = began_s
        self._last: dict[str, Mapping[str, Seen]] = {}  # by frontend
        self._since: dict[str, Happened] = {}
        self._paces: dict[str, deque[tuple[float, int, float]]] = {}  # by instance: when, tokens, streams' seconds
        self._caused_s: dict[tuple[str, Kind], float] = {}  # when a failure that streams share was last counted
        self._ended: dict[str, deque[tuple[float, int]]] = {}  # by instance: when, streams

    def take(self, frontend: str, report: Report) -> None:
        before = self._last.pop(frontend, None)
        if before is not None:
            for instance, seen in report.workers.items():
                self._add(instance, before.get(instance, Seen()), seen)
        self._last[frontend] = report.workers  # the latest last
        if len(self._last) > FRONTENDS_MAX:
            del self._last[next(iter(self._last))]

    def _add(self, instance: str, old: Seen, new: Seen) -> None:
        if old == new:
            return
        happened = self._since.setdefault(instance, Happened())
        happened.succeeded += max(0, new.succeeded - old.succeeded)
        happened.outlived += max(0, new.outlived - old.outlived)
        happened.excused += max(0, new.excused - old.excused)
        happened.tokens += max(0, new.tokens - old.tokens)
        happened.stream_s += max(0.0, new.stream_s - old.stream_s)
        for word, count in new.failed.items():
            kind = Kind(word) if word in KINDS else Kind.ENGINE_ERROR  # a newer frontend's
            happened.failed[kind] = happened.failed.get(kind, 0) + max(0, count - old.failed.get(word, 0))

    def flush(self, now_s: float) -> dict[str, Happened]:
        """What happened since the last time, of whom something did."""
        happened, self._since = self._since, {}
        for instance, one in happened.items():
            self._join_causes(instance, one, now_s)
            self._paces.setdefault(instance, deque()).append((now_s, one.tokens, one.stream_s))
            if one.succeeded:
                self._ended.setdefault(instance, deque(maxlen=ENDED_SLOTS_MAX)).append((now_s, one.succeeded))
        return happened

    def _join_causes(self, instance: str, happened: Happened, now_s: float) -> None:
        """Frontends report each in its own second what one break or stall did to them."""
        for kind in ONE_CAUSE & happened.failed.keys():
            since_s = now_s - self._caused_s.get((instance, kind), float("-inf"))
            happened.failed[kind] = 0 if since_s < ONE_CAUSE_S else min(happened.failed[kind], 1)
            if happened.failed[kind]:
                self._caused_s[instance, kind] = now_s

    def paces(self, now_s: float) -> dict[str, float]:
        """Seconds per token over the last moments, of those whose clients had any; a long prefill alone is no pace."""
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
        """That ended well there since then, or are open, as far as was reported; and whether those are all: not where
        counting began later, or what came first is forgotten."""
        slots = self._ended.get(instance, deque())
        streams = sum(count for at_s, count in slots if at_s >= since_s)
        streams += sum(workers[instance].open for workers in self._last.values() if instance in workers)
        return streams, since_s >= self._began_s and (len(slots) < ENDED_SLOTS_MAX or slots[0][0] <= since_s)

    def forget(self, instance: str) -> None:
        """It is gone for good."""
        self._paces.pop(instance, None)
        self._ended.pop(instance, None)
        self._caused_s = {key: at_s for key, at_s in self._caused_s.items() if key[0] != instance}
