"""The vault memory of one process of an engine: load, stand by, own the pool under an epoch, become a standby again.

Always true:
- A standby has the existing pool mapped and follows it, so that `own` needs only the vault's grant (fact 4a).
- Shared pages are written only under an epoch, and only after the CPU fence.
- Blocks that the dead engine had open stay untouched until the GPU fence (fact 4b). A stream that waits for a block
  because of a takeover waits a bounded time, even without the fence.
- The pool's bookkeeping changes only while `books` is held.
- No number of engine deaths makes the next takeover impossible.
- If the vault vanishes, mapped memory stays usable. `memory` reports why it may be damaged, and "" when it was verified
  again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from holdfast.core.tasks import Tasks, done_within
from holdfast.engines.host.loading import Loader, WeightsPlan
from holdfast.engines.host.pool import DirectPool, Owned, followed, take
from holdfast.kv.adopt import Follower, Survey
from holdfast.kv.geometry import Geometry
from holdfast.kv.pool import Pool
from holdfast.memory.client.calls import MemoryLost, Notice, VaultRefused
from holdfast.memory.client.pool import Home, PoolClient
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.devices.contract import Device
from holdfast.memory.protocol import DROPPED, MADE, OWNER_GONE, LetGo, PoolNews, Superseded
from holdfast.spec.engines import FailoverSettings

FOLLOW_S = 0.05  # an adoption then reads only what 50 ms of tokens published: a few dozen entries
CONNECT_S = 30.0  # a supervisor starts vault and engines together; a vault is up in a second
# The first death may be an accident, after the second the pool is emptied, after the third the weights are suspect.
DOUBT_FROM_ADOPTIONS = 3
# The slowest GPU fence of a killed engine took 0.2 s (an H200 with 120 GiB mapped). After that, waiting for room costs
# a stream more than recomputing an evicted block.
FENCE_PATIENCE_S = 0.25
AWAITED_S = 60.0  # twice as long as frontends hold streams: later, a stream's blocks may have been evicted


log = logging.getLogger(__name__)


async def after_takeover(
    pool: Pool,
    fenced: Callable[[], Coroutine[None, None, None]],
    books: AbstractContextManager[object],
    on_room: Callable[[], None],
) -> None:
    """Free quarantined blocks after the GPU fence, never before (fact 4b). `fenced()` returns at the GPU fence. Call
    `on_room` when requests that wait for blocks should be retried."""
    async with asyncio.TaskGroup() as tasks:
        fence = tasks.create_task(fenced())
        await asyncio.wait([fence], timeout=FENCE_PATIENCE_S)
        if not fence.done():
            with books:
                pool.fence_is_late()
            on_room()
    with books:
        came = pool.gpu_fence_passed()
    if came:
        on_room()
    await asyncio.sleep(AWAITED_S)
    with books:
        pool.streams_resumed()


class MemoryHolder(Protocol):
    """The engine or rank that holds this memory; called in the event loop. `books` is the lock of its bookkeeping."""

    @property
    def books(self) -> AbstractContextManager[object]: ...

    def fatal(self, why: str) -> None: ...

    def owner_gone(self, epoch: int) -> None: ...

    def memory(self, why: str) -> None: ...

    def loading(self, why: str) -> None:
        """Report that a wake must load weights, for `load_s` at most."""

    def room(self) -> None:
        """Report that blocks came free at the GPU fence, or that spared blocks may now be used."""


class Peers(Protocol):
    async def agree(self, found: Survey) -> Survey:
        """Return what all ranks agree to adopt, given this rank's survey."""

    async def fenced(self) -> None:
        """Wait for the GPU fence of every rank."""


@dataclass(slots=True)
class VaultMemory:
    """The weights and the pool of one process: `load`, `stand_by`, any number of (`own`, `become_standby`), `close`."""

    failover: FailoverSettings
    private_bytes: int
    holder: MemoryHolder
    lock_dir: Path | None = None  # of the writer lock; None: beside the vault's socket
    peers: Peers | None = None
    geometry: Geometry = field(init=False)  # from `stand_by` on
    device: Device = field(init=False)
    client: MemoryClient = field(init=False)
    pool: PoolClient = field(init=False)
    gpu_fence: asyncio.Event = field(init=False)
    weights_ready: asyncio.Event = field(default_factory=asyncio.Event)  # weights mapped and verified (or asleep)
    owned: Owned | None = None
    asleep: bool = False
    # Held while a thread computes on private memory, and while mappings change: never both.
    still: asyncio.Lock = field(default_factory=asyncio.Lock)
    _loader: Loader | None = None
    _follower: Follower | None = None
    _direct: DirectPool = field(init=False)
    _beside: Tasks = field(init=False)
    _look: asyncio.Event = field(default_factory=asyncio.Event)  # there is work before the next poll
    _pool_changed: bool = False
    _newer: bool = False  # the vault has a newer generation of the weights
    _lost: bool = False  # the vault was away, and the mapped memory was not verified since

    def __post_init__(self) -> None:
        failover, told = self.failover, self.holder
        self.device = open_device(failover.device)
        self.client = MemoryClient(
            failover.vault_socket, self.device, failover.engine_id, vault_uids=failover.vault_uids
        )
        self.client.on_lost, self.client.on_notice = self._vault_lost, self._on_notice
        self.pool = PoolClient(self.client, open_device("host-0"), self.private_bytes, self._on_pool_news, told.fatal)
        self.gpu_fence = self.pool.gpu_fence
        self._direct = DirectPool(self.device, self.private_bytes, self.still)
        self._beside = Tasks("engine", lambda error: told.fatal(f"the memory cannot be kept: {error}"))

    def __repr__(self) -> str:
        what = repr(self.owned.pool) if self.owned is not None else "asleep" if self.asleep else repr(self._follower)
        return f"<memory at {self.failover.vault_socket}: {what}>"

    # -- loading

    async def load(self, plan: WeightsPlan) -> None:
        self._loader = Loader(
            self.client, plan, self.lock_dir or Path(self.failover.vault_socket).parent, self.failover.engine_name
        )
        await self._loader.connect(CONNECT_S)
        await self._loader.load(self.failover.load_s)
        self.weights_ready.set()

    async def stand_by(self, geometry: Geometry, home: Home | None = None) -> None:
        """Stand by for a pool of this geometry: follow it, or be ready to make one."""
        self.geometry = geometry
        self.pool.set_home(home, geometry.block_count * geometry.block_bytes)
        self.pool.geometry = ("direct " if self.failover.direct else "") + geometry.hash.hex()
        await self._stand_by()
        self._beside.spawn(self._tend(), "tend")

    async def unmap(self) -> None:
        """Remove the mappings, keep the addresses."""
        async with self._beside.still(self._tend, "tend"), self.still:
            if not self.asleep:
                await self._loaded.stop_using()
                await self.client.unmap()
                self._follower = None
                self.pool.unmap()
                self.asleep = True

    async def remap(self) -> None:
        """Map again what `unmap` unmapped, unless this engine stands by unmapped. Raises as `own` does."""
        if self.asleep and not self.failover.unmapped:
            async with self._beside.still(self._tend, "tend"):
                await self._remap()
                await self._stand_by()

    def join(self, peers: Peers) -> None:
        """Make this the memory of one rank of several: the ranks agree on which blocks of their pools to adopt.

        If a vault restarts empty, an engine that owns its pools gives its mapped memory back to the vault, then ends:
        its standby continues from that memory. A standby verifies its memory and stays."""
        self.peers = peers
        give_back = self.client.on_reattached
        assert give_back is not None, "a pool gives its memory back after the vault was away"
        why = f"the vault at {self.failover.vault_socket} was restarted empty"

        async def reattached() -> None:
            try:
                await give_back()
            except VaultRefused as refused:
                if self.owned is not None:
                    self.holder.fatal(f"{why}, and takes nothing back: {refused}")
                raise
            if self.owned is not None:
                self.holder.fatal(f"{why}; it has back what was mapped here")

        self.client.on_reattached = reattached

    @property
    def _loaded(self) -> Loader:
        assert self._loader is not None, "load first"
        return self._loader

    async def verify(self) -> str:
        """Read all mapped weights; return what is wrong with them, or ""."""
        async with self.still:
            return await self._loaded.wrong() if not self.asleep else ""

    async def renew(self) -> None:
        async with self._beside.still(self._tend, "tend"):
            if self.asleep:
                await self._remap()
            async with self.still:
                await self._loaded.renew(self.failover.load_s)

    # -- owning

    async def own(self, epoch: int) -> Owned:
        """Become the pool's owner; return past the CPU fence, with everything mapped. Raise TimeoutError, OSError,
        VaultRefused or StaleMemoryLayoutError."""
        async with self._beside.still(self._tend, "tend"):
            owned, told = await self._own(epoch), self.holder
            self.owned = owned
            self._beside.spawn(after_takeover(owned.pool, self._fenced, told.books, told.room), "after takeover")
        return owned

    async def _own(self, epoch: int) -> Owned:
        marks: dict[str, float] = {}
        if self.asleep:
            await self._remap()
            marks["remapped"] = time.monotonic()
        elif not self.weights_ready.is_set():  # it was mapping a newer generation
            self.holder.loading("other weights are being mapped")
            async with self.still:
                await self._loaded.map_current(self.failover.load_s)
            self.weights_ready.set()
        granted = await self.pool.acquire(epoch, self.pool.geometry, round(self.failover.wake_s * 1000))
        marks["fence"] = time.monotonic()
        follower, self._follower = self._follower, None
        if self.failover.direct:
            assert not granted.adopt, "a direct pool is never there"
            owned = await self._direct.take(self.geometry, self.pool.home, epoch, self.failover.wake_s)
        else:
            agree = self.peers.agree if self.peers is not None else None
            there = granted.adopt and self.pool.mapped_is(granted.made_epoch)
            async with contextlib.nullcontext() if there else self.still:  # no mapping changes: no lock needed
                owned = await take(self.pool, self.geometry, granted, follower, agree)
        marks["adopted"] = time.monotonic()
        if owned.adoptions >= DOUBT_FROM_ADOPTIONS:
            log.warning("adopted %d times without a canary: the weights are verified", owned.adoptions)
            self.holder.loading("the weights are verified, and loaded again if they are damaged")
            async with self.still:
                await self._loaded.repair(self.failover.load_s)
            # The pool is empty and the weights are right: reset the count of adoptions, so that earlier deaths do not
            # count against the next engine.
            owned.pool.canary_passed()
        owned.marks = marks
        return owned

    async def become_standby(self) -> None:
        """Tell the vault that this engine stopped writing, and stand by again."""
        await self._beside.stop()
        await self.client.until_connected(self.failover.wake_s)
        await self.pool.quiesce()
        self.owned = None
        self._direct.free()
        await self._stand_by()
        if self.failover.unmapped:
            await self.unmap()
        else:
            self._beside.spawn(self._tend(), "tend")

    async def close(self) -> None:
        await self._beside.stop()
        async with self.still:
            if self._loader is not None:
                await self._loader.stop_using()
            self._follower = None
            self.pool.unmap()
            self._direct.free()
            self.pool.leave()
            await self.client.close()

    async def _remap(self) -> None:
        await self._loaded.remap(self.failover, self.holder.loading, doubted=self._lost)
        self._lost = self.asleep = False
        if self.pool.mapping is None:
            self.pool.private_only()

    async def _fenced(self) -> None:
        await self.gpu_fence.wait()
        if self.peers is not None:
            await self.peers.fenced()

    # -- standing by

    async def _stand_by(self) -> None:
        async with self.still:
            self._pool_changed, mapping = False, None
            if self.failover.direct:
                await self.client.register_mapping(None)
            else:
                mapping = await self.pool.stand_by()
            if mapping is None and (self.pool.mapping is None or self.pool.mapping.made_epoch):
                self._follower = None
                self.pool.private_only()
            self._follower = followed(mapping, self.geometry) if mapping is not None else None

    async def _tend(self) -> None:
        """Handle the vault's notices, and read what the owner published every FOLLOW_S, until cancelled."""
        self._look.set()
        while True:
            await done_within(self._look.wait(), FOLLOW_S if self._follower is not None else None)
            self._look.clear()
            try:
                await self._look_around()
            except ConnectionError:
                self._lost = True  # the vault is away (again): wait for it
                self._look.set()

    async def _look_around(self) -> None:
        if self._lost:
            await self._come_back()
        if self.owned is not None or self.asleep:
            return
        if self._newer:
            await self._renew()
        if self._pool_changed:
            await self._stand_by()
        if self._follower is not None:
            self._follower.poll()

    async def _come_back(self) -> None:
        """Wait for the vault to come back. An owner keeps serving from its mapped memory; a standby verifies it."""
        while not self.client.connected:
            with contextlib.suppress(ConnectionError):
                await self.client.until_connected(self.failover.wake_s)
            await asyncio.sleep(0)
        self._lost = self.asleep  # an unmapped engine verifies when it maps again
        if self.owned is None and not self.asleep:
            self._pool_changed = True
            if self._newer:
                return
            await self._loaded.verify()
        self.holder.memory("")

    async def _renew(self) -> None:
        self._newer = False
        self.weights_ready.clear()
        self.holder.memory("the weights were replaced")
        try:
            async with self.still:
                await self._loaded.map_current(self.failover.load_s)
        except ConnectionError:
            self._newer = True
            raise
        self.weights_ready.set()
        self.holder.memory("")

    # -- what the vault tells

    def _vault_lost(self, why: str) -> None:
        self._lost = True
        self._look.set()
        self.holder.memory(f"the vault is gone: {why}")

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, Superseded):
            mapped = self.client.mapped
            if mapped is None or notice.by_hash != mapped.layout.hash():
                log.warning("other weights were committed beside ours; ours stay mapped")
                return
        elif isinstance(notice, MemoryLost):
            self.holder.memory(notice.reason)
        elif not isinstance(notice, LetGo) or self.owned is not None:
            return
        self._newer = True
        self._look.set()

    def _on_pool_news(self, news: PoolNews) -> None:
        if news.kind == OWNER_GONE:
            self.holder.owner_gone(news.epoch)
        elif news.kind == DROPPED or (news.kind == MADE and not self.pool.mapped_is(news.epoch)):
            self._pool_changed = True
            self._look.set()
