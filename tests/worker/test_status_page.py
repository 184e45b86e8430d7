"""The worker's status page over real HTTP: probes by state, metrics that parse, and levers.

The page is served by a real server in this process, so that a test can put the lifecycle where it wants it; blocking
clients ask from a thread. What moves with the work is asked of a real worker process.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.core.address import TcpAddress
from holdfast.core.errors import UserError
from holdfast.failover.lifecycle import (
    Announced,
    Ended,
    EndpointProblem,
    Event,
    Lifecycle,
    Loaded,
    LockWon,
    MemoryProblem,
    Misstep,
    Rested,
    StandDown,
    step,
)
from holdfast.spec.launch import WorkerLaunch
from holdfast.testing.clients import ask, chat_body
from holdfast.testing.deployment import Deployment
from holdfast.wire.http.server import HttpServer
from holdfast.wire.net import SocketNetwork
from holdfast.worker.status import Actions, StatusPage

FACTS = {
    "status": "ready",
    "reason": None,
    "model": "tiny",
    "engine_id": 1,
    **dict.fromkeys(("streams", "running", "waiting", "step_ms_p99"), 0),
    **dict.fromkeys(("steps_total", "tokens_total", "requests_total"), 3),
}
FAILOVER = "dynamo_component_engine_failover"
WHO = {"engine_id": "1", "model": "tiny", "dynamo_component": "worker"}
UNIX_S = 1_700_000_000.0

Reply = tuple[int, bytes, http.client.HTTPMessage]


def ask_for(port: int, path: str, method: str = "GET") -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def samples(page: bytes) -> dict[str, float]:
    """By name and labels, without those that say whose they are."""
    return {
        sample.name + "".join(f"[{value}]" for name, value in sample.labels.items() if name not in WHO): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


class Rig:
    """A page on a port, a lifecycle to move, a clock to turn, and levers whose work a test decides."""

    def __init__(self) -> None:
        self.life = Lifecycle(shadow=True, wake_s=30.0)
        self.now_s = 0.0
        self.released = asyncio.Event()  # sleep goes on to its end
        self.begun = asyncio.Event()
        self.finished = asyncio.Event()
        self.refusal: Exception | None = None
        self.page: StatusPage
        self.server: HttpServer
        self.port = 0

    async def start(self, settings: WorkerLaunch = WorkerLaunch(), action_s: float = 5.0) -> Rig:  # noqa: B008
        self.page = StatusPage(
            lambda: dict(FACTS),
            lambda: self.life,
            lambda: self.now_s,
            lambda: UNIX_S + self.now_s,
            settings,
            {"sleep": self.sleep, "wake_up": self.wake_up},
            action_s=action_s,
        )
        self.server = HttpServer(self.page.handle, SocketNetwork())
        address = await self.server.start(TcpAddress("127.0.0.1", 0))
        assert isinstance(address, TcpAddress)
        self.port = address.port
        return self

    async def close(self) -> None:
        await self.page.close()
        self.server.close()

    def happen(self, *events: Event) -> None:
        for event in events:
            self.life, effects = step(self.life, event, self.now_s)
            for effect in effects:
                self.page.entered(effect)

    async def get(self, path: str, method: str = "GET") -> Reply:
        return await asyncio.to_thread(ask_for, self.port, path, method)

    async def probes(self) -> tuple[int, int]:
        return (await self.get("/live"))[0], (await self.get("/health"))[0]

    async def sleep(self) -> str:
        self.begun.set()
        if self.refusal is not None:
            raise self.refusal
        await self.released.wait()
        self.finished.set()
        return "sleeps now"

    async def wake_up(self) -> str:
        return "asked for the lock"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.close()


# -- probes


async def test_probes_follow_the_life_of_a_shadow(rig: Rig) -> None:
    """Over HTTP, each state answers as docs/failover.md's table says."""
    await rig.start()
    told = [("init", await rig.probes())]
    for events in (
        [Loaded()],
        [MemoryProblem("the vault is gone")],
        [MemoryProblem(""), LockWon(5)],
        [Announced(5)],
        [MemoryProblem("the vault is gone")],
        [EndpointProblem("not admitted")],
        [EndpointProblem("the canary failed", fatal=True)],
        [StandDown("asked to sleep")],
        [MemoryProblem(""), Rested()],
        [Ended("over")],
    ):
        rig.happen(*events)
        told.append((rig.life.state.value, await rig.probes()))
    assert told == [
        ("init", (503, 503)),
        ("standby", (200, 200)),
        ("standby", (200, 503)),
        ("waking", (200, 200)),
        ("active", (200, 200)),
        ("active", (200, 200)),
        ("active", (200, 503)),
        ("active", (503, 503)),
        ("draining", (200, 503)),
        ("standby", (200, 200)),
        ("dead", (503, 503)),
    ]


async def test_a_hung_wake_is_not_live(rig: Rig) -> None:
    """Past its deadline `/live` turns to 503 with nothing but time having passed, and says how long it took."""
    await rig.start()
    rig.happen(Loaded(), LockWon(5))
    rig.now_s = 30.0
    assert await rig.probes() == (200, 200)
    rig.now_s = 32.5
    assert await rig.probes() == (503, 200)
    assert json.loads((await rig.get("/live"))[1]) == {
        "status": "notlive",
        "state": "waking",
        "reason": "waking: the takeover takes longer than its bound of 30 s (32.5 s by now)",
    }


async def test_health_tells_the_whole_story(rig: Rig) -> None:
    """Its body is the facts, with state, epoch, both answers and the reason."""
    await rig.start()
    rig.happen(Loaded(), LockWon(5), Announced(5), EndpointProblem("not admitted"))
    body = json.loads((await rig.get("/health"))[1])
    expected = {"state": "active", "entered_unix_s": 1_700_000_000.0, "epoch": 5, "live": True, "ready": False}
    assert body == {**FACTS, **expected, "reason": "serving; endpoint 'generate' is not healthy: not admitted"}


async def test_a_start_may_count_as_ready(rig: Rig) -> None:
    """With the starting status "ready", Init answers 200 on both, and nothing else changes."""
    await rig.start(WorkerLaunch(starting_ready=True))
    assert await rig.probes() == (200, 200)
    rig.happen(Ended("could not load"))
    assert await rig.probes() == (503, 503)


@pytest.mark.parametrize(("endpoints", "status"), [(("generate",), 200), (("generate", "embed"), 503)])
async def test_named_endpoints_must_be_there(rig: Rig, endpoints: tuple[str, ...], status: int) -> None:
    """An endpoint that this worker does not have makes it not ready, by name, and not dead."""
    await rig.start(WorkerLaunch(health_endpoints=endpoints))
    rig.happen(Loaded(), LockWon(5), Announced(5))
    assert await rig.probes() == (200, status)
    assert ("embed" in json.loads((await rig.get("/health"))[1])["reason"]) == (status == 503)


@pytest.mark.parametrize(
    ("path", "method", "allow"),
    [("/health", "POST", "GET, HEAD"), ("/metrics", "DELETE", "GET, HEAD"), ("/engine/sleep", "GET", "POST")],
)
async def test_other_methods_are_refused(rig: Rig, path: str, method: str, allow: str) -> None:
    """With the ones that are allowed; a lever is not pulled by a GET."""
    await rig.start()
    status, body, headers = await rig.get(path, method)
    assert (status, headers["allow"]) == (405, allow)
    assert json.loads(body)["error"]["message"]
    assert not rig.begun.is_set()


async def test_other_paths_are_refused(rig: Rig) -> None:
    """With those that there are."""
    await rig.start()
    status, body, _ = await rig.get("/engine/other", "POST")
    assert status == 404
    assert "/engine/wake_up" in json.loads(body)["error"]["message"]


# -- levers


async def test_a_lever_answers_when_its_work_is_done(rig: Rig) -> None:
    """Probes are answered meanwhile, a second lever is refused, and then the sentence comes."""
    await rig.start()
    asked = asyncio.create_task(rig.get("/engine/sleep", "POST"))
    await asyncio.wait_for(rig.begun.wait(), 10)
    assert (await rig.get("/health"))[0] == 503
    status, body, _ = await rig.get("/engine/wake_up", "POST")
    assert (status, json.loads(body)["message"]) == (409, "/engine/sleep is still under way")
    assert not asked.done()
    rig.released.set()
    status, body, _ = await asked
    assert (status, json.loads(body)) == (200, {"status": "ok", "message": "sleeps now"})
    status, body, _ = await rig.get("/engine/wake_up", "POST")
    assert (status, json.loads(body)) == (200, {"status": "ok", "message": "asked for the lock"})


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(UserError("not while draining"), 409), (Misstep("not while draining"), 409), (OSError("no device"), 500)],
)
async def test_a_lever_that_fails_says_why(rig: Rig, refusal: Exception, status: int) -> None:
    """A refusal is a 409 with its text, a bug a 500; both leave the page standing."""
    await rig.start()
    rig.refusal = refusal
    answered, body, _ = await rig.get("/engine/sleep", "POST")
    assert answered == status
    assert json.loads(body)["status"] == "error"
    assert str(refusal) in json.loads(body)["message"]
    assert (await rig.get("/engine/wake_up", "POST"))[0] == 200


async def test_a_lever_is_given_up_in_the_end(rig: Rig) -> None:
    """Work past its bound is cancelled, its asker told, and the next may try."""
    await rig.start(action_s=0.05)
    status, body, _ = await rig.get("/engine/sleep", "POST")
    assert (status, json.loads(body)["message"]) == (504, "given up after 0.05 s")
    assert not rig.finished.is_set()
    assert (await rig.get("/engine/wake_up", "POST"))[0] == 200


async def test_a_lever_is_not_undone_by_its_client_leaving(rig: Rig) -> None:
    """Who hangs up after asking has asked all the same."""
    await rig.start()
    _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(b"POST /engine/sleep HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    await asyncio.wait_for(rig.begun.wait(), 10)
    writer.transport.abort()
    async with asyncio.timeout(10):
        while rig.server.connections:
            await asyncio.sleep(0.001)
    rig.released.set()
    await asyncio.wait_for(rig.finished.wait(), 10)
    assert (await rig.get("/engine/wake_up", "POST"))[0] == 200


@pytest.mark.parametrize("end", ["close", "cut off"])
async def test_a_worker_that_ends_answers_its_operator(rig: Rig, end: str) -> None:
    """Once, with a 503, whichever way the page ends and whatever the lever still does."""
    await rig.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(b"POST /engine/sleep HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    await asyncio.wait_for(rig.begun.wait(), 10)
    if end == "cut off":
        rig.server.cut_off("the worker stops")
        rig.released.set()
        await asyncio.wait_for(rig.finished.wait(), 10)
    else:
        await rig.page.close()
    rig.server.stop_accepting()
    answers = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answers.startswith(b"HTTP/1.1 503 ")
    assert answers.endswith(b'{"status":"error","message":"the worker stops"}')
    assert answers.count(b"HTTP/1.1") == 1


async def test_levers_may_come_later(rig: Rig) -> None:
    """A worker learns what it can do after its page is up; until then there is no such path."""
    actions: Actions = {}
    page = StatusPage(dict, lambda: rig.life, lambda: 0.0, lambda: 0.0, WorkerLaunch(), actions)
    rig.page, rig.server = page, HttpServer(page.handle, SocketNetwork())
    address = await rig.server.start(TcpAddress("127.0.0.1", 0))
    assert isinstance(address, TcpAddress)
    rig.port = address.port
    assert (await rig.get("/engine/wake_up", "POST"))[0] == 404
    actions["wake_up"] = rig.wake_up
    assert (await rig.get("/engine/wake_up", "POST"))[0] == 200


# -- metrics


async def test_failover_metrics(rig: Rig) -> None:
    """Every state has a line from the start; a switch over moves state, stamp, durations and counts."""
    await rig.start()
    rig.now_s = 1.0
    before = samples((await rig.get("/metrics"))[1])
    states = {key: value for key, value in before.items() if key.startswith(f"{FAILOVER}_state[")}
    assert sum(states.values()) == states[f"{FAILOVER}_state[init]"] == 1
    assert len(states) == 6
    assert before[f"{FAILOVER}_switch_attempts_total"] == before[f"{FAILOVER}_switch_success_total"] == 0
    assert before[f"{FAILOVER}_state_entered_timestamp_seconds"] == UNIX_S, "of Init: when the page was made"
    rig.now_s = 12.0
    rig.happen(Loaded())
    rig.now_s = 20.0
    rig.happen(LockWon(5))
    rig.now_s = 20.25
    rig.happen(Announced(5))
    rig.now_s = 30.0
    after = samples((await rig.get("/metrics"))[1])
    assert {key: value for key, value in after.items() if key.startswith(FAILOVER) and "_created" not in key} == {
        **dict.fromkeys(states, 0.0),
        f"{FAILOVER}_state[active]": 1,
        f"{FAILOVER}_state_entered_timestamp_seconds": UNIX_S + 20.25,
        f"{FAILOVER}_last_state_duration_seconds[init]": 12.0,
        f"{FAILOVER}_last_state_duration_seconds[standby]": 8.0,
        f"{FAILOVER}_last_state_duration_seconds[waking]": 0.25,
        f"{FAILOVER}_transitions_total[init][standby]": 1,
        f"{FAILOVER}_transitions_total[standby][waking]": 1,
        f"{FAILOVER}_transitions_total[waking][active]": 1,
        f"{FAILOVER}_switch_attempts_total": 1,
        f"{FAILOVER}_switch_success_total": 1,
    }


async def test_failover_metrics_say_whose_they_are(rig: Rig) -> None:
    """Engine, model and component, under the labels that dashboards for Dynamo filter by."""
    await rig.start()
    rig.happen(Loaded())
    families = text_string_to_metric_families((await rig.get("/metrics"))[1].decode())
    ours = [sample.labels for family in families for sample in family.samples if sample.name.startswith(FAILOVER)]
    assert ours
    assert all(labels | WHO == labels for labels in ours)
    own = {name for labels in ours for name in labels} - set(WHO)
    assert own == {"state", "from_state", "to_state"}


async def test_a_counter_is_not_counted_twice(rig: Rig) -> None:
    """However often it is scraped."""
    await rig.start()
    rig.happen(Loaded(), LockWon(5))
    pages = [samples((await rig.get("/metrics"))[1]) for _ in range(3)]
    assert [page[f"{FAILOVER}_switch_attempts_total"] for page in pages] == [1, 1, 1]
    assert [page["holdfast_worker_tokens_total"] for page in pages] == [3, 3, 3]


# -- a real worker


def get(deployment: Deployment, path: str, method: str = "GET") -> Reply:
    record = json.loads((deployment.folder / "run" / "worker-0.json").read_bytes())
    return ask_for(int(record["status"].rpartition(":")[2]), path, method)


def test_a_real_worker_is_live_and_healthy(deployment: Deployment) -> None:
    """A normal worker, once found, is Active, and says what it serves."""
    status, body, _ = get(deployment, "/live")
    assert (status, json.loads(body)["status"]) == (200, "live")
    status, body, _ = get(deployment, "/health")
    facts = json.loads(body)
    assert (status, facts["status"], facts["role"], facts["model"]) == (200, "ready", "worker", "holdfast-sim")
    assert (facts["state"], facts["ready"], facts["reason"]) == ("active", True, "serving")


async def test_metrics_move_with_the_work(deployment: Deployment) -> None:
    """Requests and tokens are counted, and every line parses."""
    status, page, headers = get(deployment, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    before = samples(page)
    assert before["dynamo_worker_status[ready]"] == 1
    received = await ask(deployment.port, "/v1/chat/completions", chat_body("count", 25))
    assert received.status == 200
    after = samples(get(deployment, "/metrics")[1])
    assert after["holdfast_worker_requests_total"] == before["holdfast_worker_requests_total"] + 1
    assert after["holdfast_worker_tokens_total"] == before["holdfast_worker_tokens_total"] + 25
    assert after["holdfast_worker_steps_total"] > before["holdfast_worker_steps_total"]
    assert after["holdfast_worker_running"] == after["holdfast_worker_waiting"] == 0


async def test_what_only_grows_is_a_counter(rig: Rig) -> None:
    """So that a scraper takes its rate, and knows a restart from a fall."""
    await rig.start()
    page = (await rig.get("/metrics"))[1].decode()
    kinds = {family.name: family.type for family in text_string_to_metric_families(page)}
    work = {"holdfast_worker_steps", "holdfast_worker_tokens", "holdfast_worker_requests", "holdfast_unwritten"}
    work |= {"holdfast_worker_prefix_tokens", "holdfast_worker_prefix_hit_tokens"}
    failover = {f"{FAILOVER}_{name}" for name in ("transitions", "switch_attempts", "switch_success")}
    assert {name for name, kind in kinds.items() if kind == "counter"} == work | failover
