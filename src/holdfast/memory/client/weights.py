"""An engine's view of a vault: ask for the weights, write or map them, give the mapping up and get it back.

Always true: virtual addresses stay where they were across unmap and remap; no wait is longer than its time-out; a wait
that was cancelled holds nothing; the writer of weights that were not committed is told `aborted` if the vault is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

import msgspec

from holdfast.core.clock import SystemClock
from holdfast.core.procfs import boot_id
from holdfast.memory import protocol
from holdfast.memory.client.attached import CALL_TIMEOUT_S, AttachedClient
from holdfast.memory.client.calls import patience_s
from holdfast.memory.client.mapped import map_layout
from holdfast.memory.devices.contract import OutOfMemory
from holdfast.memory.errors import VaultRefused
from holdfast.memory.fdsocket import close_all
from holdfast.memory.layout import Layout
from holdfast.memory.packing import TensorSpec, plan

REMAP_TIMEOUT_MS = 30_000
FAREWELL_S = 2.0  # a killed vault is back within half a second; an engine that ends is not kept longer than this

# The answers to `acquire` and `remap`.
RW = "rw"
RO = "ro"
EMPTY = "empty"


@dataclass(slots=True)
class MemoryClient(AttachedClient):
    """One engine process at one vault. Use `connect`."""

    # -- the vault as a whole

    async def status(self) -> bytes:
        """The vault's facts, as JSON."""
        return bytes((await self.link().call(protocol.GetStatus, CALL_TIMEOUT_S)).facts)

    async def close(self, farewell_s: float = FAREWELL_S) -> None:
        """Unmap everything and let go of every lock. A vault that is away is waited for, within a bound: what it knows
        of this client counts until the client says otherwise, or its process ends."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            await self._be_heard(farewell_s)
        self._closed = True
        await self._reattaching.stop()
        self._forget_mapping()
        if self._connection is not None:
            self._connection.leave()
            self._connection = None

    async def _be_heard(self, farewell_s: float) -> None:
        """Return when a vault has answered that knows of this client's seat, if it has one."""
        async with asyncio.timeout(farewell_s):
            while self._has_a_seat:
                await self.until_connected(farewell_s)
                with contextlib.suppress(ConnectionError):
                    await self.status()
                    return

    # -- weights

    @property
    def weights_name(self) -> str:
        """Whose weights are mapped, in words: all who map them at this vault say the same, and nobody else does."""
        folder = os.stat(os.path.dirname(self.path) or ".")
        where = f"{boot_id()[:8]}-{folder.st_dev:x}-{folder.st_ino:x}"
        return f"{self.device.name}/{self.mapped.layout.hash() if self.mapped is not None else '-'}/{where}"

    async def acquire(
        self, mode: str, timeout_ms: int, *, wait_for_writer: bool = False, replace: str | None = None
    ) -> str:
        """Ask for the weights: RW (write them, then `commit`), RO (mapped now), or EMPTY. TimeoutError when it takes
        too long, VaultRefused when it may not be."""
        if self.mapped is not None and not self.mapped.committed:
            self._forget_mapping()  # half-written, and the lock it was written under is gone
        ask = await self._ask(mode, timeout_ms, wait_for_writer=wait_for_writer, replace=replace)
        if isinstance(ask, protocol.WeightsEmpty):
            return EMPTY
        if ask.mode == RW:
            self._writing = self.link()
            return RW
        assert ask.layout is not None
        await self._map(ask.layout, CALL_TIMEOUT_S)
        return RO

    async def _ask(
        self, mode: str, timeout_ms: int, *, wait_for_writer: bool = False, replace: str | None = None
    ) -> protocol.WeightsGranted | protocol.WeightsEmpty:
        answer = await self.link().call(
            lambda n: protocol.AskWeights(n, mode, timeout_ms, wait_for_writer, replace), patience_s(timeout_ms)
        )
        assert isinstance(answer, protocol.WeightsGranted | protocol.WeightsEmpty)
        return answer

    async def _map(self, layout: Layout, timeout_s: float) -> None:
        """Fetch the slabs granted and map them, at the old addresses if there were any; else let go of them."""
        link = self.link()
        fds: list[int] = []
        try:
            _, fds = await link.call_for_fds(protocol.FetchSlabs, timeout_s)
            self.mapped = map_layout(self.device, layout, fds, self.mapped, writable=False)
            self.load = layout.load
        except BaseException:
            close_all(fds)
            link.tell(protocol.ReleaseWeights)
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
                lambda n, which, _: protocol.AddSlabs(n, list(layout.slab_sizes[which])), CALL_TIMEOUT_S, fds
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
        load = max(self.load + 1, round(SystemClock().unix_s() * 1000))
        layout = msgspec.structs.replace(mapped.layout, load=load)
        try:
            await link.call(lambda n: protocol.CommitWeights(n, layout), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            link.tell(protocol.ReleaseWeights)  # whether it was committed or not: nothing of it is held
            raise
        mapped.layout, mapped.committed, self.load = layout, True, load
        return layout.hash()

    async def drop(self, replace: str, timeout_ms: int) -> None:
        """The weights of that hash are to go, so that others can be written in their place: returns when nothing is
        here. Their readers are asked to let go; TimeoutError if one does not, VaultRefused if others are here."""
        answer = await self._ask("drop", timeout_ms, replace=replace)
        assert isinstance(answer, protocol.WeightsEmpty)

    async def release(self) -> None:
        """Unmap and let go of the weights; the connection stays."""
        self._forget_mapping()
        await self.link().call(protocol.ReleaseWeights, CALL_TIMEOUT_S)

    # -- giving addresses' contents up, and getting them back

    async def unmap(self) -> None:
        """Drop the mapping and the lock; the addresses stay reserved."""
        assert self.mapped is not None, "nothing is mapped"
        self.device.synchronize()
        self.mapped.drop(self.device)
        if self.connected:
            await self.link().call(protocol.ReleaseWeights, CALL_TIMEOUT_S)

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
        if isinstance(ask, protocol.WeightsEmpty):
            return EMPTY
        assert ask.layout is not None
        if ask.layout.hash() != mapped.layout.hash():
            self.link().tell(protocol.ReleaseWeights)
            raise mapped.stale(ask.layout)
        await self._map(ask.layout, patience_s(round((deadline_s - loop.time()) * 1000)))
        return RO

    def _forget_mapping(self) -> None:
        mapped, self.mapped = self.mapped, None
        if mapped is not None:
            mapped.forget(self.device)
