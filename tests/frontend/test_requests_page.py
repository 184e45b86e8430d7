"""Requests as operators see them: `get requests`, the pages, and what they say while workers die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.tiers import Tier
from holdfast.discovery.keys import REPORTS
from holdfast.frontend.requests import HTML_LISTED_MAX, ModelActivity, RequestsListing, RequestView, html_page
from holdfast.store.contract import Put, Store
from holdfast.streams.flight import RequestState
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port
from tests.rigs.frontend.pending_models import CHAT, _in_store, get, requests, shown_by
from tests.rigs.frontend.raw_http import Raw, chat, one_more_frontend

SIM: dict[str, Any] = {"ttft_ms": 5, "tpot_ms": 50.0, "concurrency": 1, "queue": 0, "context_tokens_max": 65_536}
LONG = chat(stream=True, max_tokens=60_000, ignore_eos=True)
MODEL = "holdfast-sim"


def view(number: int, **more: Any) -> RequestView:
    usual: dict[str, Any] = {
        "id": f"id-{number}", "request_id": "r", "model": MODEL, "state": RequestState.QUEUED, "place": number,
        "waited_s": 1.0, "why": "", "tier": Tier.STANDARD.label, "stream": True, "created": 1000.0,
    }  # fmt: skip
    return RequestView(**usual | more)


class Cells(HTMLParser):
    """The texts of a page's table cells, and the tags that it has."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self._inside = False
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")
        self._inside = tag in ("td", "span")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.cells[-1] += data


def test_the_html_page_shows_clients_text_as_text() -> None:
    """A model's name that a client made up cannot become a tag; one that continues elsewhere is RESUMING."""
    name = '<script>alert("x")</script>\ud800'
    rows = [view(1, model=name), view(2, resuming=True, tokens=7), view(3, state=RequestState.RUNNING, worker="w<1>")]
    models = [ModelActivity(model=name, state="BUSY", waiting=2, running=1, replicas={"w<1>": 1})]
    found = Cells(html_page(RequestsListing(data=rows, has_more=False, models=models), "front<end>", 2000.0))
    assert "script" not in found.tags
    assert found.cells[:5] == [name.replace("\ud800", "?"), "BUSY", "2", "1", "w<1>: 1"]
    assert [cell for cell in found.cells if cell in ("QUEUED", "RESUMING", "RUNNING")] == [
        "QUEUED",
        "RESUMING",
        "RUNNING",
    ]
    assert "w<1>" in found.cells


def test_the_html_page_is_bounded() -> None:
    """It says that there are more."""
    page = html_page(RequestsListing(data=[view(number) for number in range(1000)], has_more=True), "f", 2000.0)
    assert page.count(b"id-") == HTML_LISTED_MAX
    assert f"only the first {HTML_LISTED_MAX} are listed".encode() in page
    assert len(page) < 200_000


@pytest.fixture
def one_place() -> Iterator[Deployment]:
    """A worker with one place, and requests that may wait long."""
    holds = {"queue_s": 200.0, "hold_s": 200.0}
    with Deployment(workers=1, sim=SIM, frontend={"holds": holds}) as started:
        yield started


def named(name: str) -> str:
    return f"x-request-id: {name}\r\n"


def told(deployment: Deployment, *words: str, silent: bool = False) -> Any:
    """`silent`: one frontend does not answer."""
    asked = ("get", "requests", *words)
    done = deployment.run(*asked) if silent else shown_by(deployment, *asked)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "json" in words else done.stdout


def states(deployment: Deployment) -> list[tuple[str, str, int | None, bool]]:
    return [(row["request_id"], row["state"], row["place"], row["resuming"]) for row in requests(deployment)]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_states_and_places_follow_a_worker_that_dies(one_place: Deployment) -> None:
    """One runs and two wait; the worker is killed: the first keeps its tokens and is RESUMING, in front; on the next
    worker it runs on, places move up when it leaves, and nothing is lost. Commands and pages say the same."""
    deployment = one_place
    with Raw(deployment.port) as first, Raw(deployment.port) as second, Raw(deployment.port) as third:
        for raw, name, count in ((first, "first", 1), (second, "second", 2), (third, "third", 3)):
            raw.post(CHAT, LONG, named(name))
            deployment.wait_until(lambda count=count: len(requests(deployment)) == count, name)
        first.until(b"data: ")
        runs = [("second", "QUEUED", 1, False), ("third", "QUEUED", 2, False), ("first", "RUNNING", None, False)]
        deployment.wait_until(lambda: states(deployment) == runs, "one to run, two to wait")
        listing = get(deployment, "/v1/requests").json()
        (model,) = listing["models"]
        assert (model["model"], model["state"], model["waiting"], model["running"]) == (MODEL, "BUSY", 2, 1)
        assert model["replicas"] == {"worker-0": 1}
        row = listing["data"][-1]
        assert (row["worker"], row["replica"]) == ("worker-0", "worker-0")
        assert row["tokens"] > 0
        assert row["created"] <= row["started"] <= time.time()
        assert listing["data"][0]["started"] is None
        page = get(deployment, "/requests")
        assert page.headers["content-type"].startswith("text/html")
        assert [cell for cell in Cells(page.body).cells if cell in ("QUEUED", "RUNNING")] == ["QUEUED"] * 2 + [
            "RUNNING"
        ]
        _commands_agree(deployment, row["id"])

        deployment.kill("worker-0")
        waits = [
            ("first", "PROVISIONING", 1, True),
            ("second", "PROVISIONING", 2, False),
            ("third", "PROVISIONING", 3, False),
        ]
        deployment.wait_until(lambda: states(deployment) == waits, "all to wait")
        assert "RESUMING" in told(deployment)
        assert get(deployment, "/v1/requests").json()["models"][0]["state"] == "WAITING"
        deployment.start_worker("worker-1")
        deployment.wait_until(lambda: states(deployment) == runs, "the first to run on")
        assert requests(deployment)[-1]["resumed"] == 1
        first.until(b": resumed after")
        ended = deployment.run("delete", f"request/{row['id']}", "--store", deployment.store)
        assert (ended.returncode, ended.stdout) == (0, f"request {row['id']} ended\n"), ended.stderr
        second.until(b"data: ")
        left = [("third", "QUEUED", 1, False), ("second", "RUNNING", None, False)]
        deployment.wait_until(lambda: states(deployment) == left, "places to move up")
        second.sock.close()
        third.until(b"data: ")


def _commands_agree(deployment: Deployment, running: str) -> None:
    rows = [line.split() for line in told(deployment).splitlines()]
    assert rows[0] == ["id", "model", "tier", "state", "place", "age", "worker", "tokens"]
    assert [row[1:5] for row in rows[1:]] == [
        [MODEL, "standard", "QUEUED", "1"], [MODEL, "standard", "QUEUED", "2"], [MODEL, "standard", "RUNNING", "–"],
    ]  # fmt: skip
    assert rows[3][6] == "worker-0"
    assert "request id" in told(deployment, "-o", "wide").splitlines()[0]
    assert told(deployment, "-o", "name").splitlines()[-1] == f"request/{running}"
    assert told(deployment, "--model", "other").startswith("no request is under way in ")
    assert [row["state"] for row in told(deployment, "-o", "json", "--waiting")["rows"]] == ["QUEUED"] * 2
    old = shown_by(deployment, "queue")
    assert (old.returncode, old.stderr) == (0, "`holdfast queue` is an old name: use `holdfast get requests`\n")
    assert len(old.stdout.splitlines()) == 3


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_frontend_that_does_not_answer_is_named(one_place: Deployment) -> None:
    """The command ends in time, with what the others said."""
    found: dict[str, Any] = {}

    def has_answered() -> bool:  # a busy one may miss the second that a look waits
        found.update(told(one_place, "-o", "json", silent=True))
        return bool(found["rows"])

    with one_more_frontend(one_place, "other", free_port(), {}) as port, Raw(port) as raw:
        raw.post(CHAT, LONG, named("at the other"))
        raw.until(b"data: ")
        one_place.signal("frontend", signal.SIGSTOP)
        try:
            one_place.wait_until(has_answered, "the other's answer")
        finally:
            one_place.signal("frontend", signal.SIGCONT)
    assert [(row["frontend"], row["state"]) for row in found["rows"]] == [("other", "RUNNING")]
    assert [note.startswith("frontend did not answer") for note in found["notes"]] == [True]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_thousand_waiting_requests_cost_a_bounded_page_and_no_write_to_the_store(one_place: Deployment) -> None:
    """Every request is on the page, and none in the store: reports are written by time, whatever the number of
    requests. A page costs the frontend little."""
    deployment, count = one_place, 1000
    raise_descriptor_limit()
    written: list[str] = []

    async def count_writes(store: Store) -> None:
        async def follow() -> None:
            async for event in store.watch("v1/"):
                if isinstance(event, Put):
                    written.append(event.key)
                    if event.key.startswith(REPORTS) and f'"waiting":{count - 1}'.encode() in event.value:
                        return  # no later write can be due to them

        following = asyncio.create_task(follow())
        for number, raw in enumerate(waiting):
            raw.post(CHAT, LONG, named(f"n-{number}"))
        await asyncio.wait_for(following, 200.0)

    waiting = [Raw(deployment.port) for _ in range(count)]
    try:
        began_s = time.monotonic()
        _in_store(deployment, count_writes)
        assert len(written) < 50 + 10 * (time.monotonic() - began_s), "writes are by time, not by requests"
        assert len(written) < count / 2
        listing = get(deployment, "/v1/requests").json()
        assert (len(listing["data"]), listing["has_more"]) == (count, False)
        assert (listing["models"][0]["waiting"], listing["models"][0]["running"]) == (count - 1, 1)
        for path in ("/v1/requests", "/requests"):
            before_s = cpu_s(deployment)
            for _ in range(10):
                assert get(deployment, path).status == 200
            page_s = (cpu_s(deployment) - before_s) / 10
            print(f"{path}: {page_s * 1000:.1f} ms of CPU for a page of {count} requests")
            assert page_s < 0.5, "measured: 30 ms, on a machine that does other things too"
    finally:
        for raw in waiting:
            raw.sock.close()


def cpu_s(deployment: Deployment) -> float:
    """The CPU time that its frontend has used."""
    fields = Path(f"/proc/{deployment.processes['frontend'].pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
