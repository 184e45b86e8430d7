"""What is seen of a fleet while clients ask: replicas and orders by the store, memory by each vault's own count.

Always true: every change that the store tells of is counted; what a device has is what its vaults say together, at one
moment, and what replicas are leased is what their node said.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from holdfast.cli.memory import ask_all
from holdfast.core.tasks import Tasks
from holdfast.discovery.keys import NODES, ORDERS
from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Replica, ReplicaPhase
from holdfast.fleet.records import NodeRecord, Orders, read
from holdfast.store.contract import Deleted, Put, Snapshot
from holdfast.store.opening import open_store
from holdfast.testing.waiting import until
from holdfast.wire.net import SocketNetwork
from tests.rigs.fleet.fleet_rig import FleetRig

LOOK_S = 0.5  # between two looks at the vaults: a swap takes seconds
GIVES_WAY = "needs its place"


@dataclass(slots=True)
class Memory:
    """What vaults said of their devices."""

    samples: int = 0
    over: list[str] = field(default_factory=list)
    most: Counter[str] = field(default_factory=Counter)  # bytes, by node and device


class Watch:
    """`async with` it; `gib`: what each device has."""

    def __init__(self, fleet: FleetRig, gib: float) -> None:
        self._fleet, self._total = fleet, int(gib * 2**30)
        self.store = open_store(f"unix://{fleet.folder}/run/store.sock", SocketNetwork(), random.Random())
        self._tasks = Tasks("watch")
        self.memory = Memory()
        self.nodes: dict[str, NodeRecord] = {}
        self.orders: dict[str, tuple[float, Action]] = {}  # by id, with when it was first seen
        self.ready_s: dict[str, float] = {}  # replicas, by name, and since when each serves, as its node says
        self.residences_s: list[float] = []  # of those that gave way
        self.over_leased: list[str] = []

    async def __aenter__(self) -> Watch:
        await self.store.start()
        self._tasks.spawn(self._follow(NODES), "nodes")
        self._tasks.spawn(self._follow(ORDERS), "orders")
        self._tasks.spawn(self._look(), "vaults")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.stop()
        await self.store.close()

    def is_there(self, node: str) -> bool:
        """Whether its agent tells of it."""
        return node in self.nodes

    def replicas(self, model: str) -> list[Replica]:
        return [one for node in self.nodes.values() for one in node.replicas if one.model == model]

    def hot(self, model: str) -> int:
        there = self.replicas(model)
        return sum(one.level is Level.HOT and one.phase is ReplicaPhase.READY for one in there)

    async def until_hot(self, model: str, count: int, bound_s: float = 240.0) -> None:
        try:
            await until(lambda: self.hot(model) == len(self.replicas(model)) == count, f"{count} of {model}", bound_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: there are {self.replicas(model)}\n{self._fleet.logs()}") from None

    @property
    def swaps(self) -> int:
        return sum(action.why.endswith(GIVES_WAY) for _, action in self.orders.values())

    # -- the store

    async def _follow(self, prefix: str) -> None:
        async for event in self.store.watch(prefix):
            found = event.items if isinstance(event, Snapshot) else {}
            if isinstance(event, Put):
                found = {event.key: event.value}
            elif isinstance(event, Deleted) and prefix == NODES:
                self.nodes.pop(event.key.rpartition("/")[2], None)
            for key, data in found.items():
                if prefix == NODES:
                    self._see(read(NodeRecord, key, data))
                else:
                    self._hear(read(Orders, key, data))

    def _see(self, record: NodeRecord) -> None:
        self.nodes[record.node.name] = record
        for one in record.replicas:
            if one.level is Level.HOT and one.phase is ReplicaPhase.READY:
                self.ready_s.setdefault(one.name, one.since_s)
        for device, memory in record.node.devices.items():
            if sum(memory.leases.values()) > memory.total_bytes:
                self.over_leased.append(f"{record.node.name} {device}: {dict(memory.leases)}")

    def _hear(self, orders: Orders) -> None:
        now_s = time.time()
        for action in orders.actions:
            if action.id not in self.orders:
                self.orders[action.id] = (now_s, action)
                if action.verb is Verb.DRAIN and action.why.endswith(GIVES_WAY):
                    self.residences_s.append(now_s - self.ready_s.get(action.name, now_s))

    # -- the vaults

    async def _look(self) -> None:
        while True:
            for node in self._fleet.names:
                await self._ask(node, self._fleet.vault_sockets(node))
            await asyncio.sleep(LOOK_S)

    async def _ask(self, node: str, sockets: list[str]) -> None:
        facts = await ask_all(sockets)
        told = Counter[str]()
        for one in facts:
            told[one["device"]] += one.get("device_bytes", 0)
        self.memory.samples += 1
        for device, size in told.items():
            self.memory.most[f"{node} {device}"] = max(size, self.memory.most[f"{node} {device}"])
            if size > self._total:
                self.memory.over.append(f"{node} {device} has {size} of {self._total}: {facts}"[:500])
