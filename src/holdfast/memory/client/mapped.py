"""Weights mapped in this process: one address range, slabs one after the other.

Always true: the range stays reserved from the first mapping until `forget`; the descriptors of what is mapped are kept,
to be given back if vault and keeper are both lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.memory.devices.contract import Device
from holdfast.memory.errors import StaleMemoryLayoutError
from holdfast.memory.fdsocket import close_all
from holdfast.memory.layout import Layout


@dataclass(slots=True)
class Mapped:
    """`present` is False between unmap and remap; `committed` is False while this process still writes them."""

    layout: Layout
    address: int
    size: int
    fds: list[int] = field(default_factory=list)
    present: bool = True
    committed: bool = True

    def offsets(self) -> list[int]:
        starts, total = [], 0
        for size in self.layout.slab_sizes:
            starts.append(total)
            total += size
        return starts

    def addresses(self) -> dict[str, int]:
        """Where each tensor is."""
        starts = self.offsets()
        return {place.name: self.address + starts[place.slab] + place.offset for place in self.layout.tensors}

    @property
    def can_be_given_back(self) -> bool:
        return self.present and self.committed

    def stale(self, kept: Layout) -> StaleMemoryLayoutError:
        """The error for a vault that keeps something else than was mapped here."""
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
        """Unmap, and give the addresses back."""
        self.drop(device)
        device.release(self.address, self.size)


def map_layout(device: Device, layout: Layout, fds: list[int], before: Mapped | None, *, writable: bool) -> Mapped:
    """Map a set of slabs, at the addresses of the one before where it has the same slabs. Takes the descriptors."""
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
    return Mapped(layout, address, total, fds, committed=not writable)
