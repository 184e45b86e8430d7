"""The KV pool mapped in this process: the index, and one address range of pages that ends in a private slab.

Whoever computes with its addresses (a GPU's graphs, an engine whose tensors cannot move) gives the pages a *home*: a
range of its own where every pool is mapped, with the private slab behind it for good, or with scratch in their place
while there is none.

Always true: the private slab is this process's alone, writable, and never handed to the vault; without a home it is as
old as the mapping it ends: with another mapping comes another one, at another address. Where there is no pool yet, the
private slab is mapped alone, so that warm-up and canaries always have somewhere to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.memory.devices.contract import Device, DeviceError
from holdfast.memory.fdsocket import close_all


@dataclass(slots=True)
class PoolMapping:
    """The pool in this process. The index is host memory on every device."""

    index_address: int
    index_size: int
    pages_address: int
    page_sizes: list[int]
    fds: list[int]  # of index and pages
    made_epoch: int = 0  # which pool it is; 0: none, only the private slab is mapped
    private_address: int = 0
    private_size: int = 0
    writable: bool = True  # index and pages; the private slab always is

    @property
    def private_at(self) -> int:
        """Bytes into the range: where pages end, or would, in a home."""
        return self.private_address - self.pages_address if self.private_size else sum(self.page_sizes)

    @property
    def range_size(self) -> int:
        return self.private_at + self.private_size


@dataclass(frozen=True, slots=True)
class Home:
    """A reserved range, as long as the pool's pages, that they are always mapped at. Behind it is a private slab of
    `private_size`, mapped for as long as the home is there; without one, `own` are the parts of it (offset and size, in
    order) that an engine computes with while there is no pool."""

    address: int
    size: int
    own: tuple[tuple[int, int], ...] = ()
    private_size: int = 0

    @property
    def private_address(self) -> int:
        return self.address + self.size


def make_home(device: Device, pages_bytes: int, private_bytes: int) -> Home:
    """With a private slab behind it."""
    size, private_size = (-(-one // device.granularity) * device.granularity for one in (pages_bytes, private_bytes))
    home = Home(device.reserve(size + private_size), size, private_size=private_size)
    try:
        _map_new(device, home.private_address, private_size)
    except BaseException:
        device.release(home.address, size + private_size)
        raise
    return home


def leave_home(device: Device, home: Home) -> None:
    """Nothing of it is used any more, and no pool is mapped there."""
    device.unmap(home.address, home.size + home.private_size)
    device.release(home.address, home.size + home.private_size)


def empty_home(device: Device, home: Home) -> None:
    """What lies there while there is no pool. A driver asks whose the first byte of a range is: it is somebody's."""
    if home.private_size:
        _map_new(device, home.address, device.granularity)
    else:
        device.scratch(home.address, home.size, home.own)


def _map_new(device: Device, address: int, size: int) -> None:
    fd = device.create(size)
    try:
        device.map(address, size, fd, writable=True)
    finally:
        close_all([fd])  # the mapping alone keeps it


@dataclass(slots=True)
class PoolMapper:
    """`host` maps the index, `device` the pages."""

    host: Device
    device: Device
    private_bytes: int = 0
    home: Home | None = None

    def map(self, sizes: Sequence[int], fds: list[int], made_epoch: int, *, writable: bool) -> PoolMapping:
        """All of it or nothing; the descriptors are the mapping's from then on. Without sizes: the private slab."""
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
                self._make_room(self.home, pages)
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

    def _make_room(self, home: Home, pages: Sequence[int]) -> None:
        """For pages of that many bytes, or for none."""
        if pages and sum(pages) != home.size:
            raise DeviceError(f"the pool has {sum(pages)} bytes of pages, this engine's are {home.size}")
        self.device.unmap(home.address, home.size)
        if not pages:
            empty_home(self.device, home)

    def protect(self, mapping: PoolMapping, *, writable: bool) -> None:
        """Change the access of index and pages, where it is another."""
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
