"""A terminal beside a real store, in which the test writes what nodes and a control would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.discovery.keys import CONTROLS
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import LeasedMemory, Node, Replica, ReplicaPhase
from holdfast.fleet.records import DesiredModel, FleetRecord, NodeRecord, desired_key, fleet_key, node_key, read
from holdfast.health.records import ControlRecord
from holdfast.store.contract import Registration, Store
from tests.rigs.cli.in_process import patient, said_here
from tests.rigs.store.served import served_store

GIB = 1024**3
DEPLOYMENT = "local"
SIM = ("--engine", "sim", "--vault-gib", "0.5")


class Told(subprocess.CompletedProcess[str]):
    """What a command said, and how it ended."""

    def __repr__(self) -> str:
        return f"status {self.returncode}\n{self.stdout}{self.stderr}"

    @property
    def object(self) -> Any:
        return json.loads(self.stdout)


class Desk:
    """`store` is a client of the test's own."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.url = f"unix://{folder}/s"
        home = {"HOME": str(folder), "HOLDFAST_STATE_DIR": str(folder / "state")}
        self.env = {"PATH": os.environ["PATH"], **home}
        self._nodes: dict[str, Registration] = {}

    async def say(self, *words: str, store: bool = True) -> Told:
        return await asyncio.to_thread(self._say, (*words, "--store", self.url) if store else words)

    def _say(self, words: tuple[str, ...]) -> Told:
        done = said_here(words, self.env)
        return Told(words, done.returncode, done.stdout, done.stderr)

    async def find_desired(self, key: str) -> DesiredModel | None:
        where = desired_key(DEPLOYMENT, key)
        held = await self.store.get(where, 10.0)
        return None if held is None else read(DesiredModel, where, held)

    async def desired(self, key: str) -> DesiredModel:
        found = await self.find_desired(key)
        assert found is not None
        return found

    # -- as a node's agent, and as a control

    async def node(self, name: str, replicas: Sequence[Replica] = (), *, gib: int = 8, **more: Any) -> None:
        """Tell that it is there, with one device; returns when others can read it."""
        leases = {one.name: one.device_bytes for one in replicas if one.on_devices}
        node = Node(name=name, devices={"host-1": LeasedMemory(gib * GIB, leases)}, host=LeasedMemory(16 * GIB))
        told = msgspec.json.encode(NodeRecord(node=node, replicas=tuple(replicas), pid=7, host="here", **more))
        key = node_key(DEPLOYMENT, name)
        if name in self._nodes:
            self._nodes[name].update(told)
        else:
            self._nodes[name] = self.store.register(key, told)

        async def is_there() -> bool:
            return await self.store.get(key, 10.0) == told

        await eventually(is_there, f"{name} to be told of")

    async def write_record(self, **said: Any) -> None:
        await self.store.put(fleet_key(DEPLOYMENT), msgspec.json.encode(FleetRecord(**said)), 10.0)

    async def lead(self) -> None:
        led = ControlRecord(name="control-1", leads=True, pid=1)
        await self.store.put(f"{CONTROLS}{DEPLOYMENT}/control-1-1", msgspec.json.encode(led), 10.0)


async def eventually(is_so: Any, what: str) -> None:
    try:
        async with asyncio.timeout(60.0):
            while not await is_so():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise TimeoutError(f"waited 60 s for {what}") from None


def replica(
    desired: DesiredModel, serial: int, phase: ReplicaPhase = ReplicaPhase.READY, level: Level = Level.HOT, **more: Any
) -> Replica:
    model = desired.model
    size = {"device_bytes": model.device_bytes}
    where = {"node": "n1", "devices": ("host-1",), "since_s": 1.0}
    said = {"model": model.key, "version": model.version, "serial": serial, "phase": phase, "level": level}
    return Replica(**{**size, **where, **said, **more})


@contextlib.asynccontextmanager
async def desk_at(folder: Path) -> AsyncIterator[Desk]:
    """With one node of 8 GiB and a control that leads."""
    with patient():
        async with served_store(folder) as (store,):
            desk = Desk(store, folder)
            await desk.node("n1")
            await desk.lead()
            yield desk
