"""Turns a vault's grant into a KV pool: adopted, newly made, or in memory that ends with the process.

Always true: an adopted pool was mapped before it is touched. If a follower watched this pool, adopting it reads only
what changed since the follower's last poll. A pool that was never formatted is formatted, never adopted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from holdfast.kv.adopt import Follower, Survey, of_new, survey, write_verdicts
from holdfast.kv.geometry import Geometry
from holdfast.kv.index import HEADER_BYTES, Index, index_bytes
from holdfast.kv.pool import Pool
from holdfast.memory.client.pool import Home, PoolClient, PoolMapping, empty_home
from holdfast.memory.devices import view
from holdfast.memory.devices.contract import Device, OutOfMemory
from holdfast.memory.fdsocket import close_all
from holdfast.memory.protocol import PoolGranted

SLAB_BYTES = 1024**3  # as for weights: mapping costs by the handle (facts 5)
# Turns this rank's survey of its index into the survey that all ranks of the engine agree on; waits for every rank.
Agree = Callable[[Survey], Awaitable[Survey]]
FREE_POLL_S = 0.01  # the dead engine's memory comes back within 200 ms of its death (fact 1)


@dataclass(slots=True)
class Owned:
    """A pool owned under an epoch; its pages begin at `pages_address`, its private blocks are at the range's end."""

    pool: Pool
    pages_address: int
    range_bytes: int
    private_at: int  # bytes into the range
    blocks: int = 0  # whole blocks adopted
    reason: str = ""  # why no block was adopted
    adoptions: int = 0  # since the last right canary
    marks: dict[str, float] = field(default_factory=dict)  # monotonic times in seconds, by name


def index_of(mapping: PoolMapping, geometry: Geometry) -> Index | None:
    """Return the mapped index; None if it is too small for this geometry, so another pool's."""
    if mapping.index_size < index_bytes(geometry):
        return None
    return Index(view(mapping.index_address, mapping.index_size, writable=True), geometry)


def followed(mapping: PoolMapping, geometry: Geometry) -> Follower | None:
    index = index_of(mapping, geometry)
    if index is None:
        return None
    follower = Follower(index)
    follower.poll()
    return follower


async def take(
    client: PoolClient,
    geometry: Geometry,
    granted: PoolGranted,
    follower: Follower | None,
    agree: Agree | None = None,
) -> Owned:
    """Return the pool that the vault granted, adopted or new. `agree` is given if there are several ranks."""
    epoch = granted.epoch
    if not granted.adopt:
        return await _new(await _make(client, geometry, epoch), agree)
    if not client.mapped_is(granted.made_epoch):
        await client.map(writable=True)
        follower = None
    mapping = client.mapping
    assert mapping is not None
    index = index_of(mapping, geometry)
    assert index is not None, "the vault takes only this geometry for this pool"
    if not any(index.view[:HEADER_BYTES]):  # its maker died between making and formatting it
        index.format(epoch)
        made = Owned(Pool(index, epoch), *_where(mapping), reason="never formatted")
        return await _new(made, agree)
    found = follower.survey() if follower is not None else survey(index)
    if agree is not None:
        found = await agree(found)
    adoption = follower.adopt(index, epoch, found) if follower is not None else write_verdicts(index, found, epoch)
    pool = Pool(adoption.index, adoption.epoch, adoption=adoption)
    return Owned(pool, *_where(mapping), len(adoption.by_key), adoption.reason, adoption.adoptions)


async def _new(owned: Owned, agree: Agree | None) -> Owned:
    """Return the empty pool; tell the other ranks that the blocks they may have found cannot be used."""
    if agree is not None:
        index, epoch = owned.pool.index, owned.pool.epoch
        found = await agree(survey(index))
        owned.pool = Pool(index, epoch, adoption=of_new(index, found, epoch))
        owned.reason = owned.reason or found.reason
    return owned


def _where(mapping: PoolMapping) -> tuple[int, int, int]:
    return mapping.pages_address, mapping.range_size, mapping.private_at


async def _make(client: PoolClient, geometry: Geometry, epoch: int) -> Owned:
    step = client.client.device.granularity
    needed = client.home.size if client.home is not None else geometry.block_count * geometry.block_bytes
    left = -(-needed // step) * step
    sizes = [SLAB_BYTES] * (left // SLAB_BYTES) + ([left % SLAB_BYTES] if left % SLAB_BYTES else [])
    mapping = await client.make(index_bytes(geometry), sizes)
    index = index_of(mapping, geometry)
    assert index is not None
    index.format(epoch)
    return Owned(Pool(index, epoch), *_where(mapping))


@dataclass(slots=True)
class DirectPool:
    """KV blocks in memory that ends with this process (`--kv direct`): nothing is ever adopted, and the memory must
    first come free."""

    device: Device
    private_bytes: int
    still: asyncio.Lock  # held while the home's mapping changes: a thread may compute there
    _home: Home | None = None  # the fixed address of its memory; None: any address
    _address: int = 0
    _size: int = 0
    _fd: int = -1

    async def take(self, geometry: Geometry, home: Home | None, epoch: int, timeout_s: float) -> Owned:
        """Wait until the device has room, then allocate the pool. TimeoutError says how many bytes are missing."""
        step = self.device.granularity
        pool, self._home = geometry.block_count * geometry.block_bytes, home
        size = home.size if home is not None else -(-(pool + self.private_bytes) // step) * step
        fd = await self._create(size, timeout_s)
        at = home.address if home is not None else self.device.reserve(size)
        self._address, self._size, self._fd = at, size, fd
        if home is None:
            self.device.map(at, size, fd, writable=True)
        else:
            async with self.still:
                self.device.unmap(at, size)
                self.device.map(at, size, fd, writable=True)
        index = Index(bytearray(index_bytes(geometry)), geometry)
        index.format(epoch)
        if home is not None:
            return Owned(Pool(index, epoch), at, size + home.private_size, size)
        return Owned(Pool(index, epoch), at, size, pool)

    async def _create(self, size: int, timeout_s: float) -> int:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            if self.device.free_bytes() >= size:
                try:
                    return self.device.create(size)
                except OutOfMemory:  # another process was quicker
                    pass
            if loop.time() >= deadline_s:
                free = self.device.free_bytes()
                raise TimeoutError(f"{size} bytes for KV did not come free within {timeout_s:g} s: {free} are")
            await asyncio.sleep(FREE_POLL_S)

    def free(self) -> None:
        if self._fd >= 0:
            self.device.unmap(self._address, self._size)
            close_all([self._fd])  # first: `empty_home` may need this memory
            self._fd = -1
            if self._home is None:
                self.device.release(self._address, self._size)
            else:
                empty_home(self.device, self._home)
