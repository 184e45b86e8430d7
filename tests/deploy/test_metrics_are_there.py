"""Every metric that the alerts, the dashboard and docs/metrics.md name is one that the processes really expose: what
stands there is held against what a deployment of real processes shows when it is scraped."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from holdfast.supervise.records import read_records
from holdfast.testing.rig import fetch
from holdfast.testing.supervised import Supervised

pytestmark = pytest.mark.alone
ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "holdfast.json"
# The words of PromQL that these expressions have; whatever else is no function's name is a metric.
WORDS = {"by", "on", "or", "and", "without", "vector", "le", "unless", "ignoring", "time"}
UNITS = re.compile(r"_(bucket|count|sum)$")


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics that an expression asks for."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', " ", expression)
    bare = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"\boffset\s+\w+", " ", bare)
    return set(re.findall(r"\b[a-z][a-z_0-9]*\b(?!\s*\()", bare)) - WORDS


def asked() -> dict[str, set[str]]:
    """Metrics by whoever asks for them."""
    rules = [rule for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
             for rule in group["rules"]]  # fmt: skip
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = {rule["alert"]: metrics_in(rule["expr"]) for rule in rules}
    for panel in panels:
        found[panel["title"]] = set().union(*(metrics_in(target["expr"]) for target in panel["targets"]))
    return found


def test_metrics_of_an_expression() -> None:
    """What is read out of an expression is its metrics, and nothing else."""
    text = 'sum by (a, b) (rate(x_total{l="y_z"}[5m])) / count(up_now == 2) and on (b) other offset 15m > 0'
    assert metrics_in(text) == {"x_total", "up_now", "other"}


@pytest.fixture(scope="module")
def up() -> Iterator[Supervised]:
    with Supervised("--vault-gib", "0.0625", "--slo-tokens-per-s", "100") as started:
        yield started


def scraped(up: Supervised) -> dict[str, set[str]]:
    """Every sample of every process, with the labels it has."""
    found: dict[str, set[str]] = {}
    for record in read_records(up.folder):
        where = record.address if record.role == "frontend" else record.status
        if record.role not in ("frontend", "worker", "control") or not where:
            continue
        page: Any = fetch(where, "/metrics")[1]
        for family in text_string_to_metric_families(page.decode()):
            found.setdefault(family.name, set())
            found.setdefault(f"{family.name}_total" if family.type == "counter" else family.name, set())
            for sample in family.samples:
                found.setdefault(UNITS.sub("", sample.name), set()).update(sample.labels)
    return found


ELSEWHERE = ("holdfast_vault_", "holdfast_fleet_", "holdfast_events_")


@pytest.mark.processes
def test_every_metric_that_is_asked_for_is_exposed(up: Supervised) -> None:
    """By real processes, once a stream ran and a canary was answered; and those that the docs list, but for a vault's
    own and those of a fleet and its mirror of events, where there is none."""
    assert up.stream("hello", max_tokens=5).answer().wrong == ""
    docs = (ROOT / "docs/metrics.md").read_text()
    listed = set(re.findall(r"`((?:dynamo|holdfast)_[a-z_0-9]+)(?:\{[^`]*\})?`", docs))
    wanted = asked() | {"docs/metrics.md": {name for name in listed if not name.startswith(ELSEWHERE)}}
    shown: dict[str, set[str]] = {}
    missing: dict[str, list[str]] = {}

    def has_all() -> bool:
        """Some come with the first verdict, level or report, each in its time."""
        shown.clear()
        missing.clear()
        shown.update(scraped(up))
        for who, asks in wanted.items():
            if lacks := sorted({UNITS.sub("", name) for name in asks} - set(shown)):
                missing[who] = lacks
        return not missing

    with contextlib.suppress(TimeoutError):
        up.wait_until(has_all, "every metric")
    assert missing == {}
    assert {"worker_id", "tp_group"} <= shown["dynamo_worker_status"]
    assert "worker_id" in shown["dynamo_circuit_breaker_state"]
    assert shown["dynamo_degradation_level"] == set()


def test_the_dashboard_has_the_shape_grafana_loads() -> None:
    """Panels with an id, a place and a question each, none over another, all from the data source that is chosen."""
    told = json.loads(DASHBOARD.read_text())
    assert told["title"] == "Holdfast"
    assert [one["type"] for one in told["templating"]["list"]] == ["datasource"]
    cells: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in told["panels"]}) == len(told["panels"]) > 15
    for panel in told["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= own
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"], panel["title"]
        assert all(target["expr"] for target in panel["targets"])
