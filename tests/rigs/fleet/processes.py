"""A real store's process, agents and controllers that reach it by clients of their own, and a controller's end at any
write.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from holdfast.control.fleet_loop import FleetLoop
from holdfast.control.metrics import ControlMetrics
from holdfast.core.address import parse_address
from holdfast.core.ports import SystemClock, World
from holdfast.core.tasks import beside
from holdfast.fleet.actions import Verb
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.desired_changes import update_desired
from holdfast.fleet.observed import ReplicaPhase
from holdfast.fleet.records import (
    DesiredModel,
    FleetRecord,
    Orders,
    desired_key,
    fleet_key,
    node_key,
    orders_key,
)
from holdfast.fleet.room import HOST
from holdfast.fleet.scaling import Scaling
from holdfast.store.client import EmbeddedStore
from holdfast.store.contract import Store, StoreUnavailable
from holdfast.testing.waiting import BOUND_S, until
from holdfast.wire.net import SocketNetwork
from tests.rigs.worlds.fleet_controllers import Agent, desired_model
from tests.rigs.worlds.fleet_node import Body, Machine

OLD_S = 100.0  # replicas here have been where they are for so long: their turns are over, and WARM ones still kept


class LeapingClock(SystemClock):
    """The kernel's, and what was leapt over."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


class StoreProcess:
    """In a folder of its own, which it is started from again."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder}/store.sock"
        launch = json.dumps({"state_dir": str(folder), "name": "store", "address": self.url})
        self._command = [sys.executable, "-m", "holdfast.roles", "store", launch]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(BOUND_S)
            self._process = None

    @contextlib.asynccontextmanager
    async def client(self, seed: int = 7) -> AsyncIterator[EmbeddedStore]:
        store = EmbeddedStore(parse_address(self.url), SocketNetwork(), random.Random(seed))
        await store.start()
        try:
            yield store
        finally:
            await store.close()


class Mortal:
    """A store's client whose owner dies at its n-th write: before it, or after, without hearing the answer."""

    def __init__(self, store: Store, at: int, *, after: bool) -> None:
        self._store, self._left, self._after = store, at, after
        self.died = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def swap(self, key: str, value: bytes, expected: bytes | None, timeout_s: float) -> bool:
        self._left -= 1
        if self._left < 0 or (self._left == 0 and not self._after):
            await self._end()
        swapped = await self._store.swap(key, value, expected, timeout_s)
        if self._left == 0:
            await self._end()
        return swapped

    async def _end(self) -> None:
        self.died.set()
        await asyncio.Event().wait()  # it is cancelled here, and does nothing more


class LiveAgent:
    """Does at once what stands in its node's orders, and keeps its record in the store."""

    def __init__(self, store: Store, deployment: str, machine: Machine) -> None:
        self._store, self._clock = store, SystemClock()
        self._orders_key, self._node_key = orders_key(deployment, machine.name), node_key(deployment, machine.name)
        self.machine, self._agent = machine, Agent(machine)
        self._orders = Orders()
        self.fails = False
        self.away = False  # it does nothing, and its record is gone

    async def run(self) -> None:
        said, registration = b"", None
        async with beside(self._watch(), "orders") as watching:
            while not watching.done():
                if self.away and registration is not None:
                    await registration.withdraw()
                    registration = None
                elif not self.away:
                    self._work()
                    record = self._record()
                    if registration is None:
                        registration = self._store.register(self._node_key, record)
                    elif record != said:
                        registration.update(record)
                    said = record
                await asyncio.sleep(0.005)
            watching.result()

    def _record(self) -> bytes:
        self._agent.number = 0  # the same again is not written again
        return msgspec.json.encode(self._agent.record())

    async def _watch(self) -> None:
        async for _ in self._store.watch(self._orders_key):
            found = await self._store.get(self._orders_key, BOUND_S)
            self._orders = msgspec.json.decode(found, type=Orders) if found is not None else Orders()

    def _work(self) -> None:
        now_s = self._clock.unix_s()
        self._agent.obey(self._orders, now_s, lambda: self.fails)
        for body in self.machine.bodies.values():
            body.due_s = now_s if body.due_s is not None else None
        for name in self.machine.tick(now_s):
            stopped = [one.id for one in self._orders.actions if one.verb is Verb.STOP and one.name == name]
            self._agent.answers.update(dict.fromkeys(stopped, ""))
        for body in self.machine.bodies.values():
            if body.due_s is None:
                body.since_s = now_s - OLD_S if now_s - body.since_s < OLD_S / 2 else body.since_s


@dataclass
class Site:
    """Runs one deployment's fleet."""

    process: StoreProcess
    deployment: str
    store: EmbeddedStore  # a person's
    agents: list[LiveAgent] = field(default_factory=list)
    clock: LeapingClock = field(default_factory=LeapingClock)
    metrics: ControlMetrics = field(default_factory=ControlMetrics)
    leaders: list[asyncio.Task[None]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def leading(
        self, *, dies_at: int = 0, after: bool = False, lost: asyncio.Event | None = None
    ) -> AsyncIterator[tuple[FleetLoop, asyncio.Event]]:
        """A control that leads, and when it dies."""
        number, lost = len(self.leaders) + 1, lost or asyncio.Event()
        async with self.process.client(100 + number) as store:
            mortal = Mortal(store, dies_at or 1_000_000, after=after)
            world = World(SocketNetwork(), self.clock, random.Random(number))
            by, reached = f"control-{number}", cast(Store, mortal)
            loop = FleetLoop(reached, self.deployment, world, lost, self.metrics.fleet, by=by, loads=dict)
            async with beside(loop.run(), by) as task:
                self.leaders.append(task)
                yield loop, mortal.died
                assert lost.is_set() or not task.done(), task.result()

    async def want(self, model: Model, scaling: Scaling | None = None) -> None:
        await self._ask(model.key, desired_model(model, scaling))

    async def unwant(self, key: str) -> None:
        await self._ask(key, None)

    async def _ask(self, key: str, desired: DesiredModel | None) -> None:
        """Write it, and update_desired again where the store was away."""
        async with asyncio.timeout(BOUND_S):
            while True:
                with contextlib.suppress(StoreUnavailable):
                    await update_desired(self.store, self.deployment, key, lambda _: desired)
                    return

    async def wanted(self, key: str) -> int:
        found = await self.store.get(desired_key(self.deployment, key), BOUND_S)
        assert found is not None
        return msgspec.json.decode(found, type=DesiredModel).model.wanted

    async def record(self) -> FleetRecord:
        found = await self.store.get(fleet_key(self.deployment), BOUND_S)
        return FleetRecord() if found is None else msgspec.json.decode(found, type=FleetRecord)

    async def pending(self) -> list[str]:
        found = [await self.store.get(orders_key(self.deployment, one.machine.name), BOUND_S) for one in self.agents]
        orders = [msgspec.json.decode(one, type=Orders) for one in found if one is not None]
        return [action.id for one in orders for action in one.actions]

    def bodies(self) -> Iterator[Body]:
        for one in self.agents:
            yield from one.machine.bodies.values()

    def serving(self) -> int:
        return sum(body.serves for body in self.bodies())

    def asleep(self) -> int:
        return sum(body.level is Level.WARM and body.phase is ReplicaPhase.READY for body in self.bodies())

    def placed(self) -> list[str]:
        """Return the names of all that were ever started."""
        done = [action for one in self.agents for action in one.machine.done]
        return sorted(action for action in done if action.startswith("place/"))

    async def rests(self) -> None:
        """Return when no order is in flight."""

        async def nothing() -> bool:
            return not await self.pending()

        await until(nothing, "everything to be done", BOUND_S)


@contextlib.asynccontextmanager
async def site(process: StoreProcess, deployment: str, nodes: int = 2) -> AsyncIterator[Site]:
    """Run a site with agents, and no leader."""
    async with contextlib.AsyncExitStack() as stack:
        made = Site(process, deployment, await stack.enter_async_context(process.client()))
        tasks = []
        for number in range(nodes):
            store = await stack.enter_async_context(process.client(number))
            agent = LiveAgent(store, deployment, Machine(f"n{number}", {"gpu0": 80, HOST: 200}))
            made.agents.append(agent)
            tasks.append(await stack.enter_async_context(beside(agent.run(), f"agent {number}")))
        yield made
        for task in tasks:
            assert not task.done(), task.result()
