"""The alerts that `deploy/` hands out: Prometheus's own `promtool` takes them, and each fires when it should, and not
otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli.app import NO_ENVIRONMENT
from holdfast.cli.start import UpCommand
from holdfast.settings import read_environment

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = PROMETHEUS / "alerts.yaml"
CASES = Path(__file__).parent / "alerts_test.yaml"
ASKED = ("DynamoHighWorkerFailureRate", "DynamoCapacityDegraded", "DynamoSilentCorruption")


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The one of `make promtool`, or this machine's; without any the test is skipped, but not where CI runs."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if (found := shutil.which("promtool", path=path)) is None:
        why = "promtool is not here: `make promtool` fetches it, `apt-get install prometheus` installs it"
        if os.environ.get("HOLDFAST_TEST_ALL_TOOLS"):
            pytest.fail(why)
        pytest.skip(why)
    return subprocess.run([found, *words], capture_output=True, text=True, timeout=60, check=False)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_promtool_takes_the_rules_and_the_example() -> None:
    """The rules parse, and so does the configuration that names them."""
    for words in (("check", "rules", ALERTS), ("check", "config", PROMETHEUS / "prometheus.yml")):
        done = promtool(*words)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_scrapes_where_up_listens() -> None:
    """With the defaults of `holdfast up`: the frontends' port, an engine's and its standby's, and control's."""
    spec = UpCommand.of(read_environment(NO_ENVIRONMENT)).spec
    told = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    ports = {
        int(target.rpartition(":")[2])
        for job in told["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }
    assert ports == {spec.port, spec.status_port_of(1, 0), spec.status_port_of(1, 1), spec.control_port_of(1)}


def test_each_alert_fires_when_it_should_and_not_otherwise(tmp_path: Path) -> None:
    """Every case of `alerts_test.yaml` holds, with the summary that a person reads."""
    told = yaml.safe_load(ALERTS.read_text())
    for group in told["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]["description"]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(told))
    shutil.copy(CASES, tmp_path)
    done = promtool("test", "rules", tmp_path / CASES.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    """No rule stands there that nobody has seen fire, or seen silent."""
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    names = {rule["alert"] for rule in rules()}
    assert set(ASKED) <= names
    assert fires == silent == names


def test_every_alert_says_how_it_is_mended() -> None:
    """A summary of one line that names what it is about, a description with the mend, and a severity."""
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert len(rule["annotations"]["summary"]) < 100, rule["alert"]
        assert len(rule["annotations"]["description"]) > 60, rule["alert"]
