"""Reports one deployment's workers and requests to its control, in a leased key of the store.

A report is written if it changed: once a second, and at once when a request comes that no worker serves, because the
fleet then starts its model. Serving does not depend on reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from holdfast.core.tasks import done_within
from holdfast.discovery.keys import REPORTS
from holdfast.frontend.pending_models import PendingModels
from holdfast.frontend.request_tracker import EndedCounts, RequestTracker
from holdfast.health.records import Demand, KilledRequest, ReportRecord
from holdfast.store.contract import Registration, Store
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.roster import Roster

PERIOD_S = 1.0
PAUSE_S = 0.1  # between two reports, also urgent ones
NEVER = (0, float("inf"))


@dataclass(slots=True)
class FrontendReport:
    """Writes the reports of one frontend about one deployment."""

    store: Store
    deployment: str
    roster: Roster
    directory: ModelDirectory
    tracker: RequestTracker
    unix_s: Callable[[], float]
    process: str = ""
    demand: Callable[[], dict[str, Demand]] = dict
    killed: Callable[[str], tuple[KilledRequest, ...]] = lambda _: ()
    _written: ReportRecord | None = None
    _registration: Registration | None = None
    _soon: asyncio.Event = field(default_factory=asyncio.Event)

    def write_soon(self) -> None:
        """Write the next report at once."""
        self._soon.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await done_within(self._soon.wait(), PERIOD_S - PAUSE_S)
            self._soon.clear()
            self.write_if_changed()
            await asyncio.sleep(PAUSE_S)

    def write_if_changed(self) -> None:
        report = self._report()
        if self._written is not None and report == msgspec.structs.replace(self._written, at_unix_s=report.at_unix_s):
            return
        self._written = report
        value = msgspec.json.encode(report)
        if self._registration is None:
            self._registration = self.store.register(f"{REPORTS}{self.deployment}/{self.roster.peer}", value)
        else:
            self._registration.update(value)

    def _report(self) -> ReportRecord:
        own, ended = self.deployment, self.tracker.ended.get(self.deployment, EndedCounts())
        sets = self.directory.of_deployment(own)
        return ReportRecord(
            name=self.roster.peer,
            at_unix_s=self.unix_s(),
            process=self.process,
            workers=self.roster.observed_workers(own),
            admitted=self.roster.admitted(own),
            refused=self.roster.refused(own),
            waiting=sum(len(workers.holds) for workers in sets),
            held={workers.namespace: workers.held for workers in sets if workers.held},
            demand=self.demand(),
            killed=self.killed(own),
            ended=ended.requests,
            prompt_tokens=ended.prompt_tokens,
            answer_tokens=ended.answer_tokens,
            answers=self.tracker.answers,
            answers_failed=self.tracker.answers_failed,
        )


@dataclass(slots=True)
class UnservedDemand:
    """Counts, for the fleet, the requests of one deployment that wait for each model, and since when. Unknown model
    names are not counted."""

    deployment: str
    directory: ModelDirectory
    pending: PendingModels
    clock: Callable[[], float]
    unix_s: Callable[[], float]
    # The first reported value is kept: the two clocks drift, and each change would write a report.
    _since: dict[str, tuple[float, float]] = field(default_factory=dict)  # by model, on either clock

    def now(self) -> dict[str, Demand]:
        demand: dict[str, Demand] = {}
        before, self._since = self._since, {}
        for model, (count, since_s) in self._waiting().items():
            reported = before.get(model)
            if reported is None or reported[0] != since_s:
                reported = (since_s, round(self.unix_s() - (self.clock() - since_s), 3))
            self._since[model] = reported
            demand[model] = Demand(waiting=count, since_unix_s=reported[1])
        return demand

    def _waiting(self) -> dict[str, tuple[int, float]]:
        """Return the number of waiting requests by model, and since when the first of them waits."""
        found = {model: waiting for model, waiting in self.pending.demand().items() if self._is_ours(model)}
        for workers in self.directory.of_deployment(self.deployment):
            if len(workers.holds):
                count, since_s = found.get(workers.card.name, NEVER)
                held = list(workers.holds)
                count += len({id(one.item.consumer.request) for one in held})
                found[workers.card.name] = count, min(since_s, *(one.since_s for one in held))
        return found

    def _is_ours(self, model: str) -> bool:
        """Return True if the model may be this deployment's. Only of wanted models is the deployment known."""
        if self.directory.wants(model):
            return model in self.directory.wanted(self.deployment)
        return self.directory.knows(model)
