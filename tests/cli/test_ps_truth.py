"""`holdfast status` is right about starts, drains, each process's streams, and where metrics are. Real processes."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from holdfast.cli.screen import Screen
from holdfast.cli.terminal import Terminal
from holdfast.supervise.status import Status
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import fetch, free_port
from tests.rigs.cli.up_rig import PAIR, UpRig, until

pytestmark = pytest.mark.alone
processes = pytest.mark.processes

LONG_NOTE = "failed 7 times in a row, exited with 1: " + " ".join(f"word{n}" for n in range(30)) + " the-end"
LONG_PATH = "unix:///srv/a/rather/long/path/of/a/state/directory/gms/gms_GPU-01234567-89ab-cdef.sock"


def at_80_columns(statuses: list[Status]) -> str:
    shown = io.StringIO()
    Screen(Terminal(shown, 80)).table(statuses)
    return shown.getvalue()


def test_nothing_is_cut_at_80_columns() -> None:
    """Addresses, notes and names of a narrow screen are whole: in several lines, never with an ellipsis."""
    statuses = [
        Status("vault", "vault-1", 4194303, "ready", LONG_PATH, 0),
        Status("worker", "worker-12a", 0, "crash loop", "", 0, LONG_NOTE, 7, 3.21),
        Status("worker", "worker-12b", 4194301, "active", "unix:///x", 3, metrics="http://127.0.0.1:9761/metrics"),
        Status("worker", "sue", 4194300, "ready", "tcp://10.0.0.1:7", 0),
        Status("frontend", "frontend", 4194302, "no_worker", "tcp://127.0.0.1:8000", 0, "no worker is known"),
    ]
    shown = at_80_columns(statuses)
    assert "…" not in shown
    pieces = "".join(shown.split())
    assert LONG_PATH.removeprefix("unix://")[-40:] in pieces  # folded: it goes on below
    told = ("; next try in 3.2 s", "no worker is known", "http://127.0.0.1:9761/metrics", "sue (worker)")
    for whole in (LONG_NOTE, *told):
        assert whole in shown
    assert max(map(len, shown.split("  worker-12a")[0].splitlines())) <= 80


@pytest.fixture(scope="module")
def rig() -> Iterator[UpRig]:
    made = UpRig(*PAIR, "--frontends", "2")
    yield made
    made.close()


def engines(rig: UpRig) -> dict[str, dict[str, Any]]:
    return {name: status for name, status in rig.ps().items() if status["role"] == "worker"}


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def sample(page: str, name: str) -> float:
    """The one line of a name."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


@contextlib.contextmanager
def streams(rig: UpRig, count: int) -> Iterator[None]:
    """Open answers that do not end by themselves for a while."""
    body = {"model": rig.model, "stream": True, "max_tokens": 6000, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "hello " * 100}]
    opened = []
    try:
        for _ in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", rig.port, timeout=60)
            opened.append(connection)
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            connection.getresponse().read1(1)
        yield
    finally:
        for connection in opened:
            connection.close()


@pytest.mark.long
@processes
def test_what_ps_shows_of_a_deployment_that_was_up_before(rig: UpRig) -> None:
    """A first start is no failover, whatever journals an earlier deployment left; workers' metrics are where they
    were, after a restart of all and of one; each frontend of a shared port shows its own streams; and one that
    drains is `draining`, not `silent`. While streams run, the active's page shows the KV they hold and share."""
    status_port = str(free_port())
    assert rig.up("--status-port", status_port).returncode == 0
    rig.until_whole()
    first = {name: status["metrics"] for name, status in engines(rig).items()}
    assert first["worker-1a"] == f"http://127.0.0.1:{status_port}/metrics"
    assert rig.run("down").returncode == 0
    assert rig.up("--status-port", status_port).returncode == 0
    rig.until_whole()
    assert "last failover" not in rig.run("ps").stdout
    standby = rig.by_state()["standby"]
    os.kill(standby["pid"], signal.SIGKILL)
    until(lambda: rig.back(standby["name"], standby["pid"]), "the standby to be back")
    assert {name: status["metrics"] for name, status in engines(rig).items()} == first
    assert all("holdfast_worker_state" in scraped(url) for url in first.values())
    assert all(url in rig.run("ps").stdout for url in first.values())

    with streams(rig, 8):
        until(lambda: sum(s["streams"] for s in rig.ps().values() if s["role"] == "frontend") == 8, "8 streams")
        led = scraped(rig.until_whole()["active"]["metrics"])
        assert sample(led, "dynamo_component_kvstats_active_blocks") > 0
        assert 0 < sample(led, "dynamo_component_kvstats_gpu_cache_usage_percent") <= 1
        assert sample(led, "holdfast_worker_prefix_hit_tokens_total") > 0, "eight times the same long question"
        page = scraped(f"http://127.0.0.1:{rig.port}/metrics")
        for name in ("frontend", "frontend-2"):
            assert f'holdfast_frontend_up{{frontend="{name}"}} 1' in page
        under_way = [line for line in page.splitlines() if line.startswith("dynamo_frontend_inflight_requests{")]
        assert sum(float(line.split()[-1]) for line in under_way) == 8, "one scrape shows all frontends of the port"
        busy = next(s for s in rig.ps().values() if s["role"] == "frontend" and s["streams"])
        os.kill(busy["pid"], signal.SIGTERM)
        seen: list[str] = []

        def is_seen_draining() -> bool:
            now = rig.ps().get(busy["name"], {})
            seen.append(now.get("state", "") if now.get("pid") == busy["pid"] else "gone")
            return seen[-1] in ("draining", "gone")

        until(is_seen_draining, "the frontend to drain")
    assert seen[-1] == "draining"
    assert "silent" not in seen


@processes
@pytest.mark.long
def test_a_failover_is_shown_as_its_streams_saw_it(rig: UpRig) -> None:
    """An engine whose steps stand still is found out late and killed: the gap that is shown is the one a client
    measures, not the time since somebody noticed; why it died is shown; and it is still known after the next `up`."""
    rig.run("down")
    assert rig.up("--allow-chaos", "--sim-tpot-ms", "20").returncode == 0
    wedged = rig.until_whole()["active"]
    answer = rig.answering(300)
    assert rig.run("chaos", wedged["name"], "wedge").returncode == 0
    assert answer.answer().wrong == ""
    worst_gap_ms = max(after - before for before, after in pairwise(answer.answer().token_times_s)) * 1000
    rig.until_whole()

    (incident,) = told(rig, wedged["name"])
    assert incident["why"].startswith("killed: it is wedged")
    assert (incident["part"], incident["streams"], incident["lost"]) == ("active", 1, 0)
    # On a busy machine either may hear of a token late; since somebody noticed it was a fraction of that.
    assert 0.4 < incident["gap_ms"] / worst_gap_ms < 2.5
    assert f"{wedged['name']} (active) died: killed: it is wedged" in rig.run("ps").stdout
    assert rig.run("down").returncode == 0
    assert rig.up().returncode == 0
    assert told(rig, wedged["name"]) == [incident]
    assert f"{wedged['name']} (active) died: killed: it is wedged" in rig.run("incidents").stdout


def told(rig: UpRig, name: str) -> list[dict[str, Any]]:
    """What is known of what befell it."""
    done = rig.run("incidents", "--json")
    assert done.returncode == 0, done.stderr
    return [incident for incident in json.loads(done.stdout) if incident["name"] == name and incident["epoch"]]


@processes
def test_a_taken_port_does_not_keep_a_worker_from_serving() -> None:
    """A stranger on the port of a status page: the page is elsewhere, its record says where, and the worker serves."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        with Deployment(workers=1, worker={"status_address": taken, "status_any": True}) as deployment:
            page = deployment.record("worker-0")["status"]
            assert page != taken
            assert b"holdfast_worker_state" in fetch(page, "/metrics")[1]


def test_a_file_is_as_wide_as_columns_say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`COLUMNS=80 holdfast status > file`: the table fits, whole; without COLUMNS each process has one line."""
    statuses = [Status("vault", "vault-1", 4194303, "ready", LONG_PATH, 0)]
    monkeypatch.setenv("COLUMNS", "80")
    Screen().table(statuses)
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    assert LONG_PATH.removeprefix("unix://")[-40:] in "".join(narrow.split())
    monkeypatch.delenv("COLUMNS")
    Screen().table(statuses)
    assert LONG_PATH.removeprefix("unix://") in capsys.readouterr().out
