"""A frontend's counts of each worker, which it reports to control: ended attempts, tokens, stream seconds.

Tokens are counted a frame at a time, because this is the per-token path (facts 33). Stream seconds are counted at each
tick, only for streams that have made a token on the worker: a wait for the first token does not show the worker's pace.

Long streams end seldom, so a failure also counts as outlived when an attempt made tokens after it. A request may itself
be to blame. So until it has made tokens again, it counts against one worker at most; if it fails on a second worker,
against none.

Always true: counts only grow. Failures of one kind that happen at once (a broken connection, a stall, one frame) count
as one. Only failures that `health.breaker.classify_failure` attributes to the worker count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.health.breaker import FailureKind
from holdfast.health.records import WorkerSeen
from holdfast.streams.flight import Flight

# A worker that is gone is reported for so long: control gets its last counts even after a short loss of the store.
LINGER_S = 60.0
# An attempt that made so many tokens counts as progress. A worker that fails every request after its first tokens never
# gets there.
PROGRESS_TOKENS = 16


@dataclass(slots=True, eq=False)
class WorkerCounts:
    """Counts of one worker. Slotted and mutable: it is stepped for every frame."""

    succeeded: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    outlived: int = 0
    excused: int = 0
    tokens: int = 0
    stream_s: float = 0.0
    burst: int = 0  # number of the current frame or mass failure: events with the same number happened at once
    seen_s: float = 0.0  # when the worker was last known
    _counted: dict[FailureKind, int] = field(default_factory=dict)  # the burst in which a kind was last counted
    _failed_at_s: float = 0.0  # when the last failure was, if no progress followed yet; else 0

    def count_failure(self, kind: FailureKind | None, flight: Flight, streams: Iterable[Flight], now_s: float) -> None:
        """Count a failed attempt. `kind` None: not the worker's fault. `streams`: all on the worker, with this one."""
        if kind is None or self._is_the_requests(flight):
            return
        flight.blamed, flight.excused = self, self._counted.get(kind) == self.burst
        if flight.excused:  # another failure of this burst was counted
            return
        self._count_outlived(streams)
        self._counted[kind] = self.burst
        self.failed[kind] = self.failed.get(kind, 0) + 1
        self._failed_at_s = now_s

    def _is_the_requests(self, flight: Flight) -> bool:
        """Return whether the request was counted before and made no progress since. If it was counted against another
        worker, take that count back."""
        first = flight.blamed
        if first is None or made(flight) >= PROGRESS_TOKENS:
            return False
        if first is not self and not flight.excused:
            flight.excused = True
            first.excused += 1
        return True

    def _count_outlived(self, streams: Iterable[Flight]) -> None:
        """Count the last failure as outlived if an attempt has made progress since."""
        if self._failed_at_s and any(
            s.last_token_at_s > self._failed_at_s and made(s) >= PROGRESS_TOKENS for s in streams
        ):
            self.outlived += 1
            self._failed_at_s = 0.0

    def report(self, streams: Iterable[Flight], ejections: int, now_s: float) -> WorkerSeen:
        """Return the worker's part of a report; `streams` are those on it now."""
        streams = list(streams)
        self._count_outlived(streams)
        waits = [now_s - max(flight.last_token_at_s, flight.sent_at_s) for flight in streams]
        return WorkerSeen(
            succeeded=self.succeeded,
            failed=dict(self.failed),
            outlived=self.outlived,
            excused=self.excused,
            tokens=self.tokens,
            stream_s=round(self.stream_s, 2),
            open=len(waits),
            silent_s=round(max(waits, default=0.0), 1),
            fall=ejections,
        )


def made(flight: Flight) -> int:
    """Return the tokens that its current attempt has made."""
    return flight.ledger.emitted - flight.ledger.mark


class AllWorkerCounts:
    """All workers that a frontend has met, by instance."""

    def __init__(self) -> None:
        self._by_instance: dict[int, WorkerCounts] = {}

    def of(self, instance: int) -> WorkerCounts:
        """Return a worker's counts, the same for all its connections."""
        return self._by_instance.setdefault(instance, WorkerCounts())

    def report(self, here: Mapping[int, tuple[Iterable[Flight], int]], now_s: float) -> dict[str, WorkerSeen]:
        """Return the reports of all workers that got work. `here`: streams and last ejection number of known
        workers."""
        reported: dict[str, WorkerSeen] = {}
        for instance, counts in list(self._by_instance.items()):
            streams, ejections = here.get(instance, ((), 0))
            if instance in here:
                counts.seen_s = now_s
            elif now_s - counts.seen_s > LINGER_S:
                del self._by_instance[instance]
                continue
            seen = counts.report(streams, ejections, now_s)
            if seen.succeeded or seen.failed or seen.tokens or seen.open:
                reported[f"{instance:x}"] = seen
        return reported
