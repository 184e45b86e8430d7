"""An engine's view of the KV pool: stand by it, own it under an epoch, make its pages or adopt them, step back from it.

Always true: pages and index are mapped before the engine touches them and stay at their addresses while mapped; only
the owner writes; the fences are told by the vault, never guessed from time. A standby maps the same pages read-only, or
writable but untouched, since changing access later would cost too much (fact 4a). A pool is known by the epoch it was
made under: while that matches, whoever stood by it needs no call of any kind between grant and use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.memory import protocol
from holdfast.memory.client.attached import CALL_TIMEOUT_S
from holdfast.memory.client.calls import Notice, patience_s
from holdfast.memory.client.pool_mapping import Home, PoolMapper, PoolMapping, leave_home, make_home
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices.contract import Device
from holdfast.memory.errors import VaultRefused
from holdfast.memory.fdsocket import close_all

__all__ = ["PoolClient", "PoolMapping"]


@dataclass(slots=True)
class PoolClient:
    """The pool's side of a `MemoryClient`; `host` maps the index, the client's device the pages."""

    client: MemoryClient
    host: Device
    private_bytes: int = 0  # the pages' range ends in a slab of this process's own, at least so large
    # A hint, on the event loop; must not raise or block.
    on_news: Callable[[protocol.PoolNews], None] = lambda news: None
    on_deposed: Callable[[str], None] = lambda why: None  # others may write here now: not one more store
    home: Home | None = None  # where the pages are always mapped
    mapping: PoolMapping | None = None
    cpu_fence: asyncio.Event = field(default_factory=asyncio.Event)
    gpu_fence: asyncio.Event = field(default_factory=asyncio.Event)
    geometry: str = ""  # of the pool that is owned; with a home, of any that may be mapped there
    granted: protocol.PoolGranted | None = None  # what this process owns
    _made: Home | None = None  # the home, if it was made here

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
        self.client.on_reattached = self._give_back

    def _if_deposed(self, epoch: int, why: str) -> None:
        """Owners up to this epoch are none any more."""
        if self.granted is not None and self.granted.epoch <= epoch:
            self.on_deposed(f"deposed: {why}")

    def settle(self, home: Home | None, pages_bytes: int) -> None:
        """Where pools of so many bytes are mapped from now on: in a home of the engine's, or of this one's where it has
        private memory."""
        if home is None and self.private_bytes:
            home = self._made = make_home(self.client.device, pages_bytes, self.private_bytes)
        self.home = home

    def leave(self) -> None:
        """The home that was made here goes, with its private slab; no pool is mapped."""
        if self._made is not None:
            leave_home(self.client.device, self._made)
            self.home = self._made = None

    @property
    def _mapper(self) -> PoolMapper:
        return PoolMapper(self.host, self.client.device, self.private_bytes, self.home)

    # -- standing by

    async def stand_by(self) -> PoolMapping | None:
        """Take a mapper's seat, which brings the pool's news, and keep the pool that is there mapped: writable, but
        untouched until it is granted. None if there is none; what was mapped then stays. To be called again at news
        of another pool (`made` under an epoch that is not `mapped_is`)."""
        await self._register()
        try:
            return await self._fetch(writable=True)
        except VaultRefused as refused:
            if refused.code != "absent":
                raise
            return None

    def private_only(self) -> PoolMapping:
        """For one that found no pool: a range that is only the private slab, until a pool is made or mapped."""
        self.unmap()
        self.mapping = self._mapper.map([], [], 0, writable=True)
        return self.mapping

    def mapped_is(self, made_epoch: int) -> bool:
        """Whether what is mapped here is the pool made under that epoch."""
        return self.mapping is not None and self.mapping.made_epoch == made_epoch > 0

    async def _register(self) -> None:
        if not self.client.registered:
            await self.client.register_mapping(None)

    # -- owning

    async def acquire(self, epoch: int, geometry: str, timeout_ms: int) -> protocol.PoolGranted:
        """Own the pool: the one that is there (`adopt`, made under `made_epoch`), or one that is to be made. Returns
        past the CPU fence of every earlier epoch; if the pool is mapped here, then writable.

        A vault that is away is waited for. TimeoutError while an earlier owner is still connected; ConnectionError if
        the vault was not back in time, or took its answer with it (then the next ask takes a newer epoch);
        VaultRefused for an epoch that is not the newest."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        self.cpu_fence.clear()
        self.gpu_fence.clear()
        lost: ConnectionError | None = None
        while True:  # past the deadline the first wait, or the vault, ends it
            await self.client.until_connected(deadline_s - loop.time())
            if lost is not None and self.client.last_epoch >= epoch:
                raise lost  # it may have been granted, and was given up since nobody here knew
            try:
                await self._register()
                granted = await self._ask(epoch, geometry, round((deadline_s - loop.time()) * 1000))
                break
            except ConnectionError as error:
                lost = error
        self.client.last_epoch = max(self.client.last_epoch, epoch)
        self.geometry, self.granted = geometry, granted
        if self.mapping is not None and self.mapped_is(granted.made_epoch):
            self._mapper.protect(self.mapping, writable=True)  # nothing to do, unless it stepped back before
        return granted

    async def _ask(self, epoch: int, geometry: str, timeout_ms: int) -> protocol.PoolGranted:
        before, self.client.epoch = self.client.epoch, epoch  # before the answer: its fences come just ahead of it
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
        """A fresh pool: index (rounded up) and pages made, mapped writable, handed to the vault. What was mapped
        before goes first: it may be memory that the new pages need."""
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
            await self.client.link().hand_over(
                lambda n, which, last: protocol.AddPoolSlabs(n, sizes[which], last), CALL_TIMEOUT_S, fds
            )
            self.mapping = self._mapper.map(sizes, fds, made_epoch, writable=True)
        except BaseException:
            close_all(fds)
            raise
        return self.mapping

    async def map(self, *, writable: bool) -> PoolMapping:
        """The pool that is there: for its new owner, or (read-only) for one that looks on."""
        if not writable:
            await self._register()
        return await self._fetch(writable=writable)

    async def _fetch(self, *, writable: bool) -> PoolMapping:
        """Map what the vault has, in place of what is mapped; the same pool stays where it is."""
        slabs, fds = await self.client.link().call_for_fds(protocol.FetchPool, CALL_TIMEOUT_S)
        assert isinstance(slabs, protocol.Slabs)
        if self.home is not None and (sum(slabs.sizes[1:]), slabs.geometry) != (self.home.size, self.geometry):
            # Private parts of a home would lie among another's blocks.
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
        """A planned handover: the device is drained, write access is dropped, and the vault knows it. Write access
        comes back with `stand_by`, ahead of time, or with the next `acquire`."""
        assert self.client.epoch is not None, "nothing is owned"
        self.client.device.synchronize()
        if self.mapping is not None:
            self._mapper.protect(self.mapping, writable=False)
        epoch = self.client.epoch
        await self.client.link().call(lambda n: protocol.Quiesced(n, epoch), CALL_TIMEOUT_S)
        self.client.epoch = self.granted = None

    def unmap(self) -> None:
        """Everything; a private slab that is a home's stays."""
        mapping, self.mapping = self.mapping, None
        if mapping is not None:
            self._mapper.unmap(mapping)

    async def _give_back(self) -> None:
        """Vault and keeper were lost: the owner hands its pool over again, and goes on owning it."""
        mapping, granted = self.mapping, self.granted
        if mapping is None or granted is None:
            return
        epoch, made = granted.epoch, granted.made_epoch or granted.epoch
        if not self.mapped_is(made):
            return  # what is mapped is an older pool, which the one that was granted replaces
        sizes = [mapping.index_size, *mapping.page_sizes]
        await self.client.link().hand_over(
            lambda n, which, last: protocol.DonatePool(n, epoch, self.geometry, sizes[which], last, made),
            CALL_TIMEOUT_S,
            mapping.fds,
        )
