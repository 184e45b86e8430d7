"""Several frontends on one worker that cannot take all they ask: real processes, an outside client."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
import uvloop

from bench.overload import OverloadBench, run
from holdfast.testing.answers import Answer
from holdfast.testing.clients import Received, ask, chat_body, open_client, read_answer
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port

pytestmark = [pytest.mark.alone, pytest.mark.processes]


@pytest.mark.long
def test_frontends_that_ask_too_much_get_the_same_and_refusals_are_429() -> None:
    """Ten times as many clients at one frontend as at the other, far beyond what the worker takes: both finish about
    as much, refusals say when to come back, and nothing that only waited is called a migration."""
    seen = run(OverloadBench(seconds=8.0, concurrency=3, queue=3, tokens=25, load=10.0, shares=(10, 1), seed=7))
    assert seen["completed"] > 0, seen
    assert seen["unfairness"] <= 2.0, seen
    assert seen["refused_429"] > 0, seen
    for never in ("refused_otherwise", "refused_without_retry_after", "wrong", "lost", "resumed", "migrations_counted"):
        assert seen[never] == 0, (never, seen)


@pytest.mark.long
def test_a_worker_full_of_anothers_streams_is_no_failure_here() -> None:
    """One frontend's long answers have every place: the other's requests are refused with 429 and a time to come back,
    and as soon as a place is free its next one runs, never resumed; no worker was judged or set aside."""
    other = free_port()
    sim = {"concurrency": 3, "queue": 0, "tpot_ms": 20.0}
    with Deployment(1, sim, frontend={"holds": {"queue_s": 0.5}}) as deployment:
        deployment.start_frontend("other", other)
        deployment.wait_until(lambda: len(deployment.alive_workers(other)) == 1, "the other frontend's worker")
        uvloop.run(_full_of_anothers(deployment, deployment.port, other))


def test_the_wait_is_bounded_in_an_engines_queue_too() -> None:
    """One long answer has the only place of the batch, and the worker has room in its queue: a request there is refused
    with 429 while the long answer goes on, in place of waiting for its end."""
    sim = {"concurrency": 1, "queue": 8, "tpot_ms": 20.0}
    with Deployment(1, sim, frontend={"holds": {"queue_s": 1.5}}) as deployment:
        uvloop.run(_behind_a_long_answer(deployment))


async def _behind_a_long_answer(deployment: Deployment) -> None:
    long = json.dumps(chat_body("A long story.", 20_000)).encode()
    holder = await open_client(deployment.port)
    running = asyncio.ensure_future(holder.request("/v1/chat/completions", long))
    async with asyncio.timeout(60):
        while not holder.received.pieces:
            await asyncio.sleep(0.02)
        waits = [ask(deployment.port, "/v1/chat/completions", chat_body(f"{n}", 5)) for n in range(3)]
        refused = await asyncio.gather(*waits)
    assert [one.status for one in refused] == [429] * 3
    assert all("x-holdfast-reason: no_place" in one.head().lower() for one in refused)
    assert all("retry-after: " in one.head().lower() for one in refused)
    alone = lambda: deployment.worker_facts("worker-0")["streams"] == 1  # noqa: E731
    await asyncio.to_thread(deployment.wait_until, alone, "the refused ones to be called off")
    assert not running.done()
    holder.close()
    answer = await _until_served(deployment.port, chat_body("A short one.", 5))
    assert (answer.done, answer.resumed, answer.error) == (True, 0, None)
    await running


async def _full_of_anothers(deployment: Deployment, port: int, other: int) -> None:
    long = json.dumps(chat_body("A long story.", 20_000)).encode()
    holders = [await open_client(port) for _ in range(3)]
    held = [asyncio.ensure_future(holder.request("/v1/chat/completions", long)) for holder in holders]
    async with asyncio.timeout(60):
        while (await asyncio.to_thread(deployment.worker_facts, "worker-0"))["streams"] < 3:
            await asyncio.sleep(0.02)
    body = chat_body("A short one.", 5)
    refused = await asyncio.gather(*(ask(other, "/v1/chat/completions", body) for _ in range(6)))
    assert [one.status for one in refused] == [429] * 6
    assert all("retry-after: " in one.head().lower() for one in refused)
    assert all(json.loads(one.body())["error"]["code"] == "WorkerOverloaded" for one in refused)
    holders[0].close()
    answer = await _until_served(other, body)
    assert (answer.done, answer.resumed, answer.error) == (True, 0, None)
    assert len(answer.token_times_s) > 0
    page = (await asyncio.to_thread(deployment.get, "/metrics", other))[1].decode()
    assert "dynamo_migration_total{" not in page
    assert not re.search(r"^holdfast_streams_lost_total{.*} [1-9]", page, re.MULTILINE)
    assert re.search(r'holdfast_frontend_refused_total{[^}]*cause="WorkerOverloaded"}', page)
    for holder in holders:
        holder.close()
    await asyncio.gather(*held)


async def _until_served(port: int, body: dict[str, object]) -> Answer:
    """A place was given up a moment ago; the worker may hear of it later than of our request."""
    received = Received()
    async with asyncio.timeout(60):
        while received.status != 200:
            received = await ask(port, "/v1/chat/completions", body)
    return read_answer(received)
