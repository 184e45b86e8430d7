"""Host memory to which a device's slabs are copied and from which they are copied back.

Always true: it is private to this process and freed when it ends; an allocation gets all its memory or none; copies may
run until `wait` has returned, and the memory they use must not change before. One thread at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from holdfast.memory.devices import pages
from holdfast.memory.devices.contract import Device, OutOfMemory
from holdfast.memory.devices.cuda import CudaDevice
from holdfast.memory.devices.host import HostDevice, HostSettings
from holdfast.memory.devices.host_room import HUGE_PAGE_BYTES, free_host_bytes
from holdfast.spec.names import is_host

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_THREADS = 8  # more gain nothing: memory bandwidth is used up


class PinnedMemory:
    """Host memory for a GPU, pinned by the driver in this process's context; close it before its device. It is
    allocated only if the machine has enough free memory: otherwise the kernel would kill a process. Copies run on a
    separate stream and wait for no other work.

    The driver's own allocation takes half a second per GiB, page by page in one thread, and delays freeing the device's
    memory. Touching huge pages in several threads and then registering them takes a sixth of that."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._taken: dict[int, int] = {}  # sizes by address
        self._pinned: set[int] = set()  # those registered with the driver
        with device.current() as driver:
            self._stream: Any = driver("cuStreamCreate", _NON_BLOCKING)

    def allocate(self, sizes: Sequence[int]) -> list[int]:
        room, size = free_host_bytes() - HostSettings().spare_bytes, sum(sizes)
        if size > room:
            raise OutOfMemory(f"the host has {max(0, room)} bytes left, {size} more are needed", "free memory")
        addresses: list[int] = []
        try:
            for one in sizes:
                addresses.append(pages.reserve(one, HUGE_PAGE_BYTES))
                self._taken[addresses[-1]] = one
            with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "pin") as threads:
                for work in (_touch, self._register):  # one after the other: both need the same kernel lock
                    list(threads.map(work, addresses, sizes))
        except (OSError, OutOfMemory) as error:
            raise OutOfMemory(f"the host has no {size} bytes to pin ({error})", "free memory") from error
        return addresses

    def _register(self, address: int, size: int) -> None:
        with self._device.current() as driver:
            driver("cuMemHostRegister", address, size, 0)
        self._pinned.add(address)

    def copy_out(self, address: int, device_address: int, size: int) -> None:
        with self._device.current() as driver:
            driver("cuMemcpyDtoHAsync", address, device_address, size, self._stream)

    def copy_in(self, device_address: int, address: int, size: int) -> None:
        with self._device.current() as driver:
            driver("cuMemcpyHtoDAsync", device_address, address, size, self._stream)

    def wait(self) -> None:
        with self._device.current() as driver:
            driver("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        if self._stream is None:
            return
        with self._device.current() as driver:
            driver("cuStreamSynchronize", self._stream)
            while self._taken:
                address, size = self._taken.popitem()
                if address in self._pinned:
                    driver("cuMemHostUnregister", address)
                pages.unmap(address, size)
            driver("cuStreamDestroy", self._stream)
        self._stream = None


def _touch(address: int, size: int) -> None:
    pages.map_own(address, size)
    pages.advise(address, size, pages.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # without huge pages it only takes longer
        pages.advise(address, size, pages.MADV_HUGEPAGE)
    pages.advise(address, size, pages.MADV_POPULATE_WRITE)


class HostMemory(Protocol):
    """Allocates host memory, and copies between it and memory mapped on the device."""

    def allocate(self, sizes: Sequence[int]) -> list[int]:
        """Allocate memory for each size and return the addresses. Raises OutOfMemory if not all fit."""

    def copy_out(self, address: int, device_address: int, size: int) -> None:
        """Start a copy from the device to host memory."""

    def copy_in(self, device_address: int, address: int, size: int) -> None:
        """Start a copy from host memory to the device."""

    def wait(self) -> None:
        """Return when all started copies are complete."""

    def close(self) -> None:
        """Free everything. A second call does nothing."""


class PlainMemory:
    """Host memory for a host device: slabs that only this process maps."""

    def __init__(self) -> None:
        self._device = HostDevice()

    def allocate(self, sizes: Sequence[int]) -> list[int]:
        return [self._allocate(size) for size in sizes]

    def _allocate(self, size: int) -> int:
        fd = self._device.create(size)
        try:
            address = self._device.reserve(size)
            self._device.map(address, size, fd, writable=True)
        finally:
            os.close(fd)
        return address

    def copy_out(self, address: int, device_address: int, size: int) -> None:
        ctypes.memmove(address, device_address, size)  # releases the GIL, so other threads run

    def copy_in(self, device_address: int, address: int, size: int) -> None:
        ctypes.memmove(device_address, address, size)

    def wait(self) -> None:
        """Do nothing: host copies are complete when they return."""

    def close(self) -> None:
        self._device.close()


def open_host_memory(device: Device) -> HostMemory:
    """Return the kind of host memory that suits copies of this device's slabs."""
    if is_host(device.name):
        return PlainMemory()
    assert isinstance(device, CudaDevice)
    return PinnedMemory(device)
