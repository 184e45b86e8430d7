"""What a device is to the rest of the room: physical slabs known by fds, and addresses they are mapped at.

Always true for every device: a slab lives as long as any process holds its fd or a mapping of it, whoever created it;
an address range stays where it is from `reserve` to `release`, mapped or not; an operation that fails has changed
nothing; nothing here waits for another process. A device object belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DeviceError(Exception):
    """What a device could not do: the cause and, where there is one, the mend."""

    def __init__(self, cause: str, mend: str = "") -> None:
        super().__init__(f"{cause}; {mend}" if mend else cause)
        self.cause = cause
        self.mend = mend


class OutOfMemory(DeviceError):
    """The memory, or the address space, is not there. Nothing was taken."""


class BusyError(DeviceError):
    """Something still uses what should change: a mapping lives where none may."""


class WrongFd(DeviceError):
    """The fd is not a slab of this device, or not one that may be used this way."""


class Unsupported(DeviceError):
    """This machine, its driver or its mode cannot do what memory that outlives processes needs."""


class Device(Protocol):
    """One device's memory. Sizes and addresses are bytes, multiples of `granularity` where slabs are meant."""

    name: str  # "host-0", or a GPU's UUID
    granularity: int

    def create(self, size: int) -> int:
        """A new slab, all of it really there, as an fd (close-on-exec) of the caller's. Its bytes mean nothing yet."""
        ...

    def reserve(self, size: int) -> int:
        """An address range for slabs; it stays put until `release`."""
        ...

    def map(self, address: int, size: int, fd: int, *, writable: bool) -> None:
        """Map a whole slab (`size` is its size) inside a reserved range. The caller may close `fd` afterwards."""
        ...

    def map_many(self, address: int, slabs: Sequence[tuple[int, int]], *, writable: bool) -> None:
        """Map (size, fd) slabs one after the other from `address` on: all of them or none.

        Cheaper than `map` for each where changing access costs a driver call (facts 5).
        """
        ...

    def scratch(self, address: int, size: int, own: Sequence[tuple[int, int]] = ()) -> None:
        """Map memory that nobody keeps over a part of a reserved range, so that whatever runs there may write: in the
        parts `own` (offset and size, in order) each byte is itself, elsewhere many addresses may be the same few bytes.
        Costs little more than `own`. `unmap` ends it."""
        ...

    def protect(self, address: int, size: int, *, writable: bool) -> None:
        """Change the access of every slab mapped in the range. Read-only: not in the way of sealing it."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Drop every mapping in the range and what it held; the addresses stay reserved. Nothing mapped: nothing done.

        Device work that uses the range must be over (`synchronize`).
        """
        ...

    def release(self, address: int, size: int) -> None:
        """Give back a range got from `reserve`, whole; BusyError while anything in it is mapped."""
        ...

    def read(self, address: int, size: int) -> bytes:
        """Copy mapped bytes out. Any address and size within mapped slabs."""
        ...

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes in, and return when they are there. Any address within slabs mapped writable."""
        ...

    def checksum(self, address: int, size: int) -> str:
        """blake2b, 128 bits, in hex, over mapped bytes."""
        ...

    def synchronize(self) -> None:
        """Return when all device work this process has queued is done."""
        ...

    def free_bytes(self) -> int:
        """What a slab can still be made of: the device's memory (host: and what this process's cgroups allow)."""
        ...

    def close(self) -> None:
        """Unmap and release everything; a second time does nothing."""
        ...
