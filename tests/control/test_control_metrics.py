"""What control shows: its page parses, says what was written down, and forgets who is forgotten."""

from __future__ import annotations

import dataclasses

import msgspec
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from holdfast.control.metrics import ControlMetrics
from holdfast.control.status_page import ControlView, ids, page
from holdfast.health import breaker
from holdfast.health.records import HealthRecord
from holdfast.health.standing import HealthStatus, WorkerStanding
from holdfast.health.status_page import LevelShown, control_page
from holdfast.routing.capacity import Capacity, Rates
from holdfast.routing.degradation import LevelRecord

ORDER = ("worker_id", "tp_group", "check_type", "result", "le")
Samples = dict[tuple[str, tuple[str, ...]], float]


def record(
    name: str, status: HealthStatus = HealthStatus.HEALTHY, group: str = "", since_s: float = 0.0
) -> HealthRecord:
    weight = {HealthStatus.HEALTHY: 1.0, HealthStatus.SUSPICIOUS: 0.5}.get(status, 0.0)
    return HealthRecord(name=name, group=group, standing=WorkerStanding(status, weight, reason="so", since_s=since_s))


def scraped(metrics: ControlMetrics, view: ControlView) -> Samples:
    return {
        (sample.name, tuple(sample.labels[label] for label in ORDER if label in sample.labels)): sample.value
        for family in text_string_to_metric_families(metrics.page(view).decode())
        for sample in family.samples
    }


def test_numbers_are_those_that_dashboards_expect() -> None:
    """Status 0 to 4 by worker_id and tp_group, breaker 0 to 2 by worker_id, level without labels; a worker without a
    group is a group of its own."""
    opened = breaker.BreakerRecord(state=breaker.BreakerState.OPEN, reason="3 in a row")
    records = {
        "ns/worker/generate/1": record("worker-1a", HealthStatus.SUSPICIOUS, "group-1"),
        "ns/worker/generate/2": HealthRecord(name="worker-2", standing=WorkerStanding(), breaker=opened),
        "ns/worker/generate/3": record("worker-3", HealthStatus.DEAD),
    }
    capacity = Capacity(Rates(2.0, 400.0), Rates(4.0, 800.0), carriers=1, waking=0, unmeasured=0)
    level = LevelRecord(2, "50% of the SLO")
    groups = {"1": ("group-1", True), "2": ("group-1", False), "3": ("group-2", True), "4": ("", True)}
    view = ControlView(name="c", leads=True, records=records, members=groups, level=level, capacity=capacity)
    found = scraped(ControlMetrics(), view)
    assert found["dynamo_worker_status", ("worker-1a", "group-1")] == 1
    assert found["dynamo_worker_status", ("worker-2", "worker-2")] == 2
    assert found["dynamo_worker_status", ("worker-3", "worker-3")] == 4
    assert found["dynamo_circuit_breaker_state", ("worker-2",)] == 1
    assert found["dynamo_circuit_breaker_state", ("worker-1a",)] == 0
    assert found["holdfast_worker_weight", ("worker-1a", "group-1")] == 0.5
    assert found["dynamo_degradation_level", ()] == 2
    assert found["holdfast_capacity_ratio", ()] == 0.5
    assert found["holdfast_degradation_batch_multiplier", ()] == 0.75
    assert (found["holdfast_group_standbys", ("group-1",)], found["holdfast_group_standbys", ("group-2",)]) == (1, 0)
    assert ("holdfast_group_standbys", ("",)) not in found
    assert found["holdfast_quarantines_total", ()] == 0


def test_checks_are_counted_by_worker_and_kind() -> None:
    """A canary's time is in its worker's histogram; both kinds and both results have a line once a worker was asked."""
    metrics, view = ControlMetrics(), ControlView(name="c", leads=True, records={"p/1": record("w")})
    metrics.checked("p/1", "canary", "passed", 0.03)
    metrics.checked("p/1", "canary", "failed")
    found = scraped(metrics, view)
    name = "dynamo_health_check_duration_seconds"
    assert found[f"{name}_count", ("w", "canary")] == 1
    assert found[f"{name}_bucket", ("w", "canary", "0.025")] == 0
    assert found[f"{name}_bucket", ("w", "canary", "0.05")] == 1
    assert found["holdfast_health_checks_total", ("w", "canary", "failed")] == 1
    assert found["holdfast_health_checks_total", ("w", "ping", "failed")] == 0


def test_a_forgotten_worker_leaves_no_line() -> None:
    """Gauges and counters of a worker whose record is gone vanish: lines are bounded by who is there."""
    metrics = ControlMetrics()
    metrics.checked("p/1", "canary", "passed", 0.03)
    there = ControlView(name="c", leads=True, records={"p/1": record("w")})
    assert any("w" in labels for _, labels in scraped(metrics, there))
    assert not any("w" in labels for _, labels in scraped(metrics, ControlView(name="c", leads=True)))
    assert ("holdfast_health_checks_total", ("w", "canary", "passed")) not in scraped(metrics, there)


def test_who_sleeps_is_asked_nothing() -> None:
    """A standby has no time of a last canary, nor has who never passed one: an alert on its age would be wrong."""
    passed = HealthRecord(name="a", standing=WorkerStanding(HealthStatus.HEALTHY, 1.0, good_s=50.0))
    records = {"p/1": passed, "p/2": replace(passed, name="b"), "p/3": record("c")}
    members = {"p/1": ("g", True), "p/2": ("g", False), "p/3": ("", True)}
    found = scraped(ControlMetrics(), ControlView(name="c", leads=True, records=records, members=members))
    times = {labels: value for (name, labels), value in found.items() if "timestamp" in name}
    assert times == {("a", "a"): 50.0}


def test_a_follower_counts_nobody() -> None:
    """Two controls of one deployment do not show one worker twice."""
    view = ControlView(name="c", leads=False, records={"p/1": record("w")}, level=LevelRecord(1, ""))
    found = scraped(ControlMetrics(), view)
    assert found["holdfast_control_leads", ()] == 0
    assert not any(name.startswith("dynamo_") for name, _ in found)


def test_a_worker_has_one_name() -> None:
    """A dead process does not stand beside the one that follows it; two who live under one name are told apart; of two
    dead the later is shown."""
    assert ids({"p/1": record("a", HealthStatus.DEAD), "p/2": record("a")}) == {"p/2": "a"}
    assert ids({"p/1": record("a"), "p/2": record("a"), "p/3": record("b")}) == {"p/1": "a-1", "p/2": "a-2", "p/3": "b"}
    assert ids(
        {"p/1": record("a", HealthStatus.DEAD, since_s=5), "p/2": record("a", HealthStatus.DEAD, since_s=9)}
    ) == {"p/2": "a"}


def test_the_page_for_people_and_programs() -> None:
    """/health has what `ps` and `top` show, and nothing of a worker that another of its name has followed."""
    records = {"p/2a": record("a", HealthStatus.SUSPICIOUS), "p/1": record("a", HealthStatus.DEAD)}
    shown = page(ControlView(name="c", leads=True, records=records, level=LevelRecord(1, "why")))
    (verdict,) = shown.verdicts
    assert (verdict.instance, verdict.status, verdict.weight, verdict.breaker) == ("2a", "SUSPICIOUS", 0.5, "closed")
    assert shown.level == LevelShown(level=1, reason="why")
    assert shown.capacity is None
    told = msgspec.json.decode(msgspec.json.encode(shown))
    assert control_page(told) == shown
    assert control_page({"role": "worker"}) is None


def test_the_page_says_what_is_done_about_wrong_answers() -> None:
    """How often the weights were to be verified, from the second time on; if they are right, the remedy. Nothing of one
    that is well again."""
    convicted = WorkerStanding(quarantined=True, reason="wrong")
    told = "wrong; asked to verify its weights 3 times, next in 4 min"
    first = "wrong; its weights are being verified"
    for reloads, quarantined, words in ((1, True, first), (3, False, "wrong"), (3, True, told)):
        standing = dataclasses.replace(convicted, quarantined=quarantined)
        one = HealthRecord(name="w", standing=standing, reloads=reloads, reload_next_s=1240.0)
        (verdict,) = page(ControlView(name="c", leads=True, records={"p/1": one}, unix_s=1000.0)).verdicts
        assert verdict.reason == words
    right = HealthRecord(name="w", standing=convicted, reloads=1, verified=True)
    (verdict,) = page(ControlView(name="c", leads=True, records={"p/1": right}, unix_s=1000.0)).verdicts
    assert "as they were written" in verdict.reason
    assert "restart it" in verdict.reason
