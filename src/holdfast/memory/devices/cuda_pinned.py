"""Pinned host memory beside a GPU, and copies at the link's own speed. Imported only when a GPU is used.

Always true: memory is taken only while the machine has it, since the kernel would kill where it could refuse; copies
are queued on one stream of their own and wait for nobody's work; it must be closed before its device.
"""

from __future__ import annotations

from typing import Any

from holdfast.memory.devices.contract import OutOfMemory
from holdfast.memory.devices.cuda import CudaDevice
from holdfast.memory.devices.host import HostSettings
from holdfast.memory.devices.host_room import free_host_bytes

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class PinnedMemory:
    """Of the driver, in this process's context."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._taken: list[int] = []
        with device.current() as driver:
            self._stream: Any = driver("cuStreamCreate", _NON_BLOCKING)

    def take(self, size: int) -> int:
        room = free_host_bytes() - HostSettings().spare_bytes
        if size > room:
            raise OutOfMemory(f"the host has {max(0, room)} bytes left, {size} more are needed", "free memory")
        with self._device.current() as driver:
            try:
                address = int(driver("cuMemHostAlloc", size, 0))
            except OutOfMemory as error:
                raise OutOfMemory(f"the host has no {size} bytes to pin ({error.cause})", "free memory") from error
        self._taken.append(address)
        return address

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
                driver("cuMemFreeHost", self._taken.pop())
            driver("cuStreamDestroy", self._stream)
        self._stream = None
