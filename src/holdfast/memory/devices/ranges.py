"""Records which address ranges of a device are reserved, and which slabs are mapped in them. Pure.

Always true: each mapping lies inside one reservation; mappings never overlap and are changed only as a whole; access to
unmapped bytes raises an error here instead of a fault in the kernel.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.memory.devices.contract import BusyError, DeviceError


@dataclass(slots=True)
class SlabMapping:
    address: int
    size: int
    writable: bool
    fd: int = -1  # the host device's own fd of the slab; cuda needs none

    @property
    def end(self) -> int:
        return self.address + self.size


class Ranges:
    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.reserved: dict[int, int] = {}  # address -> size
        self._reserved_at: list[int] = []  # sorted, for the search
        self._mapped: dict[int, SlabMapping] = {}
        self._mapped_at: list[int] = []

    def check_size(self, size: int) -> None:
        if size <= 0 or size % self.granularity:
            raise DeviceError(f"a size of {size} bytes", f"sizes are multiples of {self.granularity}")

    # -- reservations

    def add_reserved(self, address: int, size: int) -> None:
        self.reserved[address] = size
        insort(self._reserved_at, address)

    def check_release(self, address: int, size: int) -> None:
        if self.reserved.get(address) != size:
            raise DeviceError(f"{address:#x}+{size} is not a reserved range", "release what reserve gave, whole")
        if self.within(address, size):
            raise BusyError(f"slabs are mapped in {address:#x}+{size}", "unmap them first")

    def drop_reserved(self, address: int) -> None:
        del self.reserved[address]
        self._reserved_at.remove(address)

    # -- mappings

    def check_free(self, address: int, size: int) -> None:
        self.check_size(size)
        position = bisect_right(self._reserved_at, address) - 1
        start = self._reserved_at[position] if position >= 0 else 0
        if position < 0 or address + size > start + self.reserved[start] or address % self.granularity:
            raise DeviceError(f"{address:#x}+{size} is not inside a reserved range", "map inside what reserve gave")
        if self.within(address, size):
            raise BusyError(f"something is mapped in {address:#x}+{size} already", "unmap it first")

    def check_scratch(self, address: int, size: int, own: Sequence[tuple[int, int]]) -> None:
        """Raise DeviceError if scratch with these `own` parts cannot be mapped here."""
        self.check_free(address, size)
        reached = 0
        for start, length in own:
            self.check_size(length)
            if start % self.granularity or start < reached or start + length > size:
                raise DeviceError(f"{start}+{length} in scratch of {size}", "parts are in order, apart and inside")
            reached = start + length

    def add(self, mapping: SlabMapping) -> None:
        self._mapped[mapping.address] = mapping
        insort(self._mapped_at, mapping.address)

    def remove(self, mapping: SlabMapping) -> None:
        del self._mapped[mapping.address]
        del self._mapped_at[bisect_left(self._mapped_at, mapping.address)]

    def mappings(self) -> list[SlabMapping]:
        return [self._mapped[address] for address in self._mapped_at]

    def within(self, address: int, size: int) -> list[SlabMapping]:
        """Return every mapping in the range. Raises DeviceError if one extends beyond it."""
        found = self._touching(address, size)
        for mapping in found:
            if mapping.address < address or mapping.end > address + size:
                raise DeviceError(f"{address:#x}+{size} cuts through a mapped slab", "slabs are changed whole")
        return found

    def check_covered(self, address: int, size: int, *, writable: bool = False) -> None:
        reached = address
        for mapping in self._touching(address, size):
            if mapping.address > reached:
                break
            if writable and not mapping.writable:
                raise DeviceError(f"{mapping.address:#x}+{mapping.size} is mapped read-only")
            reached = mapping.end
        if size <= 0 or reached < address + size:
            raise DeviceError(f"not all of {address:#x}+{size} is mapped")

    def _touching(self, address: int, size: int) -> list[SlabMapping]:
        first = max(0, bisect_right(self._mapped_at, address) - 1)
        last = bisect_left(self._mapped_at, address + size)
        found = [self._mapped[at] for at in self._mapped_at[first:last]]
        return [mapping for mapping in found if mapping.end > address]


def scratch_pieces(size: int, piece: int, own: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Yield offset and size of the slabs that scratch is mapped from, in order, with True for those in `own`.

    `own` parts are in order and do not overlap. The other slabs have size `piece`, or half of it, or a quarter, and so
    on: a GPU maps a slab only as a whole, so this needs few different slabs."""
    at = 0
    for start, length in [*own, (size, 0)]:
        while at < start:
            step = piece
            while step > start - at:
                step //= 2
            yield at, step, False
            at += step
        if length:
            yield start, length, True
            at = start + length
