"""An engine's view of a vault: ask for the weights, write or map them, give the mapping up and get it back.

Always true: virtual addresses stay where they were across unmap and remap; no wait is longer than its time-out; a wait
that was cancelled holds nothing; a lost vault is told at once (`on_lost`) while everything mapped stays usable, and the
client reattaches by itself; when the vault has lost everything, the client gives its descriptors back, but never
weights that were not committed: their writer is told `aborted`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import SystemRandom

from holdfast.memory.calls import Notice, VaultConnection, open_connection, patience_s
from holdfast.memory.devices.contract import Device, OutOfMemory
from holdfast.memory.errors import VaultRefused
from holdfast.memory.fdsocket import close_all
from holdfast.memory.layout import Layout
from holdfast.memory.mapped import Mapped, map_layout
from holdfast.memory.packing import TensorSpec, plan
from holdfast.memory.protocol import (
    AddSlabs,
    AskWeights,
    CommitWeights,
    Donate,
    FetchSlabs,
    GetStatus,
    Mapping,
    MemoryLost,
    ReleaseWeights,
    Resume,
    SumSlab,
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
class MemoryClient:
    """One engine process at one vault. Use `connect`."""

    path: str
    device: Device
    engine_id: int
    slab_bytes: int = SLAB_BYTES
    on_lost: Callable[[str], None] = lambda why: None
    on_notice: Callable[[Notice], None] = lambda notice: None
    name: str = field(default_factory=lambda: f"{SystemRandom().getrandbits(64):016x}")
    mapped: Mapped | None = None
    epoch: int | None = None
    on_reattached: Callable[[], Awaitable[None]] | None = None  # the pool's own way back after a total loss
    _registered: bool = False  # as a mapper of the device
    _writing: VaultConnection | None = None  # the connection the write lock was got on, and ends with
    _connection: VaultConnection | None = None
    _attached: bool = False
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reattaching: asyncio.Task[None] | None = None
    _closed: bool = False

    # -- connection

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Raises ConnectionError, TimeoutError or VaultRefused."""
        await self._open(timeout_s)

    async def _open(self, timeout_s: float) -> None:
        """Connect, unless that is so already, and see that the vault has what is mapped here."""
        async with asyncio.timeout(timeout_s), self._opening:
            if self.connected:
                return
            mapped = self.mapped
            held = mapped.layout.hash() if mapped is not None and mapped.can_be_given_back else None
            resume = Resume(held, self.epoch) if held is not None or self._registered else None
            self._attached = False
            connection, welcome = await open_connection(
                self.path, self.name, self.engine_id, timeout_s, lambda n: self.on_notice(n), self._lost, resume
            )
            self._connection = connection
            try:
                if resume is not None and not welcome.resumed:
                    await self._give_back()
            except BaseException:
                connection.close("it could not all be given back")
                raise
            self._attached = True

    @property
    def connected(self) -> bool:
        """And all that is mapped here known to the vault."""
        return self._connection is not None and self._connection.open and self._attached

    @property
    def _has_a_seat(self) -> bool:
        return self._registered or (self.mapped is not None and self.mapped.can_be_given_back)

    def _lost(self, why: str) -> None:
        if self._closed or self._connection is None:
            return
        self._connection = None
        self.on_lost(why)
        if self._has_a_seat and (self._reattaching is None or self._reattaching.done()):
            self._reattaching = asyncio.get_running_loop().create_task(self._reattach())

    async def _reattach(self) -> None:
        """Come back to a restarted vault without unmapping anything; bounded only by this process's life."""
        tries = 0
        while not self._closed and self._has_a_seat and not self.connected:
            await asyncio.sleep(REATTACH_S[min(tries, len(REATTACH_S) - 1)])
            tries += 1
            with contextlib.suppress(OSError, VaultRefused):
                await self._open(CONNECT_TIMEOUT_S)

    async def _give_back(self) -> None:
        """The vault does not have what is mapped here: hand it over, part by part; what it refuses is lost to it."""
        for give in (self._give_weights_back, self._give_pool_back):
            try:
                await give()
            except VaultRefused as refused:
                self.on_notice(MemoryLost(f"the vault does not take back what is mapped here: {refused}"))

    async def _give_weights_back(self) -> None:
        mapped = self.mapped
        if mapped is not None and mapped.can_be_given_back:
            await self.link().hand_over(lambda n, _, last: Donate(n, mapped.layout, last), CALL_TIMEOUT_S, mapped.fds)

    async def _give_pool_back(self) -> None:
        if self._registered:
            await self.link().call(lambda n: Mapping(n, None), CALL_TIMEOUT_S)
        if self.on_reattached is not None:
            await self.on_reattached()

    def link(self) -> VaultConnection:
        if self._connection is None:
            raise ConnectionError(f"not connected to the vault at {self.path}")
        return self._connection

    async def status(self) -> bytes:
        """The vault's facts, as JSON."""
        return bytes((await self.link().call(GetStatus, CALL_TIMEOUT_S)).facts)

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
        if self.mapped is not None and not self.mapped.committed:
            self._forget_mapping()  # half-written, and the lock it was written under is gone
        ask = await self._ask(mode, timeout_ms, wait_for_writer=wait_for_writer, replace=replace)
        if isinstance(ask, WeightsEmpty):
            return EMPTY
        if ask.mode == RW:
            self._writing = self.link()
            return RW
        assert ask.layout is not None
        await self._map(ask.layout, CALL_TIMEOUT_S)
        return RO

    async def _ask(
        self, mode: str, timeout_ms: int, *, wait_for_writer: bool = False, replace: str | None = None
    ) -> WeightsGranted | WeightsEmpty:
        answer = await self.link().call(
            lambda n: AskWeights(n, mode, timeout_ms, wait_for_writer, replace), patience_s(timeout_ms)
        )
        assert isinstance(answer, WeightsGranted | WeightsEmpty)
        return answer

    async def _map(self, layout: Layout, timeout_s: float) -> None:
        """Fetch the slabs granted and map them, at the old addresses if there were any; else let go of them."""
        link = self.link()
        fds: list[int] = []
        try:
            _, fds = await link.call_for_fds(FetchSlabs, timeout_s)
            self.mapped = map_layout(self.device, layout, fds, self.mapped, writable=False)
        except BaseException:
            close_all(fds)
            link.tell(ReleaseWeights)
            raise

    async def allocate(
        self, specs: list[TensorSpec], identity: str, meta: dict[str, str] | None = None
    ) -> dict[str, int]:
        """The writer's memory: slabs made, mapped writable, handed to the vault; where each tensor is to be written."""
        layout = plan(specs, self.slab_bytes, self.device.granularity, identity, meta)
        total, free = sum(layout.slab_sizes), self.device.free_bytes()
        if total > free:
            raise OutOfMemory(f"the weights take {total} bytes, {free} are free", "free memory or use fewer bits")
        fds: list[int] = []
        try:
            for size in layout.slab_sizes:
                fds.append(self.device.create(size))
            self.mapped = map_layout(self.device, layout, fds, self.mapped, writable=True)
        except BaseException:
            close_all(fds)
            raise
        try:
            await self.link().hand_over(
                lambda n, which, _: AddSlabs(n, list(layout.slab_sizes[which])), CALL_TIMEOUT_S, fds
            )
        except BaseException:
            self._forget_mapping()
            raise
        return self.mapped.addresses()

    async def commit(self, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Everything is written: seal it and let others read. The layout's hash. VaultRefused `aborted` if the vault
        was lost since the write lock was got: `acquire` and write again."""
        mapped = self.mapped
        if mapped is None or mapped.committed or self._writing is not self._connection or self._writing is None:
            raise VaultRefused("aborted", "the write lock this was written under is gone: nothing to commit")
        self.device.synchronize()
        self.device.protect(mapped.address, mapped.size, writable=False)
        link = self.link()
        try:
            await link.call(lambda n: CommitWeights(n, mapped.layout), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            link.tell(ReleaseWeights)  # whether it was committed or not: nothing of it is held
            raise
        mapped.committed = True
        return mapped.layout.hash()

    async def slab_checksum(self, slab: int) -> str:
        """Of one slab of the weights this client reads, as the vault itself reads it."""
        return str((await self.link().call(lambda n: SumSlab(n, slab), CALL_TIMEOUT_S)).digest)

    async def release(self) -> None:
        """Unmap and let go of the weights; the connection stays."""
        self._forget_mapping()
        await self.link().call(ReleaseWeights, CALL_TIMEOUT_S)

    # -- giving addresses' contents up, and getting them back

    async def unmap(self) -> None:
        """Drop the mapping and the lock; the addresses stay reserved."""
        assert self.mapped is not None, "nothing is mapped"
        self.device.synchronize()
        self.mapped.drop(self.device)
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
        try:
            ask = await self._ask(RO, timeout_ms)
        except ConnectionError:  # lost before, or while it slept without noticing: there may be a vault again
            await self._open(timeout_ms / 1000)
            ask = await self._ask(RO, max(0, round((deadline_s - loop.time()) * 1000)))
        if isinstance(ask, WeightsEmpty):
            return EMPTY
        assert ask.layout is not None
        if ask.layout.hash() != mapped.layout.hash():
            self.link().tell(ReleaseWeights)
            raise mapped.stale(ask.layout)
        await self._map(mapped.layout, patience_s(round((deadline_s - loop.time()) * 1000)))
        return RO

    async def register_mapping(self, epoch: int | None = None) -> None:
        """Say that this process maps the device's pages: the fences count it from now on."""
        await self.link().call(lambda n: Mapping(n, epoch), CALL_TIMEOUT_S)
        self._registered = True
        if epoch is not None:
            self.epoch = epoch

    def _forget_mapping(self) -> None:
        mapped, self.mapped = self.mapped, None
        if mapped is not None:
            mapped.forget(self.device)
