"""How many attempts of each set failed in the last minute, from reports whose counts only grow. Pure.

Of a set of workers an attempt is one that a frontend made; of a set of frontends it is an answer that one gave.

Always true: nothing is counted twice, and nothing that was there when this began to count; a worker that is gone counts
on until its minute is over, for its set is still the one that failed; who has only begun to listen does not say that
nobody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from holdfast.health.records import ReportRecord
from holdfast.rollout.trial import RequestCounts

WINDOW_S = 60.0
LISTENED_S = 10.0  # before that nobody can say how much is asked for: frontends report once a second

Set = tuple[str, str]  # a service and its set's id
Counted = tuple[int, int]  # attempts, and those of them that failed


class SetTraffic:
    """By service and set."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._last: dict[str, dict[str, Counted]] = {}  # by frontend, and by its workers' instances or its own process
        self._sets: dict[str, Set] = {}  # by instance or process
        self._happened: deque[tuple[float, Set, Counted]] = deque()  # oldest first, within the window

    def take(self, reports: Iterable[ReportRecord], sets: Mapping[str, Set], now_s: float) -> None:
        """All reports as they are now; `sets`: whose an instance or a frontend's process is."""
        if sets and (self._began_s is None or now_s < self._began_s):
            self._began_s = now_s
        self._sets |= sets
        told = {report.name: _counts(report) for report in reports}
        sums: dict[Set, Counted] = {}
        for frontend, counts in told.items():
            before = self._last.get(frontend, counts)  # at first sight only counting begins
            for instance, (attempts, failed) in counts.items():
                tried, lost = before.get(instance, (0, 0))
                if instance in self._sets and attempts > tried and failed >= lost:
                    whole, bad = sums.get(self._sets[instance], (0, 0))
                    sums[self._sets[instance]] = (whole + attempts - tried, bad + failed - lost)
        self._happened.extend((now_s, one, counted) for one, counted in sums.items())
        self._last = told
        known = {instance for counts in told.values() for instance in counts} | sets.keys()
        self._sets = {instance: one for instance, one in self._sets.items() if instance in known}
        while self._happened and self._happened[0][0] <= now_s - WINDOW_S:
            self._happened.popleft()

    def of(
        self, now_s: float, brought: Collection[Set] = (), since_s: float = 0.0
    ) -> dict[str, dict[str, RequestCounts]] | None:
        """What happened within the window; of sets that a revision brings only since then, for they may have been tried
        before. None: there are workers, and it was not listened for long enough yet."""
        if self._began_s is not None and now_s < self._began_s + LISTENED_S:
            return None
        sums: dict[str, dict[str, RequestCounts]] = {}
        for at_s, one, (attempts, failed) in self._happened:
            if one not in brought or at_s >= since_s:
                own = sums.setdefault(one[0], {})
                before = own.get(one[1], RequestCounts())
                own[one[1]] = RequestCounts(before.attempts + attempts, before.failed + failed)
        return sums


def _counts(report: ReportRecord) -> dict[str, Counted]:
    failed = {instance: sum(seen.failed.values()) for instance, seen in report.workers.items()}
    workers = {one: (seen.succeeded + failed[one], failed[one]) for one, seen in report.workers.items()}
    return workers | {report.process: (report.answers, report.answers_failed)}
