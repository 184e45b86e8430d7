"""An engine's view of the KV pool: own it under an epoch, make its pages or adopt them, step back from it.

Always true: pages and index are mapped before the engine touches them and stay at their addresses; only the owner maps
them writable; the fences are told by the vault, never guessed from time. A standby maps the same pages read-only, or
writable but untouched where changing access later would cost too much (fact 4a).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from holdfast.memory.calls import Notice, patience_s
from holdfast.memory.client import CALL_TIMEOUT_S, MemoryClient
from holdfast.memory.devices.contract import Device
from holdfast.memory.fdsocket import close_all
from holdfast.memory.protocol import AcquirePool, AddPoolSlabs, DonatePool, Fence, FetchPool, PoolGranted, Quiesced


@dataclass(slots=True)
class PoolMapping:
    """The pool in this process. The index is host memory on every device."""

    index_address: int
    index_size: int
    pages_address: int
    page_sizes: list[int]
    fds: list[int]


@dataclass(slots=True)
class PoolClient:
    """The pool's side of a `MemoryClient`; `host` maps the index, the client's device the pages."""

    client: MemoryClient
    host: Device
    mapping: PoolMapping | None = None
    cpu_fence: asyncio.Event = field(default_factory=asyncio.Event)
    gpu_fence: asyncio.Event = field(default_factory=asyncio.Event)
    geometry: str = ""

    def __post_init__(self) -> None:
        before = self.client.on_notice

        def noticed(notice: Notice) -> None:
            if isinstance(notice, Fence) and notice.epoch == self.client.epoch:
                (self.cpu_fence if notice.kind == "cpu" else self.gpu_fence).set()
            before(notice)

        self.client.on_notice = noticed
        self.client.on_reattached = self._give_back

    async def acquire(self, epoch: int, geometry: str, timeout_ms: int) -> bool:
        """Own the pool; True if there is one to adopt. Returns past the CPU fence of every earlier epoch.

        TimeoutError while an earlier owner is still connected; VaultRefused for an epoch that is not the newest."""
        await self.client.register_mapping(None)
        self.cpu_fence.clear()
        self.gpu_fence.clear()
        before, self.client.epoch = self.client.epoch, epoch  # before the answer: its fences come just ahead of it
        try:
            granted = await self.client.link().call(
                lambda n: AcquirePool(n, epoch, geometry, timeout_ms), patience_s(timeout_ms)
            )
        except BaseException:
            self.client.epoch = before
            raise
        assert isinstance(granted, PoolGranted)
        self.geometry = geometry
        return granted.adopt

    async def make(self, index_size: int, page_sizes: list[int]) -> PoolMapping:
        """A fresh pool: index (rounded up) and pages made, mapped writable, handed to the vault."""
        index_size = -(-index_size // self.host.granularity) * self.host.granularity
        index_fd = self.host.create(index_size)
        fds = [index_fd]
        try:
            for size in page_sizes:
                fds.append(self.client.device.create(size))
            sizes = [index_size, *page_sizes]
            await self.client.link().hand_over(
                lambda n, which, last: AddPoolSlabs(n, sizes[which], last), CALL_TIMEOUT_S, fds
            )
            self.mapping = self._map([index_size, *page_sizes], fds, writable=True)
        except BaseException:
            if self.mapping is None:
                close_all(fds)
            raise
        return self.mapping

    async def map(self, *, writable: bool) -> PoolMapping:
        """The pool that is there: for its new owner, or for a standby that keeps it ready."""
        if not writable:
            await self.client.register_mapping(None)
        slabs, fds = await self.client.link().call_for_fds(FetchPool, CALL_TIMEOUT_S)
        try:
            self.mapping = self._map(list(slabs.sizes), fds, writable=writable)
        except BaseException:
            close_all(fds)
            raise
        return self.mapping

    async def quiesce(self) -> None:
        """A planned handover: the device is drained, write access is dropped, and the vault knows it."""
        assert self.client.epoch is not None, "nothing is owned"
        self.client.device.synchronize()
        if self.mapping is not None:
            mapping = self.mapping
            self.host.protect(mapping.index_address, mapping.index_size, writable=False)
            self.client.device.protect(mapping.pages_address, sum(mapping.page_sizes), writable=False)
        epoch = self.client.epoch
        await self.client.link().call(lambda n: Quiesced(n, epoch), CALL_TIMEOUT_S)
        self.client.epoch = None

    def unmap(self) -> None:
        mapping, self.mapping = self.mapping, None
        if mapping is None:
            return
        self.client.device.synchronize()
        pages = sum(mapping.page_sizes)
        self.client.device.unmap(mapping.pages_address, pages)
        self.client.device.release(mapping.pages_address, pages)
        self.host.unmap(mapping.index_address, mapping.index_size)
        self.host.release(mapping.index_address, mapping.index_size)
        close_all(mapping.fds)

    def _map(self, sizes: list[int], fds: list[int], *, writable: bool) -> PoolMapping:
        (index_size, *pages), device = sizes, self.client.device
        index_address = self.host.reserve(index_size)
        self.host.map(index_address, index_size, fds[0], writable=writable)
        pages_address = device.reserve(sum(pages))
        device.map_many(pages_address, list(zip(pages, fds[1:], strict=True)), writable=writable)
        return PoolMapping(index_address, index_size, pages_address, pages, fds)

    async def _give_back(self) -> None:
        """Vault and keeper were lost: the owner hands its pool over again, and goes on owning it."""
        mapping, epoch = self.mapping, self.client.epoch
        if mapping is None or epoch is None:
            return
        sizes = [mapping.index_size, *mapping.page_sizes]
        await self.client.link().hand_over(
            lambda n, which, last: DonatePool(n, epoch, self.geometry, sizes[which], last), CALL_TIMEOUT_S, mapping.fds
        )
