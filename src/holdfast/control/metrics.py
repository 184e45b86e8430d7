"""Control's Prometheus metrics. Names are those of Dynamo's dashboards and alerts, where these have one.

Always true:
- Only the leading control exports workers and levels, so that no worker is counted twice.
- Every control exports the device faults that it read on its own machine.
- A forgotten worker has no line left, not even counters, so the present workers bound the number of lines.
- Counters for alerts have a line from the first scrape on (0, not absent).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.control import health_controller as hc
from holdfast.control.event_mirror import EventMetrics
from holdfast.control.fleet_metrics import FleetMetrics
from holdfast.control.status_page import ControlView, group_of, ids
from holdfast.health.device_faults import DeviceFault
from holdfast.health.records import HealthRecord
from holdfast.routing.degradation import RULES
from holdfast.wire import metrics

# Histogram bounds in seconds, for pings and for canaries of small and large models; a try takes at most 15 s.
CHECK_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)
CHECKS = ("canary", "ping")
RESULTS = ("passed", "failed")
FAULTS_MAX = 1000  # label sets of the fault counter: some tens of numbers on a few GPUs


@dataclass(slots=True)
class _Checks:
    """Counts of one kind of check on one worker."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(CHECK_BOUNDS_S) + 1))
    sum_s: float = 0.0
    results: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))


class ControlMetrics:
    def __init__(self) -> None:
        self._registry = metrics.MetricsRegistry()
        metrics.Read(self._read, self._registry)
        self._view: ControlView | None = None  # the one being exported
        self._checks: dict[str, dict[str, _Checks]] = {}  # by path and kind of check
        self._quarantines = 0
        self._flagged = 0
        self._faults: dict[tuple[str, str, str, str], int] = {}
        self.fleet = FleetMetrics()
        self.events = EventMetrics()

    def checked(self, path: str, check: str, result: str, took_s: float | None = None) -> None:
        """Count a finished check of the worker at that path; `took_s` is given if it was answered."""
        kept = self._checks.setdefault(path, {kind: _Checks() for kind in CHECKS})[check]
        kept.results[result] += 1
        if took_s is not None:
            kept.counts[bisect_left(CHECK_BOUNDS_S, took_s)] += 1
            kept.sum_s += took_s

    def count_canary(self, event: hc.HealthEvent, effects: Sequence[hc.HealthEffect]) -> None:
        """Count the canary that ended with this step of the health controller, if one did."""
        if isinstance(event, hc.AnswerMissing):
            self.checked(event.path, "canary", "failed")
        elif isinstance(event, hc.AnswerReceived):
            notices = {effect.what for effect in effects if isinstance(effect, hc.Notice) and effect.path == event.path}
            bad = notices & {hc.NoticeKind.FAILED, hc.NoticeKind.ACCUSED}
            self.checked(event.path, "canary", "failed" if bad else "passed", event.took_s)

    def forget(self, path: str) -> None:
        """Drop the counts of a worker that has no record any more."""
        self._checks.pop(path, None)

    def quarantined(self, streams: int) -> None:
        """Count a finding of wrong weights, and the answers since they were last right, which may be wrong too."""
        self._quarantines += 1
        self._flagged += streams

    def device_fault(self, source: str, fault: DeviceFault) -> None:
        """Count a fault of a GPU of this machine, ignorable ones too; one without a number is labelled by its name."""
        what = (fault.device, str(fault.number or fault.reason.partition(":")[0]), fault.severity.value, source)
        if what in self._faults or len(self._faults) < FAULTS_MAX:
            self._faults[what] = self._faults.get(what, 0) + 1

    def page(self, view: ControlView) -> bytes:
        self._checks = {path: checks for path, checks in self._checks.items() if path in view.records}
        self._view = view
        return metrics.page(self._registry)

    def _read(self) -> list[metrics.Metric]:
        view = self._view
        assert view is not None, "scraped by `page` only"
        shown = [metrics.gauge("holdfast_control_leads", "1 while this control decides", (), {(): view.leads})]
        text, labels = "faults that GPUs of this machine told of", ("device", "xid", "severity", "source")
        shown.append(metrics.counter("holdfast_device_faults", text, labels, self._faults))
        if not view.leads:
            return shown
        named = ids(view.records)
        records = {path: view.records[path] for path in named}
        passed = {path: one.standing.good_s for path, one in records.items() if not view.asleep(path)}
        shown += _workers(named, records, passed) + self._of_checks(named)
        text = "answers that may be wrong: of a worker that was quarantined, since it was last known to be right"
        corruption = [
            metrics.counter("holdfast_quarantines", "weights found to be wrong", (), {(): self._quarantines}),
            metrics.counter("holdfast_flagged_streams", text, (), {(): self._flagged}),
        ]
        return [*shown, *_deployment(view), *corruption, *self.fleet.families(), *self.events.families()]

    def _of_checks(self, named: Mapping[str, str]) -> list[metrics.Metric]:
        kept = {(named[path], kind): checks for path in named for kind, checks in self._checks.get(path, {}).items()}
        took = {who: (checks.counts, checks.sum_s) for who, checks in kept.items()}
        results = {(*who, result): n for who, checks in kept.items() for result, n in checks.results.items()}
        name, text = "dynamo_health_check_duration_seconds", "how long checks took that were answered"
        who = ("worker_id", "check_type")
        return [
            metrics.histogram(name, text, who, CHECK_BOUNDS_S, took),
            metrics.counter("holdfast_health_checks", "checks, by result", (*who, "result"), results),
        ]


def _workers(
    named: Mapping[str, str], records: Mapping[str, HealthRecord], passed: Mapping[str, float]
) -> list[metrics.Metric]:
    def gauge(name: str, text: str, values: Mapping[str, float]) -> metrics.Metric:
        samples = {(named[path], group_of(records[path])): value for path, value in values.items()}
        return metrics.gauge(name, text, ("worker_id", "tp_group"), samples)

    standings = {path: record.standing for path, record in records.items()}
    text = "health: 0 healthy, 1 suspicious, 2 unhealthy, 3 draining, 4 dead"
    last = "when the last canary that it passed was sent, unix time; of those that are awake and passed one"
    breakers = {(named[path],): float(record.breaker.state) for path, record in records.items()}
    return [
        gauge("dynamo_worker_status", text, {path: one.status for path, one in standings.items()}),
        gauge(
            "holdfast_worker_weight",
            "share of traffic that it gets, of what it would, 0 to 1",
            {path: record.weight for path, record in records.items()},
        ),
        gauge(
            "holdfast_worker_quarantined",
            "1 while its answers cannot be believed",
            {path: one.quarantined for path, one in standings.items()},
        ),
        gauge(
            "holdfast_worker_unfit",
            "1 while control asks for another engine in its place",
            {path: bool(record.replace) for path, record in records.items()},
        ),
        gauge(
            "holdfast_worker_spare",
            "1 while it is sound and kept without traffic",
            {path: record.spare for path, record in records.items()},
        ),
        gauge("holdfast_canary_passed_timestamp_seconds", last, {path: at_s for path, at_s in passed.items() if at_s}),
        metrics.gauge(
            "dynamo_circuit_breaker_state", "breaker: 0 closed, 1 open, 2 half-open", ("worker_id",), breakers
        ),
    ]


def _deployment(view: ControlView) -> list[metrics.Metric]:
    """Return the deployment's metrics; unknown values have no line, because an alert on them would be a guess."""
    text = "engines of a group that stand by"
    standbys = {(group,): float(count) for group, count in view.groups.items()}
    values: dict[str, tuple[str, float]] = {}
    if view.level is not None:
        batch = RULES[view.level.level].batch_multiplier
        values["dynamo_degradation_level"] = "degradation level, 0 to 4", view.level.level
        values["holdfast_degradation_batch_multiplier"] = "share of places that all but premium may fill", batch
    if (capacity := view.capacity) is not None:
        values["holdfast_capacity_ratio"] = "what the workers can carry, of what the SLO promises", capacity.ratio
        for unit in ("requests", "tokens"):
            rate = getattr(capacity.rates, f"{unit}_per_s")
            values[f"holdfast_capacity_{unit}_per_second"] = f"{unit} per second that the workers can carry", rate
    shown = [metrics.gauge(name, text, (), {(): value}) for name, (text, value) in values.items()]
    return [metrics.gauge("holdfast_group_standbys", text, ("tp_group",), standbys), *shown]
