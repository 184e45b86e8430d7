"""Engines of the failover bench on a GPU, in their own processes: what all do, and the one with direct memory.

Times are of the monotonic clock, which all processes share. Always true: an engine waits for the lock on command only;
between the lock and what is measured nothing is imported, mapped or compiled; every wait has a bound.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.core.tasks import beside
from holdfast.failover.journal import next_epoch
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import HostDevice, OutOfMemory, open_device
from holdfast.memory.devices.cuda import Driver
from holdfast.memory.protocol import OWNER_GONE, PoolGranted, PoolNews
from holdfast.spec.names import is_host
from holdfast.testing.waiting import in_thread
from tests.rigs.gpu.lane import Piece, open_lane

WAIT_MS = 10_000  # for weights another engine writes, and for the pool of an owner that was just killed
# Facts 4a: up to 0.4 s with much host memory; a fence that takes a hundred times that is not shown.
FENCE_S = 20.0
FREE_S = 5.0  # facts 1: memory is free before the pidfd is readable; what is not free now will not be
FREE_POLL_S = 0.001
POLL_S = 0.05  # as often as a standby looks what changed in the index


class Settings(msgspec.Struct, frozen=True):
    """What one engine process does. Sizes are bytes."""

    part: str  # "direct", "vault", "late"; "queue" plays the device's queue where there is no GPU
    device: str
    path: str
    lock_path: str
    engine_id: int = 0
    direct_bytes: int = 0
    weights_bytes: int = 0
    slab_bytes: int = 1024**3
    private_bytes: int = 0  # of the process's own, behind the pool's pages
    block_bytes: int = 1024 * 1024 * 2
    block_count: int = 1
    full_count: int = 0
    open_count: int = 0
    queue_ms: int = 0  # how long the planted work takes
    epoch: int = 0  # of the engine a "queue" works for, and the blocks it writes
    blocks: tuple[int, ...] = ()


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def wait_for_lock(path: str) -> float:
    """Take the election's lock; the descriptor stays open until this process dies. When it was got."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return time.monotonic()


def trace_driver(calls: list[str]) -> None:
    """Write down the name of every call to NVIDIA's driver from now on, from any thread."""
    call = Driver.__call__

    def traced(driver: Driver, function: str, *arguments: object) -> Any:
        calls.append(function)
        return call(driver, function, *arguments)

    Driver.__call__ = traced  # type: ignore[method-assign, assignment]


class Engine:
    """What every part's engine does: its context, its seat at the vault, the lock, the pool under a new epoch."""

    geometry = "direct"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = open_device(settings.device)
        self.host = self.device if is_host(settings.device) else HostDevice()
        self.lane = open_lane(settings.device)
        self.client = MemoryClient(settings.path, self.device, settings.engine_id, slab_bytes=settings.slab_bytes)
        self.pool = PoolClient(self.client, self.host, private_bytes=settings.private_bytes, on_news=self._hear)
        self.epoch = 0
        self.marks: dict[str, float] = {}
        self.driver_calls: list[str] = []

    def _hear(self, news: PoolNews) -> None:
        if news.kind == OWNER_GONE:
            self.mark("owner_gone")

    def mark(self, name: str) -> None:
        self.marks[name] = time.monotonic()

    async def start(self) -> None:
        await self.client.connect()
        await self.client.register_mapping(None)

    async def wait(self) -> None:
        """Stand by until the lock is ours."""
        self.driver_calls.clear()
        self.marks.clear()
        async with beside(in_thread(wait_for_lock, self.settings.lock_path), "lock") as lock:
            say("armed")
            while not lock.done():
                self.follow()
                await asyncio.wait({lock}, timeout=POLL_S)
            self.marks["lock"] = lock.result()

    def follow(self) -> None:
        """Keep up with what the owner does."""

    async def acquire(self) -> PoolGranted:
        """Take the pool under a new epoch, past the CPU fence."""
        self.epoch = next_epoch(self.client.last_epoch, time.time_ns() // 1_000_000)
        granted = await self.pool.acquire(self.epoch, self.geometry, WAIT_MS)
        self.mark("cpu_fence")
        return granted

    async def pass_gpu_fence(self) -> None:
        await asyncio.wait_for(self.pool.gpu_fence.wait(), FENCE_S)
        self.mark("gpu_fence")

    def keep_busy(self, fills: Sequence[Piece], reads: Sequence[Piece] = ()) -> None:
        """From a thread: queue this over and over, as an engine queues its steps."""

        def work() -> None:
            self.lane.bind()
            for turn in itertools.count():
                for piece in reads:
                    self.lane.read_through(*piece)
                for address, size, seed in fills:
                    self.lane.fill(address, size, seed + turn)
                self.lane.synchronize()

        threading.Thread(target=work, daemon=True).start()

    async def wake(self, *, fenced: bool) -> dict[str, Any]:
        raise NotImplementedError

    async def serve(self) -> None:
        raise NotImplementedError

    async def plant(self) -> dict[str, Any]:
        raise NotImplementedError


class DirectEngine(Engine):
    """An engine whose weights and KV are its own: nothing of it outlives it, and all of it must be free to wake."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._taken: list[tuple[int, int]] = []

    def _try(self) -> dict[str, Any]:
        """Take the memory at once, as an engine that trusts the lock alone would."""
        try:
            self._taken = self.lane.take(self.settings.direct_bytes)
        except OutOfMemory as error:
            self.mark("refused")
            return {"refused": error.cause, "free_bytes": self.lane.free_bytes()}
        self.mark("allocated")
        return {"refused": ""}

    async def _room(self) -> None:
        """Past the GPU fence the device must agree that the memory is there."""
        deadline_s = time.monotonic() + FREE_S
        while (free := self.lane.free_bytes()) < self.settings.direct_bytes:
            if time.monotonic() > deadline_s:
                raise OutOfMemory(f"past the GPU fence {free} bytes are free, {self.settings.direct_bytes} are needed")
            await asyncio.sleep(FREE_POLL_S)
        self.mark("room")

    async def wake(self, *, fenced: bool) -> dict[str, Any]:
        facts = {} if fenced else self._try()
        if not (await self.acquire()).adopt:
            await self.pool.make(self.host.granularity, [self.device.granularity])  # small: what is owned, not used
        await self.pass_gpu_fence()
        if not self._taken:
            await self._room()
            self._taken = self.lane.take(self.settings.direct_bytes)
            self.mark("allocated" if fenced else "allocated_later")
        return facts

    async def serve(self) -> None:
        address, size = self._taken[0]
        self.keep_busy([(address, size, 1)] * 4)
