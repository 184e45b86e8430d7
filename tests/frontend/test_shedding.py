"""Degradation at the edge: the level is written into a real store by hand, as control would, and two frontends that
share two workers follow it: who is refused and how, how full the workers get, and that all of it is undone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.core.tiers import Tier
from holdfast.discovery.keys import LEVELS
from holdfast.routing.degradation import LevelRecord
from holdfast.store.opening import open_store
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port
from holdfast.wire.net import SocketNetwork
from tests.rigs.frontend.raw_http import Raw, Reply, chat

CHAT = "/v1/chat/completions"
BATCH, QUEUE, WORKERS = 4, 2, 2
PLACES = WORKERS * (BATCH + QUEUE)
RETRY_S = 17


class World:
    """Two workers, two frontends, and the level in their store."""

    def __init__(self, deployment: Deployment, ports: list[int]) -> None:
        self.deployment = deployment
        self.ports = ports

    def write(self, value: bytes | None, deployment: str = "bench") -> None:
        """What control would put there; None: nothing is there."""

        async def put() -> None:
            store = open_store(self.deployment.store, SocketNetwork(), random.Random(1))
            await store.start()
            if value is None:
                await store.delete(LEVELS + deployment, 60.0)
            else:
                await store.put(LEVELS + deployment, value, 60.0)
            await store.close()

        asyncio.run(put())

    def become(self, level: int, *, vacant: bool = False) -> None:
        self.write(msgspec.json.encode(LevelRecord(level, "a test", vacant=vacant)))
        self.heard(level)

    def heard(self, level: int) -> None:
        for port in self.ports:
            self.deployment.wait_until(lambda port=port: self.deployment.health(port).get("level") == level, f"{level}")

    def ask(self, tier: Tier, port: int = 0) -> Reply:
        with Raw(port or self.ports[0]) as raw:
            return raw.post(CHAT, chat(), f"x-priority-tier: {tier.label}\r\n").reply()

    def counts(self) -> tuple[list[int], int]:
        """Streams by worker, of both frontends, and requests that wait."""
        pages = [self.deployment.health(port) for port in self.ports]
        streams = dict.fromkeys(self.deployment.worker_names, 0)
        for page in pages:
            for worker in page["workers"]:
                streams[worker["name"]] += worker["streams"]
        return sorted(streams.values()), sum(page["held"] for page in pages)

    def wait_for(self, streams: list[int], held: int) -> None:
        self.deployment.wait_until(lambda: self.counts() == (streams, held), f"{streams} streams and {held} that wait")

    @contextlib.contextmanager
    def crowd(self, count: int, tier: Tier = Tier.STANDARD) -> Iterator[list[Raw]]:
        """So many clients of endless answers, at both frontends in turn."""
        with contextlib.ExitStack() as clients:
            raws = [clients.enter_context(Raw(self.ports[number % 2])) for number in range(count)]
            for raw in raws:
                body = chat(stream=True, max_tokens=60000, ignore_eos=True)
                raw.post(CHAT, body, f"x-priority-tier: {tier.label}\r\n")
            yield raws

    def full(self, each: int) -> list[int]:
        return [each] * WORKERS


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    sim = {"concurrency": BATCH, "queue": QUEUE, "tpot_ms": 10.0, "context_tokens_max": 65536}
    waits = {"holds": {"queue_s": 600.0, "hold_s": 600.0, "shed_retry_s": RETRY_S}}
    with Deployment(WORKERS, sim, frontend=waits) as deployment:
        ports = [deployment.port, free_port()]
        deployment.start_frontend("another", ports[1])
        deployment.wait_until(lambda: len(deployment.alive_workers(ports[1])) == WORKERS, "its workers")
        yield World(deployment, ports)


@pytest.fixture(autouse=True)
def whole(world: World) -> Iterator[None]:
    """Each test begins, and leaves, a deployment without a record and without streams."""
    yield
    world.write(None)
    world.heard(0)
    world.wait_for(world.full(0), 0)


def test_each_level_refuses_whom_it_should_and_the_last_nobody(world: World) -> None:
    """Down and up again: 429 for a tier that is shed, 503 for all at level 4, with when to come back and why; premium
    is refused at level 4 only."""
    shed = {0: [], 1: [], 2: [Tier.BEST_EFFORT], 3: [Tier.BEST_EFFORT], 4: list(Tier)}
    for level in (0, 1, 2, 3, 4, 3, 1, 0):
        world.become(level)
        for port in world.ports:
            for tier in Tier:
                reply = world.ask(tier, port)
                if tier not in shed[level]:
                    assert reply.status == 200, (level, tier)
                    assert "x-holdfast-reason" not in reply.headers
                    continue
                reason = "no_capacity" if level == 4 else "tier_shed"
                assert (reply.status, reply.headers["x-holdfast-reason"]) == (503 if level == 4 else 429, reason)
                assert reply.headers["retry-after"] == str(RETRY_S)
                assert reply.error["code"] == reason
                assert reply.error["type"] == ("service_unavailable_error" if level == 4 else "overloaded_error")
                assert f"level {level}" in reply.error["message"]


def test_batches_follow_the_level_and_fully_return(world: World) -> None:
    """Standard requests fill so much of each worker's batch, whoever sends them; a better level lets those in that
    waited, without another word; a worse one touches nothing that runs."""
    asked = 2 * PLACES
    for level, each in ((1, 3), (2, 3), (3, 2)):
        world.become(level)
        with world.crowd(asked):
            world.wait_for(world.full(each), asked - WORKERS * each)
        world.wait_for(world.full(0), 0)
    with world.crowd(asked):
        world.wait_for(world.full(2), asked - WORKERS * 2)
        world.become(1)
        world.wait_for(world.full(3), asked - WORKERS * 3)
        world.become(0)
        world.wait_for(world.full(BATCH + QUEUE), asked - PLACES)
        world.become(3)
        world.wait_for(world.full(BATCH + QUEUE), asked - PLACES)  # what runs goes on


def test_premium_has_the_places_that_others_leave(world: World) -> None:
    """While standard requests wait for want of capacity, a premium one is served at once, from either frontend,
    also where the worker turned others away; and premium may have every place there is."""
    world.become(3)
    waiting = 2 * PLACES - WORKERS * 2
    with contextlib.ExitStack() as clients:
        clients.enter_context(world.crowd(2 * PLACES))
        world.wait_for(world.full(2), waiting)
        for port in world.ports * 2:
            assert world.ask(Tier.PREMIUM, port).status == 200
        world.wait_for(world.full(2), waiting)  # nobody else took its place
        premium = clients.enter_context(world.crowd(PLACES - WORKERS * 2 + 1, Tier.PREMIUM))
        world.wait_for(world.full(BATCH + QUEUE), waiting + 1)
        premium[0].sock.close()
        world.wait_for(world.full(BATCH + QUEUE), waiting)


def test_at_level_4_what_runs_and_what_waits_goes_on(world: World) -> None:
    """No new requests: those that came before have their answers."""
    with Raw(world.ports[0]) as last:
        with world.crowd(PLACES) as running:
            world.wait_for(world.full(BATCH + QUEUE), 0)
            last.post(CHAT, chat(stream=True))
            world.wait_for(world.full(BATCH + QUEUE), 1)
            world.become(4)
            assert world.ask(Tier.PREMIUM).status == 503
            world.wait_for(world.full(BATCH + QUEUE), 1)
            for client in running:
                client.sock.close()
        reply = last.reply()
        assert (reply.status, reply.events()[-1]) == (200, "[DONE]")


def test_a_worker_that_is_there_disproves_that_there_is_none(world: World) -> None:
    """Control wrote that nobody is there, and died: with workers in sight it is level 3, and premium is served."""
    world.write(msgspec.json.encode(LevelRecord(4, "nobody", vacant=True)))
    world.heard(3)
    assert [world.ask(tier).status for tier in Tier] == [200, 200, 429]


def test_what_cannot_be_read_or_is_anothers_changes_nothing(world: World) -> None:
    """As last decided; a deployment whose name begins alike has a level of its own; a lost store keeps the last."""
    world.become(2)
    for value in (b"", b"{}", b'{"level": 9, "reason": ""}', b'{"level": "4", "reason": ""}', b'{"reason": "\xff"}'):
        world.write(value)
    world.write(msgspec.json.encode(LevelRecord(4, "theirs")), "bench-mark")
    world.write(msgspec.json.encode(LevelRecord(3, "ours")))
    world.heard(3)
    world.write(b"junk")
    assert world.ask(Tier.BEST_EFFORT).status == 429
    world.deployment.kill("store")
    world.deployment.wait_until(lambda: world.deployment.health()["store"] != "connected", "the store to be missed")
    assert [world.ask(tier).status for tier in Tier] == [200, 200, 429]
    world.deployment.start_store()
    world.deployment.wait_until(lambda: world.deployment.health()["store"] == "connected", "the store to be back")
