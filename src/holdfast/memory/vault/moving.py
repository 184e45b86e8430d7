"""Weights copied between a device and host memory, in a thread of the vault's, which serves on meanwhile.

Always true: it opens its device, on a GPU a context, for the copy out, and gives it back with the host memory; a copy
that fails, or is stopped, leaves nothing of itself; slabs that a copy made are whole when they are returned, and sealed
on the host.

The vault knows no digest of the weights: what is compared is every slab's size and its two ends.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.memory.devices import Device, DeviceError, open_device, seal_memfd
from holdfast.memory.devices.host_memory import HostMemory, open_host_memory
from holdfast.memory.fdsocket import close_all, copy_all
from holdfast.spec.names import is_host

# Copied at a time: hides the call, and a vault that is told to end does not wait for more.
_PIECE_BYTES = 64 * 1024 * 1024
# Compared at either end of a slab: a slab in another's place, or one that was not written, shows there.
_END_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """What a move took. Before the copy, memory is taken (on a GPU: pinned) or made."""

    size_bytes: int
    copy_s: float
    took_s: float


class Mover:
    """One set of weights' host memory. All calls but `stop` come from one thread; `host_bytes` may be read by any."""

    def __init__(self, device: str, now_s: Callable[[], float]) -> None:
        self._name = device
        self._now_s = now_s
        self._device: Device | None = None
        self._host: HostMemory | None = None
        self._addresses: list[int] = []
        self._stopped = False
        self.host_bytes = 0  # really taken

    def stop(self) -> None:
        """The vault ends: a copy under way fails at its next piece."""
        self._stopped = True

    def copy_out(self, sizes: Sequence[int], fds: Sequence[int]) -> Figures:
        """Take host memory and copy a device's slabs there; the descriptors stay the caller's. DeviceError, OSError."""
        began_s = self._now_s()
        try:
            device = self._device = open_device(self._name)
            host = self._host = open_host_memory(device)
            self._go_on()
            self._addresses = host.take(sizes)
            self.host_bytes = sum(sizes)
            own = copy_all(list(fds))
            try:
                copy_s = self._copy(device, host, sizes, own, out=True)
            finally:
                close_all(own)
        except BaseException:
            self.forget()
            raise
        return Figures(sum(sizes), copy_s, self._now_s() - began_s)

    def copy_in(self, sizes: Sequence[int]) -> tuple[list[int], Figures]:
        """New slabs on the device with what is in host memory, which stays as it is. DeviceError, OSError."""
        began_s = self._now_s()
        device, host = self._device, self._host
        assert device is not None, "nothing is in host memory"
        assert host is not None, "nothing is in host memory"
        fds: list[int] = []
        try:
            for size in sizes:
                self._go_on()
                fds.append(device.create(size))
            copy_s = self._copy(device, host, sizes, fds, out=False)
            for fd in fds if is_host(self._name) else ():
                seal_memfd(fd)
        except BaseException:
            close_all(fds)
            raise
        return fds, Figures(sum(sizes), copy_s, self._now_s() - began_s)

    def forget(self) -> None:
        """Give host memory back, and on a GPU the context."""
        host, device = self._host, self._device
        self._host = self._device = None
        self._addresses.clear()
        with contextlib.ExitStack() as stack:  # in this order, and the second though the first may fail
            if device is not None:
                stack.callback(device.close)
            if host is not None:
                stack.callback(host.close)
        self.host_bytes = 0

    # -- inside

    def _go_on(self) -> None:
        if self._stopped:
            raise DeviceError("the vault ends")

    def _copy(self, device: Device, host: HostMemory, sizes: Sequence[int], fds: Sequence[int], *, out: bool) -> float:
        """All slabs one way or the other, and a look at both; the seconds that the bytes were on their way."""
        with _mapped(device, sizes, fds, writable=not out) as start:
            began_s = self._now_s()
            try:
                at = start
                for size, address in zip(sizes, self._addresses, strict=True):
                    for offset in range(0, size, _PIECE_BYTES):
                        self._go_on()
                        piece = min(_PIECE_BYTES, size - offset)
                        if out:
                            host.copy_out(address + offset, at + offset, piece)
                        else:
                            host.copy_in(at + offset, address + offset, piece)
                    at += size
            finally:
                host.wait()
            copy_s = self._now_s() - began_s
            self._compare(device, sizes, start)
        return copy_s

    def _compare(self, device: Device, sizes: Sequence[int], at: int) -> None:
        for number, (size, address) in enumerate(zip(sizes, self._addresses, strict=True)):
            end = min(size, _END_BYTES)
            for offset in (0, size - end):
                if device.read(at + offset, end) != ctypes.string_at(address + offset, end):
                    raise DeviceError(f"slab {number} is not what was copied")
            at += size


@contextlib.contextmanager
def _mapped(device: Device, sizes: Sequence[int], fds: Sequence[int], *, writable: bool) -> Iterator[int]:
    """The slabs one after the other, at an address of their own, for a while."""
    total = sum(sizes)
    address = device.reserve(total)
    try:
        device.map_many(address, list(zip(sizes, fds, strict=True)), writable=writable)
        try:
            yield address
        finally:
            device.unmap(address, total)
    finally:
        device.release(address, total)
