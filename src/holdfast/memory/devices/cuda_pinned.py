"""Pinned host memory beside a GPU, and copies at the link's own speed. Imported only when a GPU is used.

The driver's own call for it takes half a second for a GiB, page by page in one thread, and so long the device's memory
would wait to be given back. Huge pages that several threads touch, and then register, are there in a sixth of that.

Always true: memory is taken only while the machine has it, since the kernel would kill where it could refuse; copies
are queued on one stream of their own and wait for nobody's work; it must be closed before its device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.memory.devices import pages
from holdfast.memory.devices.contract import OutOfMemory
from holdfast.memory.devices.cuda import CudaDevice
from holdfast.memory.devices.host import HostSettings
from holdfast.memory.devices.host_room import HUGE_PAGE_BYTES, free_host_bytes

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_THREADS = 8  # more gain nothing: the machine's memory is busy then


class PinnedMemory:
    """Of the driver, in this process's context."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._taken: dict[int, int] = {}  # sizes by address
        self._pinned: set[int] = set()  # those of them that the driver knows
        with device.current() as driver:
            self._stream: Any = driver("cuStreamCreate", _NON_BLOCKING)

    def take(self, sizes: Sequence[int]) -> list[int]:
        room, size = free_host_bytes() - HostSettings().spare_bytes, sum(sizes)
        if size > room:
            raise OutOfMemory(f"the host has {max(0, room)} bytes left, {size} more are needed", "free memory")
        addresses: list[int] = []
        try:
            for one in sizes:
                addresses.append(pages.reserve(one, HUGE_PAGE_BYTES))
                self._taken[addresses[-1]] = one
            with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "pin") as threads:
                for work in (_touch, self._register):  # in turn: both hold one lock of the kernel's
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
    with contextlib.suppress(OSError):  # a kernel without huge pages: it takes longer
        pages.advise(address, size, pages.MADV_HUGEPAGE)
    pages.advise(address, size, pages.MADV_POPULATE_WRITE)
