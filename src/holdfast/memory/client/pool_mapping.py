"""The KV pool mapped in this process: the index, and one address range of pages that ends in a private slab.

Always true: the private slab is this process's alone, writable, never handed to the vault, and as old as the mapping it
ends: with another mapping comes another one, at another address. Where there is no pool yet, a range that is nothing
but the private slab takes its place, so that warm-up and canaries always have somewhere to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.memory.devices.contract import Device
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
    def range_size(self) -> int:
        return sum(self.page_sizes) + self.private_size


@dataclass(slots=True)
class PoolMapper:
    """`host` maps the index, `device` the pages."""

    host: Device
    device: Device
    private_bytes: int = 0

    def map(self, sizes: Sequence[int], fds: list[int], made_epoch: int, *, writable: bool) -> PoolMapping:
        """All of it or nothing; the descriptors are the mapping's from then on. Without sizes: the private slab."""
        index_size, pages = (sizes[0], list(sizes[1:])) if sizes else (0, [])
        private_size = -(-self.private_bytes // self.device.granularity) * self.device.granularity
        mapping = PoolMapping(0, index_size, 0, pages, fds, made_epoch, 0, private_size, writable)
        try:
            if index_size:
                mapping.index_address = self.host.reserve(index_size)
                self.host.map(mapping.index_address, index_size, fds[0], writable=writable)
            if mapping.range_size:
                mapping.pages_address = self.device.reserve(mapping.range_size)
            if pages:
                self.device.map_many(mapping.pages_address, list(zip(pages, fds[1:], strict=True)), writable=writable)
            if private_size:
                mapping.private_address = mapping.pages_address + sum(pages)
                self._map_private(mapping.private_address, private_size)
        except BaseException:
            self._drop(mapping)
            raise
        return mapping

    def _map_private(self, address: int, size: int) -> None:
        fd = self.device.create(size)
        try:
            self.device.map(address, size, fd, writable=True)
        finally:
            close_all([fd])  # the mapping alone keeps it

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
            self.device.unmap(mapping.pages_address, mapping.range_size)
            self.device.release(mapping.pages_address, mapping.range_size)
        if mapping.index_address:
            self.host.unmap(mapping.index_address, mapping.index_size)
            self.host.release(mapping.index_address, mapping.index_size)
