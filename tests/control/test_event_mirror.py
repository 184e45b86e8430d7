"""The mirror of events, with a real store and a real Redis: killed, stopped, full, and two controls at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from holdfast.control.event_mirror import EventMetrics, EventMirror
from holdfast.control.redis_stream import RedisStream
from holdfast.core.tasks import beside
from holdfast.discovery.keys import REPORTS
from holdfast.fleet.desired import Model
from holdfast.fleet.desired_changes import update_desired
from holdfast.store.contract import Store
from holdfast.testing.waiting import BOUND_S, until
from tests.rigs.redis_process import Redis, running
from tests.rigs.store.served import served_store
from tests.rigs.worlds.fleet_controllers import desired_model

__all__ = ["running"]
MANY = 30
READ_S = 0.01  # between two readings: so that little waits for the next


class Fleet:
    """Only what is wanted of it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def want(self, wanted: int, key: str = "m") -> None:
        model = Model(key=key, wanted=wanted, device_bytes=1, replicas_max=1000, version="v1")
        await update_desired(self.store, "d", key, lambda _: desired_model(model))

    async def forget(self, key: str = "m") -> None:
        await update_desired(self.store, "d", key, lambda _: None)

    @contextlib.asynccontextmanager
    async def mirrored(
        self, redis: Redis, kept_max: int = 10_000, entries_max: int = 10_000
    ) -> AsyncIterator[EventMetrics]:
        metrics = EventMetrics()
        stream, rng = RedisStream(redis.url, "d", entries_max), random.Random(3)
        bounds = {"kept_max": kept_max, "read_s": READ_S, "look_s": 20 * READ_S}
        mirror = EventMirror(self.store, "d", stream, metrics, unix_s=lambda: 1.5, rng=rng, **bounds)
        async with beside(mirror.run(), "mirror") as task:
            yield metrics
            assert not task.done(), task.result()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with served_store(tmp_path) as (store,):
        yield Fleet(store)


def kinds(redis: Redis) -> list[tuple[str, int | None]]:
    return [(one["event_type"], one["data"].get("wanted")) for one in redis.entries()]


async def last(redis: Redis, kind: str, wanted: int | None) -> None:
    await until(lambda: kinds(redis)[-1:] == [(kind, wanted)], f"{kind} {wanted}")


async def test_what_happens_stands_in_the_stream(fleet: Fleet, running: Redis) -> None:
    """Under the names that consumers of `dispatcher:events` know, each with an id of its own, in order."""
    async with fleet.mirrored(running) as metrics:
        await fleet.want(1)
        await last(running, "deploy", 1)
        await fleet.want(2)
        await last(running, "scale", 2)
        report = b'{"name": "f", "at_unix_s": 1, "demand": {"served-m": {"waiting": 3, "since_unix_s": 1}}}'
        await fleet.store.put(f"{REPORTS}d/f", report, BOUND_S)
        await until(lambda: kinds(running)[-1] == ("queue_state", None), "who waits")
        await fleet.store.delete(f"{REPORTS}d/f", BOUND_S)
        await until(lambda: len(running.entries()) == 4, "that nobody does")
        await fleet.forget()
        await last(running, "evict", None)
        await until(lambda: sum(metrics.sent.values()) == 5, "all to be counted")
    first, *_ = found = running.entries()
    assert [one["event_type"] for one in found] == ["deploy", "scale", "queue_state", "queue_state", "evict"]
    assert first.items() >= {"model_key": "m", "deployment": "d", "timestamp": "1.500"}.items()
    assert len({one["id"] for one in found}) == 5
    assert [one["data"].get("waiting") for one in found] == [None, None, 3, 0, None]
    assert not metrics.dropped


async def test_redis_killed_in_the_middle_gets_the_rest_when_it_is_back(fleet: Fleet, running: Redis) -> None:
    """Nothing is lost and nothing told twice; what happened meanwhile is told in order."""
    async with fleet.mirrored(running) as metrics:
        await fleet.want(1)
        await last(running, "deploy", 1)
        running.kill()
        await fleet.want(2)
        await until(lambda: metrics.waiting == 1 and not metrics.connected, "what waits")
        await fleet.want(3)
        await until(lambda: metrics.waiting == 2, "both")
        await asyncio.to_thread(running.start)
        await last(running, "scale", 3)
        assert kinds(running) == [("deploy", 1), ("scale", 2), ("scale", 3)]
        await until(lambda: metrics.connected, "Redis to be known to be back")
        assert not metrics.dropped


async def test_a_redis_that_forgot_everything_is_told_how_things_are(fleet: Fleet, tmp_path: Path) -> None:
    """One without a disk comes back empty: what there is, is told anew."""
    redis = Redis(tmp_path, keeps=False)
    redis.start()
    try:
        async with fleet.mirrored(redis):
            await fleet.want(1)
            await fleet.want(5, "other")
            await until(lambda: len(redis.entries()) == 2, "both")
            redis.kill()
            await asyncio.to_thread(redis.start)
            await until(lambda: len(redis.entries()) == 2, "both again, though nothing happens")
            assert set(kinds(redis)) == {("deploy", 1), ("deploy", 5)}
    finally:
        redis.kill()


async def test_the_next_control_goes_on_where_the_last_ended(fleet: Fleet, running: Redis) -> None:
    """Also with what happened while nobody led: a model that was forgotten then, too."""
    await fleet.want(1)
    await fleet.want(1, "other")
    async with fleet.mirrored(running):
        await until(lambda: len(running.entries()) == 2, "both")
    await fleet.want(2)
    await fleet.forget("other")
    async with fleet.mirrored(running):
        await until(lambda: len(running.entries()) == 4, "what happened since")
    since = {(one["event_type"], one["model_key"]) for one in running.entries()[2:]}
    assert since == {("scale", "m"), ("evict", "other")}


async def test_two_controls_at_once_tell_everything_once(fleet: Fleet, running: Redis) -> None:
    """Of two who lead against the lock, one is refused each time and goes on from what the other told."""
    async with fleet.mirrored(running), fleet.mirrored(running):
        for wanted in range(1, 6):
            await fleet.want(wanted)
            await last(running, "scale" if wanted > 1 else "deploy", wanted)
    assert kinds(running) == [("deploy", 1), *(("scale", wanted) for wanted in range(2, 6))]


async def test_a_redis_that_is_stopped_or_full_costs_a_gap_and_no_more(fleet: Fleet, running: Redis) -> None:
    """Its clients wait for nobody: what waits is bounded, what was dropped is counted and told as a gap, and then how
    things are. A full one is the same: it answers, and takes nothing."""
    limit = partial(running.say, "CONFIG", "SET", "maxmemory")
    for spoil, mend in (
        (lambda: running.send(signal.SIGSTOP), lambda: running.send(signal.SIGCONT)),
        (lambda: limit("1"), lambda: limit("0")),
    ):
        running.say("FLUSHALL")
        async with fleet.mirrored(running, kept_max=3) as metrics:
            await fleet.want(1)
            await last(running, "deploy", 1)
            spoil()
            wanted = 1
            async with asyncio.timeout(BOUND_S):
                while metrics.dropped < MANY:
                    wanted += 1
                    await fleet.want(wanted)
                    await asyncio.sleep(READ_S)
            mend()
            await last(running, "scale", wanted)
            gaps = [one["data"]["dropped"] for one in running.entries() if one["event_type"] == "gap"]
            assert sum(gaps) == metrics.dropped >= MANY


async def test_the_stream_is_bounded(fleet: Fleet, running: Redis) -> None:
    """Redis keeps about as many entries as it was told to: whole nodes of its own beyond them are let go."""
    running.say("CONFIG", "SET", "stream-node-max-entries", "5")
    async with fleet.mirrored(running, entries_max=10):
        for wanted in range(1, MANY):
            await fleet.want(wanted)
            await last(running, "scale" if wanted > 1 else "deploy", wanted)
    assert 10 <= len(running.entries()) < 20
