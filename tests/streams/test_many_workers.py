"""Thousands of workers: what one of them does costs what it costs with a few. Counted, not timed."""

from __future__ import annotations

import asyncio
import random
from typing import Any, NoReturn

import msgspec
import pytest

from holdfast.core.address import Address
from holdfast.core.ports import Listener, ProtocolFactory
from holdfast.discovery.keys import CARDS, INSTANCES, InstanceRecord
from holdfast.discovery.registry import Instance, Registry
from holdfast.spec.waits import HoldSettings
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.roster import Roster
from tests.rigs.worlds.streams import Cluster, make_card

WORKERS = 2000


class Nowhere:
    """A network where nobody answers."""

    async def connect(self, address: Address, factory: ProtocolFactory, timeout_s: float) -> asyncio.Transport:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def listen(self, address: Address, factory: ProtocolFactory, *, share_port: bool = False) -> Listener:
        raise OSError("nobody listens here")


async def no_text(card: object, tokenizer: bytes) -> object:
    return None


async def test_a_store_that_is_empty_all_of_a_sudden_costs_one_look_at_each_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two thousand workers appear and then the store comes back without them: no worker is compared with all others."""
    compared = 0
    plain = Instance.__eq__

    def counted(self: Instance, other: object) -> bool:
        nonlocal compared
        compared += 1
        return plain(self, other)

    monkeypatch.setattr(Instance, "__eq__", counted)
    rng = random.Random(1)
    directory = ModelDirectory(rng, 10)
    dispatcher = Dispatcher(directory, HoldSettings(), asyncio.get_running_loop().time)
    roster = Roster(directory, dispatcher, Nowhere(), rng, no_text, "test")
    registry = Registry("d")
    paths = [f"d-00000000/worker/generate/{number:x}" for number in range(WORKERS)]
    record = msgspec.json.encode(InstanceRecord("unix:///x", "unix:///y", make_card().checksum()))
    roster.apply(registry.snapshot(CARDS, {CARDS + path: msgspec.json.encode(make_card()) for path in paths}))
    roster.apply(registry.snapshot(INSTANCES, {INSTANCES + path: record for path in paths}))
    assert len(roster.watchers) == WORKERS
    roster.apply(registry.snapshot(INSTANCES, {}))
    assert not roster.watchers
    assert compared <= 8 * WORKERS
    await roster.close()


class Unscanned(dict[Any, Any]):
    """A dictionary that may be asked for one thing, and not for all."""

    def _no(self, *_: object) -> NoReturn:
        raise AssertionError("all workers were looked at")

    __iter__ = keys = values = items = _no  # type: ignore[assignment]


@pytest.fixture
def cluster() -> Cluster:
    """A few workers, none of which may be looked at for another's sake."""
    cluster = Cluster(HoldSettings(hold_s=1.0, queue_s=0.2, fresh_max=2))
    for number in range(4):
        cluster.worker(f"w{number}", places=1)
    workers = cluster.set()
    workers.table.slots = Unscanned(workers.table.slots)
    links = cluster.dispatcher.links
    links._by_slot = Unscanned(links._by_slot)
    return cluster


def test_refusals_and_takeovers_look_at_no_other_worker(cluster: Cluster) -> None:
    """Requests are placed, turned away, refused and given up, a worker dies and one of a group takes over: each without
    a look at every worker."""
    for number in range(8):  # four run, two wait, two are refused at once
        cluster.ask(f"s{number}")
    cluster.wait(0.5)
    assert cluster.dispatcher.stats.refused == {"WorkerOverloaded": 4}
    first = next(worker for worker in cluster.workers.values() if "s0" in worker.numbers)
    first.say("s0", [1], finish="length")
    cluster.ask("again")
    first.turn_away("again")
    first.room(1)
    first.die()
    standby = cluster.worker("standby", group="g", active=False)
    cluster.worker("leader", group="g", epoch=1)
    standby.take_over(2)
    assert cluster.dispatcher.links.objection(cluster.workers["leader"].link).startswith("superseded")
    assert cluster.set().weight == 1 + 1 + 1 + 8
    assert cluster.set().deterministic
