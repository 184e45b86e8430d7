"""Every verdict that a control writes on a deployment's workers, with its time, and every degradation level.

Always true: whether a worker is well is read from the store, of the process that runs now under the worker's name.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from holdfast.core.tasks import Tasks
from holdfast.discovery.keys import HEALTH, INSTANCES, LEVELS, InstanceRecord, decode_record
from holdfast.health import breaker
from holdfast.health.records import HealthRecord
from holdfast.health.standing import HealthCause, HealthStatus
from holdfast.routing.degradation import LevelRecord
from holdfast.store.contract import Deleted, Put, Snapshot, Store
from holdfast.store.opening import open_store
from holdfast.testing.deployment import Deployment
from holdfast.testing.waiting import in_thread
from holdfast.wire.net import SocketNetwork


@dataclass(frozen=True, slots=True)
class Verdict:
    """One health record, when it came."""

    at_s: float
    path: str
    record: HealthRecord

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def status(self) -> HealthStatus:
        return HealthStatus(self.record.standing.status)

    @property
    def unchecked(self) -> bool:
        """Nothing is held against it but that it is new."""
        return set(self.record.standing.causes) == {HealthCause.UNCHECKED}

    @property
    def sound(self) -> bool:
        return self.record.weight == 1.0 and self.record.breaker.state == breaker.BreakerState.CLOSED

    def __str__(self) -> str:
        return f"{self.name} {self.status.name}: {self.record.standing.reason}"


class Verdicts:
    """Every health record as it comes, and which process each worker's name stands for."""

    def __init__(self) -> None:
        self.history: list[Verdict] = []
        self.now: dict[str, Verdict] = {}  # by path
        self.levels: list[LevelRecord] = []
        self._instances: dict[str, InstanceRecord] = {}  # by path

    async def follow_health(self, store: Store) -> None:
        async for event in store.watch(HEALTH):
            match event:
                case Snapshot(items):
                    self.now.clear()
                    for key, value in items.items():
                        self._take(key, value)
                case Put(key, value):
                    self._take(key, value)
                case Deleted(key):
                    self.now.pop(key.removeprefix(HEALTH), None)

    def _take(self, key: str, value: bytes) -> None:
        path = key.removeprefix(HEALTH)
        verdict = Verdict(time.perf_counter(), path, msgspec.json.decode(value, type=HealthRecord))
        if path not in self.now or self.now[path].record != verdict.record:
            self.history.append(verdict)
            self.now[path] = verdict

    async def follow_levels(self, store: Store) -> None:
        async for event in store.watch(LEVELS):
            match event:
                case Snapshot(items):
                    self.levels += [msgspec.json.decode(value, type=LevelRecord) for value in items.values()]
                case Put(_, value):
                    self.levels.append(msgspec.json.decode(value, type=LevelRecord))

    @property
    def living(self) -> dict[str, HealthRecord]:
        """Return the records of workers that are not dead, by name."""
        return {one.name: one.record for one in self.now.values() if one.status is not HealthStatus.DEAD}

    @property
    def spares(self) -> list[str]:
        return [name for name, record in self.living.items() if record.spare]

    async def follow_instances(self, store: Store) -> None:
        async for event in store.watch(INSTANCES):
            match event:
                case Snapshot(items):
                    self._instances = {k.removeprefix(INSTANCES): decode_record(value) for k, value in items.items()}
                case Put(key, value):
                    self._instances[key.removeprefix(INSTANCES)] = decode_record(value)
                case Deleted(key):
                    self._instances.pop(key.removeprefix(INSTANCES), None)

    def of(self, pid: int) -> Verdict | None:
        """The verdict on this process."""
        paths = [path for path, record in self._instances.items() if record.pid == pid]
        return self.now.get(paths[0]) if paths else None


@dataclass(slots=True)
class WatchedDeployment:
    """A deployment that runs, and the verdicts on its workers."""

    deployment: Deployment
    verdicts: Verdicts

    def verdict(self, name: str) -> Verdict | None:
        return self.verdicts.of(self.deployment.pid(name))

    def unsound(self) -> list[str]:
        """Workers that have less than all of their traffic, or no verdict yet."""
        verdicts = {name: self.verdict(name) for name in self.deployment.worker_names}
        return [name for name, verdict in verdicts.items() if verdict is None or not verdict.sound]

    async def is_whole(self) -> bool:
        """Control and the frontend think well of all workers."""
        if self.unsound():
            return False
        alive = await in_thread(self.deployment.alive_workers)
        return len(alive) == len(self.deployment.worker_names)


@contextlib.asynccontextmanager
async def watched(deployment: Deployment) -> AsyncIterator[WatchedDeployment]:
    """Follow the verdicts on a deployment that runs."""
    store = open_store(deployment.store, SocketNetwork(), random.Random())
    await store.start()
    seen = WatchedDeployment(deployment, Verdicts())
    following = Tasks("verdicts")
    following.spawn(seen.verdicts.follow_health(store), "health")
    following.spawn(seen.verdicts.follow_instances(store), "instances")
    following.spawn(seen.verdicts.follow_levels(store), "levels")
    try:
        yield seen
    finally:
        await following.stop()
        await store.close()
