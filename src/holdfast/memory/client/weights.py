"""The client's side of a vault: ask for the weights, write or map them, unmap and remap them. Reconnects by itself
after the vault's death.

Always true:
- Virtual addresses stay the same across unmap and remap.
- No wait is longer than its time-out, and a cancelled wait holds nothing.
- If the vault is lost before a commit, the writer gets `aborted`.
- `on_lost` is called as soon as the vault is lost; everything mapped stays usable.
- A client that maps weights or is registered as a mapper tries to reattach as long as it lives.
- If vault and keeper both died, the client donates what it maps, but never uncommitted weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import SystemRandom

import msgspec

from holdfast.core.ports import SystemClock
from holdfast.core.procfs import boot_id
from holdfast.core.tasks import Tasks, done_within
from holdfast.memory import protocol
from holdfast.memory.client.calls import (
    MemoryLost,
    Notice,
    StaleMemoryLayoutError,
    VaultConnection,
    VaultRefused,
    open_connection,
    patience_s,
)
from holdfast.memory.devices.contract import Device, OutOfMemory
from holdfast.memory.fdsocket import close_all
from holdfast.memory.layout import Layout, TensorSpec, plan

SLAB_BYTES = 1024**3  # the cost of a remap grows with the number of handles, not bytes (facts 5)
CALL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
# Short delays at first, for a vault that its keeper restarts. The later ones are well below the time that a vault waits
# for donations after a total loss (1 s for the pool).
REATTACH_S = (0.0, 0.01, 0.05, 0.1, 0.2)
REMAP_TIMEOUT_MS = 30_000
FAREWELL_S = 2.0  # a killed vault is back within half a second; an engine that ends waits no longer than this

# The answers to `acquire` and `remap`.
RW = "rw"
RO = "ro"
EMPTY = "empty"


@dataclass(slots=True)
class MappedWeights:
    """Weights mapped in this process: one address range with slabs one after the other, reserved from the first mapping
    until `forget`. The descriptors are kept, to donate them if vault and keeper both die."""

    layout: Layout
    address: int
    size: int
    fds: list[int] = field(default_factory=list)
    present: bool = True  # False between unmap and remap
    committed: bool = True  # False while this process still writes them

    def offsets(self) -> list[int]:
        starts, total = [], 0
        for size in self.layout.slab_sizes:
            starts.append(total)
            total += size
        return starts

    def addresses(self) -> dict[str, int]:
        starts = self.offsets()
        return {
            location.name: self.address + starts[location.slab] + location.offset for location in self.layout.tensors
        }

    @property
    def can_be_donated(self) -> bool:
        return self.present and self.committed

    def stale(self, kept: Layout) -> StaleMemoryLayoutError:
        """Return the error for a vault that keeps other weights than were mapped here."""
        return StaleMemoryLayoutError(
            f"the vault keeps {kept.identity} ({kept.hash()}), "
            f"mapped before were {self.layout.identity} ({self.layout.hash()})"
        )

    def drop(self, device: Device) -> None:
        """Unmap; the addresses stay reserved."""
        if self.present:
            device.unmap(self.address, self.size)
        close_all(self.fds)
        self.fds, self.present = [], False

    def forget(self, device: Device) -> None:
        """Unmap and release the addresses."""
        self.drop(device)
        device.release(self.address, self.size)


def map_layout(
    device: Device, layout: Layout, fds: list[int], before: MappedWeights | None, *, writable: bool
) -> MappedWeights:
    """Map a set of slabs; at the addresses of `before` if the slab sizes are the same. Takes the descriptors."""
    total = sum(layout.slab_sizes)
    same = before is not None and not before.present and before.layout.slab_sizes == layout.slab_sizes
    address = before.address if same and before is not None else device.reserve(total)
    try:
        device.map_many(address, list(zip(layout.slab_sizes, fds, strict=True)), writable=writable)
    except BaseException:
        if not same:
            device.release(address, total)
        raise
    if before is not None and not same:
        before.forget(device)
    return MappedWeights(layout, address, total, fds, committed=not writable)


@dataclass(slots=True)
class MemoryClient:
    """Connects one engine process to one vault. Use `connect`."""

    path: str
    device: Device
    engine_id: int
    slab_bytes: int = SLAB_BYTES
    vault_uids: tuple[int, ...] = ()  # users that may run the vault, besides this user and root
    on_lost: Callable[[str], None] = lambda why: None
    on_notice: Callable[[Notice], None] = lambda notice: None
    name: str = field(default_factory=lambda: f"{SystemRandom().getrandbits(64):016x}")
    mapped: MappedWeights | None = None
    load: int = 0  # `Layout.load` of the weights mapped now or last
    epoch: int | None = None
    last_epoch: int = 0  # the largest granted epoch that this process knows of
    on_reattached: Callable[[], Awaitable[None]] | None = None  # donates the pool after a total loss
    registered: bool = False  # as a mapper of the device; survives the connection
    _writing: VaultConnection | None = None  # the connection that holds the write lock; the lock ends with it
    _connection: VaultConnection | None = None
    _attached: asyncio.Event = field(default_factory=asyncio.Event)
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reattaching: Tasks = field(default_factory=lambda: Tasks("vault client"))  # one at a time
    _closed: bool = False

    # -- the connection

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect, if not connected, and make sure that the vault has what is mapped here. Raises ConnectionError,
        TimeoutError or VaultRefused."""
        async with asyncio.timeout(timeout_s), self._opening:
            if self.connected:
                return
            mapped = self.mapped
            held = mapped.layout.hash() if mapped is not None and mapped.can_be_donated else None
            resume = protocol.Resume(held, self.epoch) if held is not None or self.registered else None
            self._attached.clear()
            connection, welcome = await open_connection(
                self.path,
                self.name,
                self.engine_id,
                timeout_s,
                on_notice=self._noticed,
                on_lost=self._lost,
                resume=resume,
                vault_uids=self.vault_uids,
            )
            self._connection = connection
            self.last_epoch = max(self.last_epoch, welcome.pool_epoch)
            try:
                if resume is not None and not welcome.resumed:
                    await self._donate()
            except BaseException:
                connection.close("it could not all be donated")
                raise
            self._attached.set()

    def _noticed(self, notice: Notice) -> None:
        if isinstance(notice, protocol.PoolNews):
            self.last_epoch = max(self.last_epoch, notice.epoch)
        self.on_notice(notice)

    @property
    def connected(self) -> bool:
        """Return True if the vault is connected and knows all that is mapped here."""
        return self._connection is not None and self._connection.open and self._attached.is_set()

    async def until_connected(self, timeout_s: float) -> None:
        """Wait for the running reattachment. Raises ConnectionError if there is none or it takes too long."""
        if self.connected:
            return
        if self._closed or not self._must_reattach:
            raise ConnectionError(f"not connected to the vault at {self.path}")
        if not await done_within(self._attached.wait(), timeout_s):
            raise ConnectionError(f"the vault at {self.path} was not back in {timeout_s:.1f} s")

    @property
    def _must_reattach(self) -> bool:
        return self.registered or (self.mapped is not None and self.mapped.can_be_donated)

    def _lost(self, why: str) -> None:
        if self._closed or self._connection is None:
            return
        self._connection = None
        self._attached.clear()
        self.on_lost(why)
        if self._must_reattach and not len(self._reattaching):
            self._reattaching.spawn(self._reattach(), f"reattach to {self.path}")

    async def _reattach(self) -> None:
        """Reconnect to a restarted vault without unmapping anything. Retries as long as this process lives."""
        tries = 0
        while not self._closed and self._must_reattach and not self.connected:
            await asyncio.sleep(REATTACH_S[min(tries, len(REATTACH_S) - 1)])
            tries += 1
            with contextlib.suppress(OSError, VaultRefused):
                await self.connect()

    async def _donate(self) -> None:
        """Donate weights and pool to a vault that does not have them. If it refuses one, report `MemoryLost`."""
        for give in (self._donate_weights, self._donate_pool):
            try:
                await give()
            except VaultRefused as refused:
                self.on_notice(MemoryLost(f"the vault does not take back what is mapped here: {refused}"))

    async def _donate_weights(self) -> None:
        mapped = self.mapped
        if mapped is not None and mapped.can_be_donated:
            await self.link().send_with_fds(
                lambda n, _, last: protocol.Donate(n, mapped.layout, last), CALL_TIMEOUT_S, mapped.fds
            )

    async def _donate_pool(self) -> None:
        if self.registered:
            await self.register_mapping()
        if self.on_reattached is not None:
            await self.on_reattached()

    def link(self) -> VaultConnection:
        if self._connection is None:
            raise ConnectionError(f"not connected to the vault at {self.path}")
        return self._connection

    async def register_mapping(self, epoch: int | None = None) -> None:
        """Register this process as a mapper of the device: fences wait for it, and it gets the pool's notices."""
        await self.link().call(lambda n: protocol.Mapping(n, epoch), CALL_TIMEOUT_S)
        self.registered = True
        if epoch is not None:
            self.epoch = epoch

    # -- the vault as a whole

    async def status(self) -> bytes:
        """Return the vault's facts, as JSON."""
        return bytes((await self.link().call(protocol.GetStatus, CALL_TIMEOUT_S)).facts)

    async def close(self, farewell_s: float = FAREWELL_S) -> None:
        """Unmap everything and release all locks. Waits up to `farewell_s` for a vault that is restarting: it keeps
        this client as a mapper until the client leaves or its process ends."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            await self._be_heard(farewell_s)
        self._closed = True
        await self._reattaching.stop()
        self._forget_mapping()
        if self._connection is not None:
            self._connection.leave()
            self._connection = None

    async def _be_heard(self, farewell_s: float) -> None:
        """Return when a vault that knows this client as a mapper has answered. Return at once if it is none."""
        async with asyncio.timeout(farewell_s):
            while self._must_reattach:
                await self.until_connected(farewell_s)
                with contextlib.suppress(ConnectionError):
                    await self.status()
                    return

    # -- weights

    @property
    def weights_name(self) -> str:
        """Return a name that exactly those clients share which map the same weights of this vault."""
        folder = os.stat(os.path.dirname(self.path) or ".")
        where = f"{boot_id()[:8]}-{folder.st_dev:x}-{folder.st_ino:x}"
        return f"{self.device.name}/{self.mapped.layout.hash() if self.mapped is not None else '-'}/{where}"

    async def acquire(
        self, mode: str, timeout_ms: int, *, wait_for_writer: bool = False, replace: str | None = None
    ) -> str:
        """Ask for the weights. Return RW (write them, then `commit`), RO (mapped now) or EMPTY. Raises TimeoutError or
        VaultRefused."""
        if self.mapped is not None and not self.mapped.committed:
            self._forget_mapping()  # half-written, and its write lock is lost
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
        """Fetch and map the granted slabs, at the old addresses if there are any. On failure, release the lock."""
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
        """Make slabs, map them writable, and hand them to the vault. Return the address of each tensor to write."""
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
            await self.link().send_with_fds(
                lambda n, which, _: protocol.AddSlabs(n, list(layout.slab_sizes[which])), CALL_TIMEOUT_S, fds
            )
        except BaseException:
            self._forget_mapping()
            raise
        return self.mapped.addresses()

    async def commit(self, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Seal the written weights, let others read them, and return the layout's hash. Raises VaultRefused `aborted`
        if the vault was lost since the write lock was granted: `acquire` and write again."""
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
            link.tell(protocol.ReleaseWeights)  # hold nothing, whether it was committed or not
            raise
        mapped.layout, mapped.committed, self.load = layout, True, load
        return layout.hash()

    async def drop(self, replace: str, timeout_ms: int) -> None:
        """Drop the weights with the hash `replace`, so that others can be written in their place. The vault asks their
        readers to release them. Raises TimeoutError if one does not, VaultRefused if the vault has other weights."""
        answer = await self._ask("drop", timeout_ms, replace=replace)
        assert isinstance(answer, protocol.WeightsEmpty)

    async def release(self) -> None:
        """Unmap the weights and release their lock; the connection stays."""
        self._forget_mapping()
        await self.link().call(protocol.ReleaseWeights, CALL_TIMEOUT_S)

    # -- unmapping and remapping

    async def unmap(self) -> None:
        """Drop the mapping and the lock; the addresses stay reserved."""
        assert self.mapped is not None, "nothing is mapped"
        self.device.synchronize()
        self.mapped.drop(self.device)
        if self.connected:
            await self.link().call(protocol.ReleaseWeights, CALL_TIMEOUT_S)

    async def remap(self, timeout_ms: int = REMAP_TIMEOUT_MS) -> str:
        """Map the same bytes at the same addresses and return RO, or EMPTY if the vault has none. Raises TimeoutError,
        StaleMemoryLayoutError or ConnectionError; never hangs."""
        mapped = self.mapped
        assert mapped is not None, "nothing was mapped before"
        assert not mapped.present, "unmap before remap"
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        try:
            ask = await self._ask(RO, timeout_ms)
        except ConnectionError:  # the connection was lost, perhaps unnoticed while unmapped: a vault may be back
            await self.connect(timeout_ms / 1000)
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
