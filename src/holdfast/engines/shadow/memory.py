"""What one process of an engine does with its vault: load, stand by ready, own the pool under an epoch, step back.

Always true: while it stands by, the pool that is there is mapped and followed, so that `own` needs nothing but the
vault's word (fact 4a); shared pages are written under an epoch only, and not before the CPU fence; blocks the dead
engine had open stay untouched until the GPU fence (fact 4b). A vault that vanishes ends nothing: what is mapped stays
usable; `memory` tells what cannot be vouched for, and "" once it was verified again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.tasks import Tasks, set_within
from holdfast.engines.shadow.inhabitant import Inhabitant, Peers
from holdfast.engines.shadow.loading import Loader, WeightsPlan
from holdfast.engines.shadow.pool import DirectPool, Owned, followed, take
from holdfast.engines.shadow.takeover import DOUBT_FROM_ADOPTIONS, after_takeover, doubt_weights
from holdfast.kv.follow import Follower
from holdfast.kv.geometry import Geometry
from holdfast.memory.client.calls import MemoryLost, Notice
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.pool_mapping import Home
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.devices.contract import Device
from holdfast.memory.protocol import LetGo, PoolNews, Superseded
from holdfast.spec.engines import Place

FOLLOW_S = 0.05  # what is left to read at adoption is what 50 ms of tokens published: a few dozen entries
CONNECT_S = 30.0  # a supervisor starts vault and engines together; a vault is up in a second

log = logging.getLogger(__name__)


@dataclass(slots=True)
class VaultMemory:
    """Weights and pool of one process. `load`, `stand_by`, then any number of (`own`, `rest`), then `close`."""

    place: Place
    private_bytes: int
    inhabitant: Inhabitant
    lock_dir: Path | None = None  # of the writer lock; None: beside the vault's socket
    peers: Peers | None = None
    geometry: Geometry = field(init=False)  # from `stand_by` on
    device: Device = field(init=False)
    client: MemoryClient = field(init=False)
    pool: PoolClient = field(init=False)
    gpu_fence: asyncio.Event = field(init=False)
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # weights mapped and verified (or asleep)
    owned: Owned | None = None
    asleep: bool = False
    # Held by whoever computes on private memory in a thread, and by whoever moves what is mapped: never both.
    still: asyncio.Lock = field(default_factory=asyncio.Lock)
    _loader: Loader | None = None
    _follower: Follower | None = None
    _direct: DirectPool = field(init=False)
    _beside: Tasks = field(init=False)
    _look: asyncio.Event = field(default_factory=asyncio.Event)  # something is to be done before the next poll
    _pool_changed: bool = False
    _newer: bool = False  # a newer generation of the weights is there
    _lost: bool = False  # the vault was away, and what is mapped was not verified since

    def __post_init__(self) -> None:
        place, told = self.place, self.inhabitant
        self.device = open_device(place.device)
        self.client = MemoryClient(place.vault_socket, self.device, place.engine_id, vault_uids=place.vault_uids)
        self.client.on_lost, self.client.on_notice = self._vault_lost, self._noticed
        self.pool = PoolClient(self.client, open_device("host-0"), self.private_bytes, self._heard, told.fatal)
        self.gpu_fence = self.pool.gpu_fence
        self._direct = DirectPool(self.device, self.private_bytes, self.still)
        self._beside = Tasks("engine", lambda error: told.fatal(f"the memory cannot be kept: {error}"))

    def __repr__(self) -> str:
        what = repr(self.owned.pool) if self.owned is not None else "asleep" if self.asleep else repr(self._follower)
        return f"<memory at {self.place.vault_socket}: {what}>"

    # -- loading

    async def load(self, plan: WeightsPlan) -> None:
        """Weights mapped and verified, by role."""
        self._loader = Loader(self.client, plan, self.lock_dir or Path(self.place.vault_socket).parent, self.place.who)
        await self._loader.connect(CONNECT_S)
        await self._loader.load(self.place.load_s)
        self.settled.set()

    async def stand_by(self, geometry: Geometry, home: Home | None = None) -> None:
        """Beside a pool of this geometry, or ready to make one. Whoever wants it unmapped calls `sleep` next."""
        self.geometry = geometry
        self.pool.settle(home, geometry.block_count * geometry.block_bytes)
        self.pool.geometry = ("direct " if self.place.direct else "") + geometry.hash.hex()
        await self._stand_by()
        self._beside.spawn(self._tend(), "tend")

    async def sleep(self) -> None:
        """Give the mappings up and keep the addresses."""
        async with self._beside.still(self._tend, "tend"), self.still:
            if not self.asleep:
                await self._loaded.let_go()
                await self.client.unmap()
                self._follower = None
                self.pool.unmap()
                self.asleep = True

    async def stand_up(self) -> None:
        """Map again what `sleep` gave up, unless it is to stand by without. Raises as `own` does."""
        if self.asleep and not self.place.unmapped:
            async with self._beside.still(self._tend, "tend"):
                await self._remap()
                await self._stand_by()

    @property
    def _loaded(self) -> Loader:
        assert self._loader is not None, "load first"
        return self._loader

    async def verify(self) -> str:
        """Read all weights that are mapped: what is wrong with them, or nothing."""
        async with self.still:
            return await self._loaded.wrong() if not self.asleep else ""

    async def renew(self) -> None:
        """Load the weights anew, whatever they are now, while it stands by."""
        async with self._beside.still(self._tend, "tend"):
            if self.asleep:
                await self._remap()
            async with self.still:
                await self._loaded.renew(self.place.load_s)

    # -- owning

    async def own(self, epoch: int) -> Owned:
        """Past the CPU fence, with everything mapped. TimeoutError, OSError, VaultRefused, StaleMemoryLayoutError."""
        async with self._beside.still(self._tend, "tend"):
            owned, told = await self._own(epoch), self.inhabitant
            self.owned = owned
            self._beside.spawn(after_takeover(owned.pool, self._fenced, told.books, told.room), "after takeover")
        return owned

    async def _own(self, epoch: int) -> Owned:
        marks: dict[str, float] = {}
        if self.asleep:
            await self._remap()
            marks["remapped"] = time.monotonic()
        elif not self.settled.is_set():  # it was just about to map a newer generation
            self.inhabitant.loading("other weights are being mapped")
            async with self.still:
                await self._loaded.map_current(self.place.load_s)
            self.settled.set()
        granted = await self.pool.acquire(epoch, self.pool.geometry, round(self.place.wake_s * 1000))
        marks["fence"] = time.monotonic()
        follower, self._follower = self._follower, None
        if self.place.direct:
            assert not granted.adopt, "a direct pool is never there"
            owned = await self._direct.take(self.geometry, self.pool.home, epoch, self.place.wake_s)
        else:
            agree = self.peers.agree if self.peers is not None else None
            there = granted.adopt and self.pool.mapped_is(granted.made_epoch)
            async with contextlib.nullcontext() if there else self.still:  # if nothing moves, nothing is waited for
                owned = await take(self.pool, self.geometry, granted, follower, agree)
        marks["adopted"] = time.monotonic()
        if owned.adoptions >= DOUBT_FROM_ADOPTIONS:
            async with self.still:
                await doubt_weights(owned, self._loaded, self.inhabitant.loading, self.place.load_s)
        owned.marks = marks
        return owned

    async def rest(self) -> None:
        """Nothing of this engine writes any more: say so, and stand by again."""
        await self._beside.stop()
        await self.client.until_connected(self.place.wake_s)
        await self.pool.quiesce()
        self.owned = None
        self._direct.free()
        await self._stand_by()
        if self.place.unmapped:
            await self.sleep()
        else:
            self._beside.spawn(self._tend(), "tend")

    async def close(self) -> None:
        await self._beside.stop()
        async with self.still:
            if self._loader is not None:
                await self._loader.let_go()
            self._follower = None
            self.pool.unmap()
            self._direct.free()
            self.pool.leave()
            await self.client.close()

    async def _remap(self) -> None:
        await self._loaded.remap(self.place, self.inhabitant.loading, doubted=self._lost)
        self._lost = self.asleep = False
        if self.pool.mapping is None:
            self.pool.private_only()

    async def _fenced(self) -> None:
        await self.gpu_fence.wait()
        if self.peers is not None:
            await self.peers.fenced()

    # -- standing by

    async def _stand_by(self) -> None:
        """Map the pool that is there, and follow it."""
        async with self.still:
            self._pool_changed, mapping = False, None
            if self.place.direct:
                await self.client.register_mapping(None)
            else:
                mapping = await self.pool.stand_by()
            if mapping is None and (self.pool.mapping is None or self.pool.mapping.made_epoch):
                self._follower = None
                self.pool.private_only()
            self._follower = followed(mapping, self.geometry) if mapping is not None else None

    async def _tend(self) -> None:
        """Until cancelled: what the vault tells, and every now and then a look at what the owner published."""
        self._look.set()
        while True:
            await set_within(self._look, FOLLOW_S if self._follower is not None else None)
            self._look.clear()
            try:
                await self._look_around()
            except ConnectionError:
                self._lost = True  # it is away (again): wait for it
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
        """The vault was away. An owner serves on from what it has mapped; a standby verifies first."""
        while not self.client.connected:
            with contextlib.suppress(ConnectionError):
                await self.client.until_connected(self.place.wake_s)
            await asyncio.sleep(0)
        self._lost = self.asleep  # then it is verified once it is mapped again
        if self.owned is None and not self.asleep:
            self._pool_changed = True
            if self._newer:
                return
            await self._loaded.verify()
        self.inhabitant.memory("")

    async def _renew(self) -> None:
        self._newer = False
        self.settled.clear()
        self.inhabitant.memory("the weights were replaced")
        try:
            async with self.still:
                await self._loaded.map_current(self.place.load_s)
        except ConnectionError:
            self._newer = True
            raise
        self.settled.set()
        self.inhabitant.memory("")

    # -- what the vault tells

    def _vault_lost(self, why: str) -> None:
        self._lost = True
        self._look.set()
        self.inhabitant.memory(f"the vault is gone: {why}")

    def _noticed(self, notice: Notice) -> None:
        if isinstance(notice, Superseded):
            mapped = self.client.mapped
            if mapped is None or notice.by_hash != mapped.layout.hash():
                log.warning("other weights were committed beside ours; ours stay mapped")
                return
        elif isinstance(notice, MemoryLost):
            self.inhabitant.memory(notice.reason)
        elif not isinstance(notice, LetGo) or self.owned is not None:
            return
        self._newer = True
        self._look.set()

    def _heard(self, news: PoolNews) -> None:
        if news.kind == "owner_gone":
            self.inhabitant.owner_gone(news.epoch)
        elif news.kind == "dropped" or (news.kind == "made" and not self.pool.mapped_is(news.epoch)):
            self._pool_changed = True
            self._look.set()
