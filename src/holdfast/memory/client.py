"""An engine's view of a vault: ask for the weights, write or map them, give the mapping up and get it back.

Always true: virtual addresses stay where they were across unmap and remap; no wait is longer than its time-out; a lost
vault is told at once (`on_lost`) while everything mapped stays usable, and the client reattaches by itself; when the
vault has lost everything, the client gives its descriptors back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.memory.calls import GRACE_S, Notice, VaultConnection, open_connection
from holdfast.memory.devices.contract import Device, OutOfMemory
from holdfast.memory.errors import StaleMemoryLayoutError, VaultRefused
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, close_all
from holdfast.memory.layout import Layout
from holdfast.memory.packing import TensorSpec, plan
from holdfast.memory.protocol import (
    AddSlabs,
    AskWeights,
    CommitWeights,
    Donate,
    FetchSlabs,
    GetStatus,
    Mapping,
    ReleaseWeights,
    Resume,
    WeightsEmpty,
    WeightsGranted,
)

SLAB_BYTES = 1024**3  # remap cost is the number of handles, not bytes (facts 5)
REMAP_TIMEOUT_MS = 30_000
CALL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
REATTACH_S = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)

# The answers to `acquire` and `remap`.
RW = "rw"
RO = "ro"
EMPTY = "empty"


@dataclass(slots=True)
class Mapped:
    """Weights in this process: one address range, slabs one after the other."""

    layout: Layout
    address: int
    size: int
    fds: list[int]  # kept, to be given back if vault and keeper are both lost
    present: bool = True  # False between unmap and remap

    def offsets(self) -> list[int]:
        starts, total = [], 0
        for size in self.layout.slab_sizes:
            starts.append(total)
            total += size
        return starts

    def addresses(self) -> dict[str, int]:
        """Where each tensor is."""
        starts = self.offsets()
        return {place.name: self.address + starts[place.slab] + place.offset for place in self.layout.tensors}


@dataclass(slots=True)
class MemoryClient:
    """One engine process at one vault. Use `connect`."""

    path: str
    device: Device
    engine_id: int
    slab_bytes: int = SLAB_BYTES
    on_lost: Callable[[str], None] = lambda why: None
    on_notice: Callable[[Notice], None] = lambda notice: None
    name: str = field(default_factory=lambda: os.urandom(8).hex())
    mapped: Mapped | None = None
    epoch: int | None = None
    _connection: VaultConnection | None = None
    _reattaching: asyncio.Task[None] | None = None
    _closed: bool = False

    # -- connection

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Raises ConnectionError, TimeoutError or VaultRefused."""
        await self._open(timeout_s, resume=None)

    async def _open(self, timeout_s: float, resume: Resume | None) -> bool:
        self._connection, welcome = await open_connection(
            self.path, self.name, self.engine_id, timeout_s, self._noticed, self._lost, resume
        )
        return welcome.resumed

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._connection.open

    def _noticed(self, notice: Notice) -> None:
        self.on_notice(notice)

    def _lost(self, why: str) -> None:
        if self._closed or self._connection is None:
            return
        self._connection = None
        self.on_lost(why)
        if self.mapped is not None and (self._reattaching is None or self._reattaching.done()):
            self._reattaching = asyncio.get_running_loop().create_task(self._reattach())

    async def _reattach(self) -> None:
        """Come back to a restarted vault without unmapping anything; bounded only by this process's life."""
        tries = 0
        while not self._closed and self.mapped is not None and not self.connected:
            await asyncio.sleep(REATTACH_S[min(tries, len(REATTACH_S) - 1)])
            tries += 1
            with contextlib.suppress(OSError, VaultRefused):
                resume = Resume(self.mapped.layout.hash(), self.epoch)
                if not await self._open(CONNECT_TIMEOUT_S, resume):
                    await self._give_back()

    async def _give_back(self) -> None:
        """The vault lost everything: hand it the record and the descriptors of what is mapped here."""
        mapped = self.mapped
        if mapped is None:
            return
        batches = [mapped.fds[at : at + FDS_PER_FRAME_MAX] for at in range(0, len(mapped.fds), FDS_PER_FRAME_MAX)]
        for place, batch in enumerate(batches):
            last = place == len(batches) - 1
            await self.link().call(lambda n, last=last: Donate(n, mapped.layout, last), CALL_TIMEOUT_S, batch)  # type: ignore[misc]

    def link(self) -> VaultConnection:
        if self._connection is None:
            raise ConnectionError(f"not connected to the vault at {self.path}")
        return self._connection

    async def status(self) -> bytes:
        """The vault's facts, as JSON."""
        answer = await self.link().call(GetStatus, CALL_TIMEOUT_S)
        facts: bytes = answer.facts
        return facts

    async def close(self) -> None:
        """Unmap everything and let go of every lock."""
        self._closed = True
        if self._reattaching is not None:
            self._reattaching.cancel()
            await asyncio.gather(self._reattaching, return_exceptions=True)
        self._forget_mapping()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- weights

    async def acquire(
        self, mode: str, timeout_ms: int, *, wait_for_writer: bool = False, replace: str | None = None
    ) -> str:
        """Ask for the weights: RW (write them, then `commit`), RO (mapped now), or EMPTY. TimeoutError when it takes
        too long, VaultRefused when it may not be."""
        ask = await self.link().call(
            lambda n: AskWeights(n, mode, timeout_ms, wait_for_writer, replace), timeout_ms / 1000 + GRACE_S
        )
        if isinstance(ask, WeightsEmpty):
            return EMPTY
        assert isinstance(ask, WeightsGranted)
        if ask.mode == "rw":
            return RW
        assert ask.layout is not None
        await self._map(ask.layout)
        return RO

    async def _map(self, layout: Layout) -> None:
        """Fetch the slabs granted and map them, at the old addresses if there were any."""
        slabs, fds = await self.link().call_for_fds(FetchSlabs, CALL_TIMEOUT_S)
        sizes = list(slabs.sizes)
        old = self.mapped
        address = old.address if old is not None else self.device.reserve(sum(sizes))
        try:
            self.device.map_many(address, list(zip(sizes, fds, strict=True)), writable=False)
        except BaseException:
            close_all(fds)
            if old is None:
                self.device.release(address, sum(sizes))
            raise
        self.mapped = Mapped(layout, address, sum(sizes), fds)

    async def allocate(
        self, specs: list[TensorSpec], identity: str, meta: dict[str, str] | None = None
    ) -> dict[str, int]:
        """The writer's memory: slabs made, mapped writable, handed to the vault; where each tensor is to be written."""
        layout = plan(specs, self.slab_bytes, self.device.granularity, identity, meta)
        total = sum(layout.slab_sizes)
        free = self.device.free_bytes()
        if total > free:
            raise OutOfMemory(f"the weights take {total} bytes, {free} are free", "free memory or use fewer bits")
        fds: list[int] = []
        try:
            for size in layout.slab_sizes:
                fds.append(self.device.create(size))
            address = self.device.reserve(total)
            self.device.map_many(address, list(zip(layout.slab_sizes, fds, strict=True)), writable=True)
            self.mapped = Mapped(layout, address, total, fds)
            await self._hand_over(layout, fds)
        except BaseException:
            if self.mapped is None:
                close_all(fds)
            self._forget_mapping()
            raise
        return self.mapped.addresses()

    async def _hand_over(self, layout: Layout, fds: list[int]) -> None:
        for start in range(0, len(fds), FDS_PER_FRAME_MAX):
            sizes = list(layout.slab_sizes[start : start + FDS_PER_FRAME_MAX])
            batch = fds[start : start + FDS_PER_FRAME_MAX]
            await self.link().call(lambda n, sizes=sizes: AddSlabs(n, sizes), CALL_TIMEOUT_S, batch)  # type: ignore[misc]

    async def commit(self, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Everything is written: seal it and let others read. The layout's hash."""
        mapped = self.mapped
        assert mapped is not None, "allocate before commit"
        self.device.synchronize()
        self.device.protect(mapped.address, mapped.size, writable=False)
        await self.link().call(lambda n: CommitWeights(n, mapped.layout), timeout_s)
        return mapped.layout.hash()

    async def release(self) -> None:
        """Unmap and let go of the weights; the connection stays."""
        self._forget_mapping()
        await self.link().call(ReleaseWeights, CALL_TIMEOUT_S)

    # -- giving addresses' contents up, and getting them back

    async def unmap(self) -> None:
        """Drop the mapping and the lock; the addresses stay reserved."""
        mapped = self.mapped
        assert mapped is not None, "nothing is mapped"
        self.device.synchronize()
        self.device.unmap(mapped.address, mapped.size)
        close_all(mapped.fds)
        mapped.fds, mapped.present = [], False
        if self.connected:
            await self.link().call(ReleaseWeights, CALL_TIMEOUT_S)

    async def remap(self, timeout_ms: int = REMAP_TIMEOUT_MS) -> str:
        """The same bytes at the same addresses: RO, or EMPTY where there are none. Raises TimeoutError,
        StaleMemoryLayoutError or ConnectionError; never hangs."""
        mapped = self.mapped
        assert mapped is not None, "nothing was mapped before"
        assert not mapped.present, "unmap before remap"
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        if not self.connected:
            await self._open(timeout_ms / 1000, resume=None)
        left_ms = max(0, round((deadline_s - loop.time()) * 1000))
        ask = await self.link().call(lambda n: AskWeights(n, "ro", left_ms), left_ms / 1000 + GRACE_S)
        if isinstance(ask, WeightsEmpty):
            return EMPTY
        if ask.layout.hash() != mapped.layout.hash():
            await self.link().call(ReleaseWeights, CALL_TIMEOUT_S)
            raise StaleMemoryLayoutError(
                f"the vault keeps {ask.layout.identity} ({ask.layout.hash()}), "
                f"mapped before were {mapped.layout.identity} ({mapped.layout.hash()})"
            )
        await self._map(mapped.layout)
        return RO

    async def register_mapping(self, epoch: int | None = None) -> None:
        """Say that this process maps the device's pages: the fences count it from now on."""
        await self.link().call(lambda n: Mapping(n, epoch), CALL_TIMEOUT_S)
        self.epoch = epoch

    def _forget_mapping(self) -> None:
        mapped, self.mapped = self.mapped, None
        if mapped is None:
            return
        if mapped.present:
            self.device.unmap(mapped.address, mapped.size)
        self.device.release(mapped.address, mapped.size)
        close_all(mapped.fds)
