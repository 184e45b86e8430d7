"""Verdicts in the store, and real processes that act on them: what a client sees of a worker that is not fit."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from holdfast.discovery.keys import HEALTH, INSTANCES, REPORTS, parse_key
from holdfast.health.records import HealthRecord, ReportRecord
from holdfast.health.standing import WEIGHTS, HealthStatus, WorkerStanding
from holdfast.store.contract import Snapshot, Store
from holdfast.store.opening import open_store
from holdfast.testing.clients import Stream
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port
from holdfast.wire.net import SocketNetwork
from tests.rigs.mid_stream import slow_down, speed_up

TOKENS = 150


@pytest.fixture
def pair() -> Iterator[Deployment]:
    with Deployment(workers=2, sim={"ttft_ms": 5, "tpot_ms": 10}) as started:
        yield started


@asynccontextmanager
async def opened(pair: Deployment) -> AsyncIterator[Store]:
    store = open_store(pair.store, SocketNetwork(), random.Random(1))
    await store.start()
    try:
        yield store
    finally:
        await store.close()


def look(pair: Deployment, prefix: str) -> dict[str, bytes]:
    """All that stands under a prefix."""

    async def read() -> dict[str, bytes]:
        async with opened(pair) as store, asyncio.timeout(60):
            async for event in store.watch(prefix):
                if isinstance(event, Snapshot):
                    return event.items
        raise AssertionError("the watch ended")

    return asyncio.run(read())


def decide(pair: Deployment, name: str, status: HealthStatus, **fields: Any) -> None:
    """Write a verdict down, as control does."""
    path = paths(pair)[name]
    standing = WorkerStanding(status=status, weight=WEIGHTS[status], reason="as decided", causes={}, **fields)

    async def write() -> None:
        async with opened(pair) as store:
            value = msgspec.json.encode(HealthRecord(name=name, standing=standing))
            await store.put(HEALTH + path, value, 60.0)

    asyncio.run(write())


def paths(pair: Deployment) -> dict[str, str]:
    """Workers' places in the store, by name."""
    instances = {row["name"]: row["instance"] for row in pair.health()["workers"]}
    found = [key for key in (parse_key(INSTANCES, key) for key in look(pair, INSTANCES)) if key is not None]
    return {name: next(k.path for k in found if f"{k.instance:x}" == number) for name, number in instances.items()}


def shown(pair: Deployment, name: str, port: int = 0) -> dict[str, Any]:
    nothing = {"weight": None, "streams": -1}  # not there yet
    return next((row for row in pair.health(port).get("workers", ()) if row["name"] == name), nothing)


def asked(pair: Deployment, count: int) -> list[Stream]:
    return [pair.stream(f"count to {number}", TOKENS, seed=7).wait_tokens(3) for number in range(count)]


def texts(streams: list[Stream]) -> list[str]:
    answers = [stream.answer() for stream in streams]
    assert not [answer.wrong for answer in answers if answer.wrong]
    return [answer.text for answer in answers]


def test_a_fall_moves_streams_once_and_no_client_sees_more_than_a_pause(pair: Deployment) -> None:
    """Each token once, whatever was on the fallen worker; told again, and to a frontend that comes later, it moves
    nothing; and nothing of it is reported as the worker's failure."""
    whole = texts(asked(pair, 8))
    slow_down(pair, 6.0)  # they are under way still when the verdict is written, however long that takes
    streams = asked(pair, 8)
    victim = max(pair.worker_names, key=lambda name: shown(pair, name)["streams"])
    decide(pair, victim, HealthStatus.UNHEALTHY, fall=1)
    pair.wait_until(lambda: shown(pair, victim)["weight"] == 0.0, "the verdict to be applied")
    assert shown(pair, victim)["streams"] == 0
    moved = pair.health()["resumed_total"]
    assert moved > 0
    decide(pair, victim, HealthStatus.SUSPICIOUS, fall=1)
    speed_up(pair)
    assert texts(streams) == whole
    port = free_port()
    pair.start_frontend("later", port)
    pair.wait_until(lambda: shown(pair, victim, port)["weight"] == 0.5, "the later frontend to know")
    assert shown(pair, victim)["standing"] == "SUSPICIOUS"
    assert pair.health()["resumed_total"] == moved
    assert pair.health(port)["resumed_total"] == 0
    [report] = reports(pair, lambda report: any(seen.fall for seen in report.workers.values()))
    assert {kind for seen in report.workers.values() for kind in seen.failed} == set()


def reports(pair: Deployment, fits: Any) -> list[ReportRecord]:
    found: list[ReportRecord] = []

    def has_come() -> bool:
        told = [msgspec.json.decode(value, type=ReportRecord) for value in look(pair, f"{REPORTS}bench/").values()]
        found[:] = [report for report in told if fits(report)]
        return bool(found)

    pair.wait_until(has_come, "a report")
    return found


@pytest.mark.long
def test_a_drained_worker_gives_its_streams_away_by_plan(pair: Deployment) -> None:
    """It ends with none, before they are over; no failure is counted, and every answer is whole."""
    whole = texts(asked(pair, 8))
    slow_down(pair, 4.0)
    streams = asked(pair, 8)
    victim = max(pair.worker_names, key=lambda name: shown(pair, name)["streams"])
    decide(pair, victim, HealthStatus.DRAINING)
    pair.wait_until(lambda: shown(pair, victim)["streams"] == 0, "its streams to leave")
    assert shown(pair, victim)["standing"] == "DRAINING"
    assert pair.health()["streams"] == 8
    assert pair.health()["resumed_total"] == 0
    speed_up(pair)
    assert texts(streams) == whole


def test_where_all_are_unfit_requests_wait_as_with_no_worker(pair: Deployment) -> None:
    """Nobody who is quarantined serves; the first that is fit again takes what waits."""
    for name in pair.worker_names:
        decide(pair, name, HealthStatus.UNHEALTHY, fall=1)
    pair.wait_until(lambda: pair.health()["status"] == "no_worker", "nobody to be fit")
    assert "worker-0: unhealthy: as decided" in pair.health()["reason"]
    stream = pair.stream("hello", 5)
    pair.wait_until(lambda: pair.health()["held"] == 1, "the request to be held")
    decide(pair, pair.worker_names[0], HealthStatus.SUSPICIOUS, fall=1)
    assert not stream.answer().wrong


def test_what_was_decided_holds_without_a_store(pair: Deployment) -> None:
    """The store is killed: a worker without traffic stays so, and the others serve."""
    victim = pair.worker_names[0]
    decide(pair, victim, HealthStatus.UNHEALTHY, fall=1)
    pair.wait_until(lambda: shown(pair, victim)["weight"] == 0.0, "the verdict to be applied")
    pair.kill("store")
    pair.wait_until(lambda: pair.health()["store"] != "connected", "the loss to be seen")
    assert not pair.stream("hello", 5).answer().wrong
    assert shown(pair, victim)["weight"] == 0.0
    assert pair.worker_facts(victim)["requests_total"] == 0


def test_a_report_tells_of_the_workers_and_changes_only_when_they_do(pair: Deployment) -> None:
    """Attempts, tokens and streams' time of what ran; requests that ended well; and then silence."""
    began_s = time.monotonic()
    texts(asked(pair, 6))
    took_s = time.monotonic() - began_s
    [report] = reports(pair, lambda report: report.ended == 6 and not any(s.open for s in report.workers.values()))
    assert sum(seen.succeeded for seen in report.workers.values()) == 6
    assert sum(seen.tokens for seen in report.workers.values()) == report.answer_tokens == 6 * TOKENS
    for seen in report.workers.values():
        assert 0.2 * seen.tokens * 0.01 < seen.stream_s < 6 * took_s, "what the engine's pace asks for, and no more"
        assert seen.failed == {}
    before = look(pair, f"{REPORTS}bench/")
    texts([pair.stream("again", 3)])
    [later] = reports(pair, lambda report: report.ended == 7)
    assert later.at_unix_s > report.at_unix_s
    assert look(pair, f"{REPORTS}bench/").keys() == before.keys()
