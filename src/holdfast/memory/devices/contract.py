"""The interface of a device: physical slabs identified by fds, and the addresses where they are mapped.

Always true for every device:
- A slab lives as long as any process holds its fd or a mapping of it, no matter which process created it.
- An address range stays reserved from `reserve` to `release`, mapped or not.
- A failed operation changes nothing.
- No operation waits for another process.
- One thread at a time uses a device object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DeviceError(Exception):
    """A failed operation of a device: the cause and, if known, the remedy."""

    def __init__(self, cause: str, mend: str = "") -> None:
        super().__init__(f"{cause}; {mend}" if mend else cause)
        self.cause = cause
        self.mend = mend


class OutOfMemory(DeviceError):
    """Not enough memory or address space. Nothing was allocated."""


class BusyError(DeviceError):
    """The range or slab is still in use: there is a mapping where none may be."""


class WrongFd(DeviceError):
    """The fd is not a slab of this device, or may not be used this way."""


class Unsupported(DeviceError):
    """This machine, its driver or its mode lacks a feature that memory which outlives processes needs."""


class Device(Protocol):
    """One device's memory. Sizes and addresses are in bytes; those of slabs are multiples of `granularity`."""

    name: str  # "host-0", or a GPU's UUID
    granularity: int

    def create(self, size: int) -> int:
        """Make a fully allocated slab and return its fd (close-on-exec), which the caller owns. Its bytes are
        undefined."""

    def reserve(self, size: int) -> int:
        """Reserve an address range for slabs until `release`, and return its address."""

    def map(self, address: int, size: int, fd: int, *, writable: bool) -> None:
        """Map a whole slab (`size` is its size) inside a reserved range. The caller may close `fd` afterwards."""

    def map_many(self, address: int, slabs: Sequence[tuple[int, int]], *, writable: bool) -> None:
        """Map (size, fd) slabs one after the other from `address` on: all of them or none.

        Cheaper than `map` for each where changing access costs a driver call (facts 5).
        """

    def scratch(self, address: int, size: int, own: Sequence[tuple[int, int]] = ()) -> None:
        """Map scratch memory over a part of a reserved range, so that code may write there; its content is not kept. In
        the parts `own` (offset and size, in order) each address has its own byte. Elsewhere many addresses may share
        the same few bytes, so it takes little more memory than `own`. `unmap` removes it."""

    def protect(self, address: int, size: int, *, writable: bool) -> None:
        """Change the access of every slab mapped in the range. A read-only mapping does not prevent sealing."""

    def unmap(self, address: int, size: int) -> None:
        """Remove every mapping in the range, if any; the addresses stay reserved.

        Device work that uses the range must have ended (`synchronize`).
        """

    def release(self, address: int, size: int) -> None:
        """Release a whole range returned by `reserve`. Raises BusyError while anything in it is mapped."""

    def read(self, address: int, size: int) -> bytes:
        """Return mapped bytes, at any address and size within mapped slabs."""

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes to any address within slabs mapped writable. Return when the copy is complete."""

    def checksum(self, address: int, size: int) -> str:
        """Return the 128-bit blake2b of mapped bytes, in hex."""

    def synchronize(self) -> None:
        """Return when all device work this process has queued is done."""

    def free_bytes(self) -> int:
        """Return the memory free for slabs (on the host: within the limits of this process's cgroups)."""

    def close(self) -> None:
        """Unmap and release everything. A second call does nothing."""
