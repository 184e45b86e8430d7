"""The worker's status page over real HTTP: probes by state, metrics that parse, and admin actions.

The page is served by a real server in this process, so that a test can put the lifecycle where it wants it; blocking
clients ask from a thread. What moves with the work is asked of a real worker process.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from holdfast.core.address import TcpAddress
from holdfast.core.errors import UserError
from holdfast.core.procfs import peer_uid
from holdfast.failover.lifecycle import (
    Announced,
    Drained,
    Ended,
    EndpointProblem,
    Event,
    Lifecycle,
    Loaded,
    LockWon,
    MemoryProblem,
    Misstep,
    StandDown,
    step,
)
from holdfast.kv.pool import KvUse, Resumes
from holdfast.spec.launch import WorkerLaunch
from holdfast.testing.clients import ask, chat_body
from holdfast.testing.deployment import Deployment
from holdfast.wire.http.server import HttpServer
from holdfast.wire.net import SocketNetwork
from holdfast.worker.admin_actions import Actions, AdminActions
from holdfast.worker.status import WorkerStatusPage

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


def ask_for(port: int, path: str, method: str = "GET", **headers: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
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
    """A page on a port, a lifecycle to move, a clock to turn, and admin actions whose work a test decides."""

    def __init__(self) -> None:
        self.life = Lifecycle(failover=True, wake_s=30.0)
        self.facts: dict[str, Any] = dict(FACTS)
        self.actions: Actions = {"sleep": self.sleep, "wake_up": self.wake_up}
        self.now_s = 0.0
        self.released = asyncio.Event()  # sleep goes on to its end
        self.begun = asyncio.Event()
        self.finished = asyncio.Event()
        self.refusal: Exception | None = None
        self.page: WorkerStatusPage
        self.admin: AdminActions
        self.server: HttpServer
        self.port = 0

    async def start(self, settings: WorkerLaunch = WorkerLaunch(), action_s: float = 5.0) -> Rig:  # noqa: B008
        self.admin = AdminActions(action_s)
        self.page = WorkerStatusPage(
            lambda: dict(self.facts),
            lambda: self.life,
            lambda: self.now_s,
            lambda: UNIX_S + self.now_s,
            settings=settings,
            actions=self.actions,
            admin=self.admin,
        )
        self.server = HttpServer(self.page.handle, SocketNetwork())
        address = await self.server.start(TcpAddress("127.0.0.1", 0))
        assert isinstance(address, TcpAddress)
        self.port = address.port
        return self

    async def close(self) -> None:
        await self.admin.close()
        self.server.close()

    def happen(self, *events: Event) -> None:
        for event in events:
            self.life, effects = step(self.life, event, self.now_s)
            if effects:
                self.page.entered()

    async def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        return await asyncio.to_thread(ask_for, self.port, path, method, **headers)

    async def scraped(self) -> dict[str, float]:
        return samples((await self.get("/metrics"))[1])

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


async def test_probes_follow_the_life_of_a_failover_worker(rig: Rig) -> None:
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
        [MemoryProblem(""), Drained()],
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
    """With the ones that are allowed; an action is not started by a GET."""
    await rig.start()
    status, body, headers = await rig.get(path, method)
    assert (status, headers["allow"]) == (405, allow)
    assert json.loads(body)["error"]["message"]
    assert not rig.begun.is_set()


# -- admin actions


async def test_a_lever_answers_when_its_work_is_done(rig: Rig) -> None:
    """Probes are answered meanwhile, a second action is refused, and then the sentence comes."""
    await rig.start()
    asked = asyncio.create_task(rig.get("/engine/sleep", "POST"))
    await asyncio.wait_for(rig.begun.wait(), 60)
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
    await asyncio.wait_for(rig.begun.wait(), 60)
    writer.transport.abort()
    async with asyncio.timeout(60):
        while rig.server.connections:
            await asyncio.sleep(0.001)
    rig.released.set()
    await asyncio.wait_for(rig.finished.wait(), 60)
    assert (await rig.get("/engine/wake_up", "POST"))[0] == 200


@pytest.mark.parametrize("end", ["close", "cut off"])
async def test_a_worker_that_ends_answers_its_operator(rig: Rig, end: str) -> None:
    """Once, with a 503, whichever way the page ends and whatever the action still does."""
    await rig.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(b"POST /engine/sleep HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    await asyncio.wait_for(rig.begun.wait(), 60)
    if end == "cut off":
        rig.server.cut_off("the worker stops")
        rig.released.set()
        await asyncio.wait_for(rig.finished.wait(), 60)
    else:
        await rig.admin.close()
    rig.server.stop_accepting()
    answers = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert answers.startswith(b"HTTP/1.1 503 ")
    assert answers.endswith(b'{"status":"error","message":"the worker stops"}')
    assert answers.count(b"HTTP/1.1") == 1


async def test_levers_may_come_later(rig: Rig) -> None:
    """A worker learns what it can do after its page is up; until then there is no such path."""
    del rig.actions["wake_up"]
    await rig.start()
    status, body, _ = await rig.get("/engine/wake_up", "POST")
    assert status == 404
    assert "/engine/sleep" in json.loads(body)["error"]["message"], "the paths that there are"
    rig.actions["wake_up"] = rig.wake_up
    assert (await rig.get("/engine/wake_up", "POST"))[0] == 200


# -- who may pull them

AS_NOBODY = """
import encodings.idna, http.client, os, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection.request("POST", "/engine/sleep")
print(connection.getresponse().status)
"""


async def test_this_user_may_and_a_web_page_or_a_wrong_token_may_not(rig: Rig) -> None:
    """By the kernel's word for who is at the other end; a browser's page is not the user."""
    await rig.start(WorkerLaunch(engine_token="secret"))
    page = {"Origin": "http://elsewhere.example"}
    for headers in (page, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        assert (await rig.get("/engine/sleep", "POST", **headers))[0] == 403
    assert not rig.begun.is_set()
    rig.released.set()
    for headers in ({}, page | {"Authorization": "bearer secret"}):
        assert (await rig.get("/engine/sleep", "POST", **headers))[0] == 200


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_another_user_of_this_machine_may_not(rig: Rig) -> None:
    """That a port is on loopback does not make everybody there its owner."""
    await rig.start(WorkerLaunch(engine_token="secret"))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AS_NOBODY, str(rig.port)), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await child.communicate()
    assert (said, rig.begun.is_set()) == (b"403\n", False)


def test_levers_work_on_the_loop_that_workers_run() -> None:
    """Whose sockets are not the standard library's."""

    async def pulled() -> int:
        rig = await Rig().start()
        status, _, _ = await rig.get("/engine/wake_up", "POST")
        await rig.close()
        return status

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(pulled()) == 200


@pytest.mark.parametrize(("listen", "connect"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_owner_of_a_tcp_peer_is_told_by_the_kernel(listen: str, connect: str) -> None:
    """In both families, and for an IPv4 client of a socket that serves both."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with (
        socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::") as server,
        socket.create_connection((connect, server.getsockname()[1]), timeout=60),
        server.accept()[0] as accepted,
    ):
        assert peer_uid(accepted) == os.getuid()


# -- metrics


async def test_failover_metrics(rig: Rig) -> None:
    """Every state has a line from the start; a switch over moves state, stamp, durations and counts."""
    await rig.start()
    rig.now_s = 1.0
    before = await rig.scraped()
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
    after = await rig.scraped()
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
    assert await rig.scraped() == after, "counted twice"
    families = text_string_to_metric_families((await rig.get("/metrics"))[1].decode())
    ours = [sample.labels for family in families for sample in family.samples if sample.name.startswith(FAILOVER)]
    assert all(labels | WHO == labels for labels in ours), "without the labels that dashboards for Dynamo filter by"


@pytest.mark.parametrize(
    "told", [None, Resumes(9, 6, 2, 1, 500, 104, 15), Resumes(1, 1, 0, 0, 3, 3, 3)], ids=["no group", "one", "next"]
)
async def test_every_count_of_resumes_is_a_metric_and_may_fall_with_the_next_wake(
    rig: Rig, told: Resumes | None
) -> None:
    """A worker without a group shows 0; one with a group what its engine counted since it woke, each under its name."""
    await rig.start()
    rig.facts |= asdict(Resumes(10, 10, 10, 10, 1000, 1000, 1000))
    await rig.scraped()
    rig.facts = FACTS | (asdict(told) if told else {})
    shown = await rig.scraped()
    for name in ("resumed", "resumed_resident", "resumed_evicted", "resumed_missing"):
        assert shown[f"holdfast_worker_{name}"] == getattr(told, f"{name}_total", 0), name
    for name in ("recomputed_tokens_max", "recomputed_tokens_resident_max"):
        assert shown[f"holdfast_worker_{name}"] == getattr(told, name, 0), name


async def test_counters_go_on_where_a_pool_was_taken_anew(rig: Rig) -> None:
    """The owner's counts begin at 0 with every wake; a counter that fell would be read as a burst. An engine without a
    pool, a standby, shows zeros, not a division by them."""
    await rig.start()
    for use in (KvUse(), KvUse(100, 25, 10, 640, 320), KvUse(100, 50, 10, 960, 480), KvUse()):
        rig.facts["kv"] = asdict(use)
        shown = await rig.scraped()
        assert shown["dynamo_component_kvstats_gpu_cache_usage_percent"] == use.usage
    rig.facts["kv"] = asdict(KvUse(100, 1, 60, 160, 160))
    shown = await rig.scraped()
    assert shown["holdfast_worker_prefix_tokens_total"] == 960 + 160
    assert shown["holdfast_worker_prefix_hit_tokens_total"] == 480 + 160
    assert shown["dynamo_component_kvstats_total_blocks"] == 100
    assert shown["dynamo_component_kvstats_gpu_cache_usage_percent"] == 0.01
    assert shown["dynamo_component_kvstats_gpu_prefix_cache_hit_rate"] == 1.0


# -- a real worker


def scrape(deployment: Deployment) -> Reply:
    return ask_for(int(deployment.record("worker-0")["status"].rpartition(":")[2]), "/metrics")


async def test_metrics_move_with_the_work(deployment: Deployment) -> None:
    """Requests and tokens are counted, and every line parses."""
    status, page, headers = scrape(deployment)
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    before = samples(page)
    assert before["holdfast_worker_state[ready]"] == 1
    received = await ask(deployment.port, "/v1/chat/completions", chat_body("count", 25))
    assert received.status == 200
    after = samples(scrape(deployment)[1])
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
