"""The client's side of the KV pool: map it as a standby, own it under an epoch, make or adopt its pages, hand it over.

Always true:
- Pages and index are mapped before the engine touches them, and stay at their addresses while mapped.
- Only the owner writes.
- The vault reports the fences; the client never infers them from time.

A standby maps the same pages read-only, or writable but untouched, because changing access later costs too much (fact
4a). A pool is identified by the epoch it was made under. If that matches, a standby needs no call between grant and
use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.memory import protocol
from holdfast.memory.client.calls import Notice, VaultRefused, patience_s
from holdfast.memory.client.weights import CALL_TIMEOUT_S, MemoryClient
from holdfast.memory.devices.contract import Device, DeviceError
from holdfast.memory.fdsocket import close_all

# The pages are mapped in one address range that ends in a private slab. An engine whose addresses must not change (GPU
# graphs, tensors that cannot move) gives the pages a *home*: a fixed range where every pool is mapped. A permanent
# private slab follows it; or, while there is no pool, scratch memory is mapped in the pages' place.
#
# Always true: only this process uses the private slab; it is writable and never handed to the vault. Without a home it
# belongs to one mapping of the pool: each new mapping has a new private slab, at another address. While there is no
# pool, the private slab is mapped alone, so that warm-up and canaries always have somewhere to write.


@dataclass(slots=True)
class PoolMapping:
    """The pool as mapped in this process. The index is in host memory on every device."""

    index_address: int
    index_size: int
    pages_address: int
    page_sizes: list[int]
    fds: list[int]  # of index and pages
    made_epoch: int = 0  # identifies the pool; 0: no pool, only the private slab is mapped
    private_address: int = 0
    private_size: int = 0
    writable: bool = True  # access to index and pages; the private slab is always writable

    @property
    def private_at(self) -> int:
        """Return the private slab's offset in the range: the end of the pages (in a home, of their reserved range)."""
        return self.private_address - self.pages_address if self.private_size else sum(self.page_sizes)

    @property
    def range_size(self) -> int:
        return self.private_at + self.private_size


@dataclass(frozen=True, slots=True)
class Home:
    """A reserved range of the pages' size where every pool is mapped.

    A private slab of `private_size` follows it, mapped as long as the home exists. If there is none, `own` are the
    parts (offset and size, in order) in which the engine computes while there is no pool."""

    address: int
    size: int
    own: tuple[tuple[int, int], ...] = ()
    private_size: int = 0

    @property
    def private_address(self) -> int:
        return self.address + self.size


def make_home(device: Device, pages_bytes: int, private_bytes: int) -> Home:
    """Reserve a home with a private slab behind it."""
    size, private_size = (-(-one // device.granularity) * device.granularity for one in (pages_bytes, private_bytes))
    home = Home(device.reserve(size + private_size), size, private_size=private_size)
    try:
        _map_new(device, home.private_address, private_size)
    except BaseException:
        device.release(home.address, size + private_size)
        raise
    return home


def leave_home(device: Device, home: Home) -> None:
    """Unmap and release a home that is no longer used and has no pool mapped."""
    device.unmap(home.address, home.size + home.private_size)
    device.release(home.address, home.size + home.private_size)


def empty_home(device: Device, home: Home) -> None:
    """Map memory in the range while there is no pool: a driver looks up the mapping of a range's first byte."""
    if home.private_size:
        _map_new(device, home.address, device.granularity)
    else:
        device.scratch(home.address, home.size, home.own)


def _map_new(device: Device, address: int, size: int) -> None:
    fd = device.create(size)
    try:
        device.map(address, size, fd, writable=True)
    finally:
        close_all([fd])  # the mapping keeps the slab alive


@dataclass(slots=True)
class PoolMapper:
    host: Device
    device: Device
    private_bytes: int = 0
    home: Home | None = None

    def map(self, sizes: Sequence[int], fds: list[int], made_epoch: int, *, writable: bool) -> PoolMapping:
        """Map the whole pool or nothing; the mapping takes the descriptors. Without sizes, map only the private
        slab."""
        index_size, pages = (sizes[0], list(sizes[1:])) if sizes else (0, [])
        private_size = -(-self.private_bytes // self.device.granularity) * self.device.granularity
        if self.home is not None:
            private_size = self.home.private_size
        mapping = PoolMapping(0, index_size, 0, pages, fds, made_epoch, 0, private_size, writable)
        try:
            if index_size:
                mapping.index_address = self.host.reserve(index_size)
                self.host.map(mapping.index_address, index_size, fds[0], writable=writable)
            if self.home is not None:
                if pages and sum(pages) != self.home.size:
                    raise DeviceError(f"the pool has {sum(pages)} bytes of pages, this engine's are {self.home.size}")
                self.device.unmap(self.home.address, self.home.size)
                if not pages:
                    empty_home(self.device, self.home)
                mapping.pages_address, mapping.private_address = self.home.address, self.home.private_address
            elif whole := sum(pages) + private_size:
                mapping.pages_address = self.device.reserve(whole)
            if pages:
                self.device.map_many(mapping.pages_address, list(zip(pages, fds[1:], strict=True)), writable=writable)
            if private_size and self.home is None:
                mapping.private_address = mapping.pages_address + sum(pages)
                _map_new(self.device, mapping.private_address, private_size)
        except BaseException:
            self._drop(mapping)
            raise
        return mapping

    def protect(self, mapping: PoolMapping, *, writable: bool) -> None:
        """Set the access of index and pages, if it differs."""
        if mapping.writable is writable or not mapping.made_epoch:
            return
        self.host.protect(mapping.index_address, mapping.index_size, writable=writable)
        self.device.protect(mapping.pages_address, sum(mapping.page_sizes), writable=writable)
        mapping.writable = writable

    def unmap(self, mapping: PoolMapping) -> None:
        self.device.synchronize()
        self._drop(mapping)
        close_all(mapping.fds)

    def _drop(self, mapping: PoolMapping) -> None:
        if mapping.pages_address:
            size = self.home.size if self.home is not None else sum(mapping.page_sizes) + mapping.private_size
            self.device.unmap(mapping.pages_address, size)
            if self.home is None:
                self.device.release(mapping.pages_address, size)
        if mapping.index_address:
            self.host.unmap(mapping.index_address, mapping.index_size)
            self.host.release(mapping.index_address, mapping.index_size)


__all__ = ["PoolClient", "PoolMapping"]


@dataclass(slots=True)
class PoolClient:
    """The pool part of a `MemoryClient`. `host` maps the index, the client's device maps the pages."""

    client: MemoryClient
    host: Device
    private_bytes: int = 0  # minimum size of the private slab behind the pages
    # Called with a hint, on the event loop; must not raise or block.
    on_news: Callable[[protocol.PoolNews], None] = lambda news: None
    on_deposed: Callable[[str], None] = lambda why: None  # another owner may write now: store nothing more
    home: Home | None = None  # where the pages are always mapped
    mapping: PoolMapping | None = None
    cpu_fence: asyncio.Event = field(default_factory=asyncio.Event)
    gpu_fence: asyncio.Event = field(default_factory=asyncio.Event)
    geometry: str = ""  # of the owned pool; with a home, of every pool mapped there
    granted: protocol.PoolGranted | None = None  # the grant, while this process owns the pool
    _made: Home | None = None  # the home, if this object made it

    def __post_init__(self) -> None:
        before = self.client.on_notice

        def noticed(notice: Notice) -> None:
            if isinstance(notice, protocol.Fence) and notice.epoch == self.client.epoch:
                (self.cpu_fence if notice.kind == "cpu" else self.gpu_fence).set()
            elif isinstance(notice, protocol.PoolNews):
                if notice.kind == protocol.GRANTED:
                    self._if_deposed(notice.epoch - 1, f"epoch {notice.epoch} owns the pool now")
                self.on_news(notice)
            elif isinstance(notice, protocol.Deposed):
                self._if_deposed(notice.epoch, notice.reason)
            before(notice)

        self.client.on_notice = noticed
        self.client.on_reattached = self._donate

    def _if_deposed(self, epoch: int, why: str) -> None:
        """Call `on_deposed` if this process owned the pool under `epoch` or an earlier one."""
        if self.granted is not None and self.granted.epoch <= epoch:
            self.on_deposed(f"deposed: {why}")

    def set_home(self, home: Home | None, pages_bytes: int) -> None:
        """Set where pools of `pages_bytes` are mapped from now on: in the engine's `home`, or, if there is private
        memory, in a home made here."""
        if home is None and self.private_bytes:
            home = self._made = make_home(self.client.device, pages_bytes, self.private_bytes)
        self.home = home

    def leave(self) -> None:
        """Release the home made here, with its private slab. No pool may be mapped."""
        if self._made is not None:
            leave_home(self.client.device, self._made)
            self.home = self._made = None

    @property
    def _mapper(self) -> PoolMapper:
        return PoolMapper(self.host, self.client.device, self.private_bytes, self.home)

    # -- standing by

    async def stand_by(self) -> PoolMapping | None:
        """Register as a mapper, which brings the pool's notices, and map the current pool: writable, but untouched
        until it is granted. Return None if there is no pool; an older mapping then stays. Call again when a notice
        reports another pool (`made` under an epoch that is not `mapped_is`)."""
        await self._register()
        try:
            return await self._fetch(writable=True)
        except VaultRefused as refused:
            if refused.code != "absent":
                raise
            return None

    def private_only(self) -> PoolMapping:
        """Map only the private slab, until a pool is made or mapped. For a client that found no pool."""
        self.unmap()
        self.mapping = self._mapper.map([], [], 0, writable=True)
        return self.mapping

    def mapped_is(self, made_epoch: int) -> bool:
        return self.mapping is not None and self.mapping.made_epoch == made_epoch > 0

    async def _register(self) -> None:
        if not self.client.registered:
            await self.client.register_mapping(None)

    # -- owning

    async def acquire(self, epoch: int, geometry: str, timeout_ms: int) -> protocol.PoolGranted:
        """Become the owner: of the existing pool (`adopt`, made under `made_epoch`), or of one that the caller must
        make. Returns after the CPU fence of every earlier epoch. If the pool is mapped here, it is then writable.

        Waits for a vault that is restarting. Raises:
        - TimeoutError if an earlier owner is still connected
        - ConnectionError if the vault was not back in time, or died before it answered (then ask with a newer epoch)
        - VaultRefused if the epoch is not the newest"""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        self.cpu_fence.clear()
        self.gpu_fence.clear()
        lost: ConnectionError | None = None
        while True:  # at the deadline, the first wait below or the vault ends the loop
            await self.client.until_connected(deadline_s - loop.time())
            if lost is not None and self.client.last_epoch >= epoch:
                raise lost  # the vault gave up the grant, if any: this client did not know of it
            try:
                await self._register()
                granted = await self._ask(epoch, geometry, round((deadline_s - loop.time()) * 1000))
                break
            except ConnectionError as error:
                lost = error
        self.client.last_epoch = max(self.client.last_epoch, epoch)
        self.geometry, self.granted = geometry, granted
        if self.mapping is not None and self.mapped_is(granted.made_epoch):
            self._mapper.protect(self.mapping, writable=True)  # changes nothing, unless `quiesce` made it read-only
        return granted

    async def _ask(self, epoch: int, geometry: str, timeout_ms: int) -> protocol.PoolGranted:
        before, self.client.epoch = self.client.epoch, epoch  # before the answer: fences come just ahead of it
        try:
            granted = await self.client.link().call(
                lambda n: protocol.AcquirePool(n, epoch, geometry, timeout_ms), patience_s(timeout_ms)
            )
        except BaseException:
            self.client.epoch = before
            raise
        assert isinstance(granted, protocol.PoolGranted)
        return granted

    async def make(self, index_size: int, page_sizes: list[int]) -> PoolMapping:
        """Make a new pool: create index (rounded up) and pages, map them writable, and hand them to the vault. Unmaps
        the old pool first: the new pages may need its memory."""
        assert self.client.epoch is not None, "nothing is owned"
        made_epoch = self.client.epoch
        self.unmap()
        index_size = -(-index_size // self.host.granularity) * self.host.granularity
        sizes = [index_size, *page_sizes]
        fds: list[int] = []
        try:
            fds.append(self.host.create(index_size))
            for size in page_sizes:
                fds.append(self.client.device.create(size))
            await self.client.link().send_with_fds(
                lambda n, which, last: protocol.AddPoolSlabs(n, sizes[which], last), CALL_TIMEOUT_S, fds
            )
            self.mapping = self._mapper.map(sizes, fds, made_epoch, writable=True)
        except BaseException:
            close_all(fds)
            raise
        return self.mapping

    async def map(self, *, writable: bool) -> PoolMapping:
        """Map the existing pool: writable for its new owner, read-only for an observer."""
        if not writable:
            await self._register()
        return await self._fetch(writable=writable)

    async def _fetch(self, *, writable: bool) -> PoolMapping:
        """Map the vault's pool in place of the mapped one. If it is the same pool, its mapping stays."""
        slabs, fds = await self.client.link().call_for_fds(protocol.FetchPool, CALL_TIMEOUT_S)
        assert isinstance(slabs, protocol.Slabs)
        if self.home is not None and (sum(slabs.sizes[1:]), slabs.geometry) != (self.home.size, self.geometry):
            # The home's private parts would overlap the blocks of a pool of another geometry.
            close_all(fds)
            raise VaultRefused("absent", "the pool that is there is of another geometry")
        try:
            if self.mapping is not None and self.mapped_is(slabs.made_epoch):
                self._mapper.protect(self.mapping, writable=writable)
                close_all(fds)
                return self.mapping
            self.unmap()
            self.mapping = self._mapper.map(slabs.sizes, fds, slabs.made_epoch, writable=writable)
        except BaseException:
            close_all(fds)
            raise
        return self.mapping

    async def quiesce(self) -> None:
        """Prepare a planned handover: drain the device, drop write access, and tell the vault. Write access returns
        with `stand_by` or with the next `acquire`."""
        assert self.client.epoch is not None, "nothing is owned"
        self.client.device.synchronize()
        if self.mapping is not None:
            self._mapper.protect(self.mapping, writable=False)
        epoch = self.client.epoch
        await self.client.link().call(lambda n: protocol.Quiesced(n, epoch), CALL_TIMEOUT_S)
        self.client.epoch = self.granted = None

    def unmap(self) -> None:
        """Unmap everything except the private slab of a home."""
        mapping, self.mapping = self.mapping, None
        if mapping is not None:
            self._mapper.unmap(mapping)

    async def _donate(self) -> None:
        """Hand the owned pool to the vault again, after vault and keeper both died. This process stays the owner."""
        mapping, granted = self.mapping, self.granted
        if mapping is None or granted is None:
            return
        epoch, made = granted.epoch, granted.made_epoch or granted.epoch
        if not self.mapped_is(made):
            return  # the mapped pool is older than the granted one, which replaces it
        sizes = [mapping.index_size, *mapping.page_sizes]
        await self.client.link().send_with_fds(
            lambda n, which, last: protocol.DonatePool(n, epoch, self.geometry, sizes[which], last, made),
            CALL_TIMEOUT_S,
            mapping.fds,
        )
