"""`holdfast status --watch`: what it shows of a deployment, on any screen, with and without control; and that it leaves
a terminal as it found it."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from holdfast.cli.screen import Screen
from holdfast.cli.status import LocalState, level_line
from holdfast.cli.terminal import Terminal, cells
from holdfast.cli.top import ENTER, LEAVE, Overview, glance, overview, show
from holdfast.health.status_page import CapacityShown, ControlPage, LevelShown, VerdictShown
from holdfast.supervise.incidents import Incident
from holdfast.supervise.status import Status
from holdfast.supervise.verdicts import decided, remembered, with_verdicts
from holdfast.testing.deployment import Deployment
from tests.rigs.cli.in_process import said_here
from tests.rigs.cli.pseudo_terminal import WAIT_S, OnTerminal

NOW_S = 1_800_000_000.0
HEALTHY = {"status": "HEALTHY", "breaker": "closed", "canary_unix_s": NOW_S - 12, "canary_passed_unix_s": NOW_S - 12}
WRONG = "token 3 of the answer is another than expected"


def worker(name: str, state: str = "active", streams: int = 0, pid: int = 7) -> Status:
    return Status("worker", name, pid, state, "unix:///x", streams, group=name[:-1])


def frontend(**facts: Any) -> tuple[Status, dict[str, Any]]:
    status = Status("frontend", "frontend", 9, "ready", "tcp://127.0.0.1:8000", 3)
    return status, {"role": "frontend", "held": 2, "resumed_total": 5, "store": "connected", "workers": [], **facts}


def looked(control: ControlPage | None, *workers: Status, tokens: int = 0, **facts: Any) -> LocalState:
    status, page = frontend(**facts)
    pages = {one.name: {"role": "worker", "tokens_total": tokens} for one in workers} | {"frontend": page}
    verdicts = control.verdicts if control is not None else remembered(list(pages.values()))
    return LocalState([*with_verdicts(workers, verdicts), status], pages, control, verdicts)


def quarantine() -> ControlPage:
    """Three workers: one is well, one's answers are wrong, one is on another machine."""
    verdicts = [
        VerdictShown(worker="worker-1a", name="worker-1a", **HEALTHY),
        VerdictShown(
            worker="worker-2a",
            name="worker-2a",
            status="UNHEALTHY",
            weight=0.0,
            quarantined=True,
            reason=WRONG,
            causes={"wrong-answer": WRONG},
            breaker="open",
            canary_unix_s=NOW_S - 3,
            canary_passed_unix_s=NOW_S - 200,
        ),
        VerdictShown(worker="far", name="far", weight=0.5, **HEALTHY | {"status": "SUSPICIOUS"}, reason="it is slow"),
    ]
    capacity = CapacityShown(ratio=0.6, words="600 of 1000 tokens/s (2 workers, 0 waking, 0 not measured)")
    return ControlPage(
        leads=True, verdicts=verdicts, level=LevelShown(level=2, reason="60% of the SLO"), capacity=capacity
    )


def seen(found: LocalState, incidents: tuple[Incident, ...] = ()) -> Overview:
    before = overview(found, (), before=None, unix_s=NOW_S - 2, monotonic_s=8.0)
    for page in found.pages.values():
        if page["role"] == "worker":
            page["tokens_total"] += 100
    return overview(found, incidents, before=before, unix_s=NOW_S, monotonic_s=10.0)


def shown(found: Overview, width: int, room: int | None = None) -> list[str]:
    page = io.StringIO()
    show(Screen(Terminal(page, width)), Path("/srv/holdfast"), found, room)
    return page.getvalue().splitlines()


def row(lines: list[str], name: str) -> list[str]:
    return next(re.split(r"\s{2,}", line) for line in lines if line.startswith(f"{name} "))


def test_a_verdict_is_shown_of_the_process_it_is_of() -> None:
    """A name that another had before, whose verdict is still written down, shows what was decided of who has it now;
    one of whom nothing was decided yet shows nothing of the other's."""
    verdicts = [
        VerdictShown(worker="worker-1a-b", name="worker-1a", instance="b", **HEALTHY),
        VerdictShown(
            worker="worker-1a-c", name="worker-1a", instance="c", status="UNHEALTHY", weight=0.0, reason=WRONG
        ),
    ]
    control = ControlPage(leads=True, verdicts=verdicts)
    for instance, health in (("b", "healthy"), ("c", "unhealthy"), ("d", "")):
        found = looked(control, structs.replace(worker("worker-1a"), instance=instance))
        assert [one.health for one in found.statuses] == [health, ""]
        shown = overview(found, [], before=None, unix_s=NOW_S, monotonic_s=1.0)
        assert [one.health for one in shown.workers] == [health]


def test_workers_with_what_they_have_earned() -> None:
    """Standing, weight, breaker, streams, pace and the last canary of each; why one has no traffic; workers on other
    machines too; the level, and capacity against the SLO."""
    found = seen(looked(quarantine(), worker("worker-1a", streams=4), worker("worker-2a")))
    lines = shown(found, 120)
    assert row(lines, "worker-1a") == ["worker-1a", "active", "healthy", "1", "closed", "4", "50", "12 s ok"]
    assert row(lines, "worker-2a") == ["worker-2a", "active", "quarantined", "0", "open", "0", "50", "3 s failed"]
    assert row(lines, "far") == ["far", "elsewhere", "suspicious", "0.5", "closed", "–", "–", "12 s ok"]
    assert f"  worker-2a: {WRONG}" in lines
    assert "streams 3   waiting 2   tokens/s 100" in lines
    assert any(line.startswith("level 2   capacity 60% of the SLO: 600 of 1000 tokens/s") for line in lines)


def test_nothing_wraps_on_a_live_screen() -> None:
    """At any width and height each line fits; columns go before names and standings do; with too many workers for the
    screen those that are not well are among the ones that stay."""
    workers = [worker(f"worker-{number}a") for number in range(1, 40)]
    verdicts = [VerdictShown(worker=one.name, name=one.name, **HEALTHY) for one in workers]
    verdicts[30] = VerdictShown(
        worker="worker-31a", name="worker-31a", status="SUSPICIOUS", weight=0.5, reason="slow " * 40
    )
    control = ControlPage(leads=True, verdicts=verdicts, level=LevelShown(), capacity=CapacityShown(words="as planned"))
    incident = Incident(NOW_S, "worker-1a", "worker", 5, "killed by SIGKILL", successor="worker-1b", streams=8)
    found = seen(looked(control, *workers), (incident,) * 5)
    for width in (40, 60, 80, 120):
        lines = shown(found, width, room=24)
        table = [line for line in lines if not line.startswith(("frontend", " "))]  # its address folds
        assert max(map(cells, table)) <= width, "\n".join(lines)
        assert any("worker-31a" in line and "suspicious" in line for line in lines)
        assert any(line.startswith("… and ") for line in lines)
    assert len(shown(found, 120, room=24)) <= 24 + 7  # of which the live screen cuts the last, the incidents


def test_without_control_frontends_tell_what_they_go_by() -> None:
    """With no control the view says so, and shows weights, spares and the level as frontends apply them: also that
    everything is refused, in `ps` too."""
    rows = [{"instance": "1f", "name": "worker-1a", "streams": 3, "weight": 0.5, "standing": "SUSPICIOUS"}]
    rows.append({"instance": "2f", "name": "worker-2a", "streams": 0})
    rows.append(rows[0] | {"instance": "3f", "name": "worker-3a", "weight": 0.0, "standing": "HEALTHY", "spare": True})
    own = [worker("worker-1a"), worker("worker-2a"), worker("worker-3a")]
    found = looked(None, *own, workers=rows, level=4)
    lines = shown(seen(found), 100)
    assert "control: none runs here; level, health and weight are as last decided" in lines
    assert lines[2:4] == ["level 4", "  the level that frontends last received"]
    assert level_line(found.level).startswith("degradation level 4: the level that frontends last received")
    assert row(lines, "worker-1a")[2:4] == ["suspicious", "0.5"]
    assert row(lines, "worker-2a")[2:4] == ["–", "–"]
    assert row(lines, "worker-3a")[2:4] == ["spare", "0"]


@pytest.mark.parametrize(
    "workers", [None, 7, [None, 3], [{}], [{"weight": 1.0, "standing": "healthy"}], [{"name": 1, "streams": "x"}]]
)
def test_a_frontends_page_of_another_version_is_read_as_far_as_it_goes(workers: Any) -> None:
    """Whatever stands where its workers should: nothing fails, and who has no name is unknown."""
    page = {"role": "frontend", "workers": workers}
    assert {verdict.name for verdict in remembered([page])} <= {"unknown"}
    looked = LocalState([], {"frontend": page}, None, remembered([page]))
    assert overview(looked, [], before=None, unix_s=1.0, monotonic_s=1.0).workers is not None


@pytest.mark.parametrize("odd", [None, "many", [1], {"a": 1}, -1, 1.5, True])
def test_counts_of_another_version_are_not_known(odd: Any) -> None:
    """A frontend's waiting and resumed streams, and a worker's tokens: a dash, and the rest of the page as ever."""
    found = looked(quarantine(), worker("worker-1a"), held=odd, resumed_total=odd)
    found.pages["worker-1a"]["tokens_total"] = odd
    before = overview(found, (), before=None, unix_s=NOW_S, monotonic_s=1.0)
    lines = shown(overview(found, (), before=before, unix_s=NOW_S, monotonic_s=3.0), 120)
    assert "streams 3   waiting 0   tokens/s –" in lines
    assert row(lines[::-1], "frontend")[2:5] == ["3", "–", "–"]


def test_nobody_who_writes_incidents_down_is_no_good_news(deployment: Deployment) -> None:
    """Where no supervisor watches what runs, `holdfast get incidents` does not say that nothing died."""
    done = run(deployment.folder, "incidents")
    assert "nothing has failed" not in done.stdout
    assert "supervisor: none: nothing is recorded" in done.stdout


def test_no_share_of_a_promise_that_nobody_made() -> None:
    """Without a promised rate there is no percentage of one."""
    capacity = CapacityShown(promised=False, words="no rate is promised (1 worker)")
    found = seen(looked(ControlPage(leads=True, level=LevelShown(), capacity=capacity), worker("worker-1a")))
    assert "level 0   no rate is promised (1 worker)" in shown(found, 100)


def test_who_leads_is_believed() -> None:
    """Of two controls the one that leads tells; one that follows says so."""
    pages = [{"role": "control", "leads": False}, {"role": "control", "leads": True, "reason": "x"}, {"role": "worker"}]
    assert decided(pages) == ControlPage(leads=True, reason="x")
    lines = shown(seen(looked(ControlPage(leads=False), worker("worker-1a"))), 100)
    assert "control follows: another leads" in lines


def test_a_deployment_of_real_processes(deployment: Deployment) -> None:
    """Its workers and frontends are there with their streams; a rate is known from the second look on."""
    looks = [asyncio.run(glance(deployment.folder, None))]

    def is_ready() -> bool:  # a busy one may miss the second that a look waits
        looks.append(asyncio.run(glance(deployment.folder, None)))
        # Other tests start and kill more of them.
        return [one.state for one in looks[-1].frontends if one.name == "frontend"] == ["ready"]

    deployment.wait_until(is_ready, "the frontend's word")
    found = looks[-1]
    assert [one.name for one in found.workers] == ["worker-0"]
    assert found.workers[0].tokens_per_s is None
    again = lambda: asyncio.run(glance(deployment.folder, found)).workers[0]  # noqa: E731
    deployment.wait_until(lambda: again().tokens_per_s is not None, "a rate")


def run(state_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return said_here(words, {"HOME": str(state_dir), "HOLDFAST_STATE_DIR": str(state_dir)})


def test_where_nobody_watches_it_is_one_page(tmp_path: Path) -> None:
    """Into a pipe it prints once, without colours or cursor moves, and ends; `--json` is for programs."""
    done = run(tmp_path, "top")
    assert done.returncode == 0, done.stderr
    assert "nothing runs in ~" in done.stdout
    assert "\x1b" not in done.stdout
    told = json.loads(run(tmp_path, "top", "--json").stdout)
    assert (told["workers"], told["control"]) == ([], "")


@pytest.mark.parametrize("end", ["q", "\x03", "SIGTERM"])
def test_the_terminal_is_left_as_it_was(tmp_path: Path, end: str) -> None:
    """q, Ctrl-C and SIGTERM end it with status 0, back on the screen there was before, with its cursor."""
    with OnTerminal(tmp_path, "top") as terminal:
        until_s = time.monotonic() + WAIT_S
        while "nothing runs in" not in terminal.output and time.monotonic() < until_s:
            terminal._more(0.1)
        if end == "SIGTERM":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            terminal.type(end)
        assert terminal.end() == 0
        assert terminal.output.startswith(ENTER)
        assert terminal.output.rstrip().endswith(LEAVE)
        assert "Traceback" not in terminal.output
