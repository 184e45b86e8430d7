"""Weights that read wrong, on purpose: bits of what is mapped, flipped. For faults on command and nothing else.

On a host committed slabs are sealed, so only this process's view can be wrong: the pages in question become a private
copy. On a GPU nothing is sealed, and all who map the weights see it, as with a bit of real memory. Always true: `mend`
undoes all of it, and so does mapping the weights anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.memory.client.mapped import Mapped
from holdfast.memory.devices import pages, view
from holdfast.memory.devices.contract import Device
from holdfast.spec.names import is_host


@dataclass(slots=True)
class Damage:
    """What was done to one mapping."""

    device: Device
    mapped: Mapped
    _private: set[int] = field(default_factory=set)  # where pieces of it begin, in bytes from its start
    _flipped: list[tuple[int, int]] = field(default_factory=list)  # (address, mask)

    def flip(self, address: int, mask: int) -> None:
        """Flip these bits of one mapped byte."""
        assert self.mapped.present, "nothing is mapped"
        if is_host(self.device.name):
            self._own(address - self.mapped.address)
            view(address, 1, writable=True)[0] ^= mask
        else:
            self._write(address, mask)
        self._flipped.append((address, mask))

    def mend(self) -> None:
        if self.mapped.present and not is_host(self.device.name):
            for address, mask in self._flipped:
                self._write(address, mask)
        elif self.mapped.present:
            for start in self._private:
                self._map(start, private=False)
        self._private.clear()
        self._flipped.clear()

    def _own(self, at: int) -> None:
        """Pages as large as any of this memory may be."""
        start = at // self.device.granularity * self.device.granularity
        if start not in self._private:
            self._private.add(start)
            self._map(start, private=True)

    def _map(self, start: int, *, private: bool) -> None:
        slab = max(number for number, first in enumerate(self.mapped.offsets()) if first <= start)
        offset = start - self.mapped.offsets()[slab]
        address, size, fd = self.mapped.address + start, self.device.granularity, self.mapped.fds[slab]
        if private:
            pages.map_private(address, size, fd, offset)
        else:
            pages.map_fd(address, size, fd, writable=False, offset=offset)

    def _write(self, address: int, mask: int) -> None:
        device, mapped = self.device, self.mapped
        device.synchronize()
        device.protect(mapped.address, mapped.size, writable=True)
        device.write(address, bytes([device.read(address, 1)[0] ^ mask]))
        device.protect(mapped.address, mapped.size, writable=False)
