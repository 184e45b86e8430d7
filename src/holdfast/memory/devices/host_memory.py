"""Host memory beside a device, to which its slabs are copied and from which they come back.

Always true: it is this process's own, and gone with it; all of it is really there once it was taken, or nothing was;
copies may be under way until `wait` has returned, and nothing they use may change before. One thread at a time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Protocol

from holdfast.memory.devices.contract import Device
from holdfast.memory.devices.host import HostDevice
from holdfast.spec.names import is_host


class HostMemory(Protocol):
    """Addresses of host memory, and copies between it and what the device has mapped."""

    def take(self, sizes: Sequence[int]) -> list[int]:
        """An address for each; OutOfMemory if they are not there, all of them."""
        ...

    def copy_out(self, address: int, device_address: int, size: int) -> None:
        """Begin to copy from the device to host memory."""
        ...

    def copy_in(self, device_address: int, address: int, size: int) -> None:
        """Begin to copy from host memory to the device."""
        ...

    def wait(self) -> None:
        """Return when all that was begun is done."""
        ...

    def close(self) -> None:
        """Give everything back; a second time does nothing."""
        ...


class PlainMemory:
    """Beside a host device: slabs that only this process maps."""

    def __init__(self) -> None:
        self._device = HostDevice()

    def take(self, sizes: Sequence[int]) -> list[int]:
        return [self._take(size) for size in sizes]

    def _take(self, size: int) -> int:
        fd = self._device.create(size)
        try:
            address = self._device.reserve(size)
            self._device.map(address, size, fd, writable=True)
        finally:
            os.close(fd)
        return address

    def copy_out(self, address: int, device_address: int, size: int) -> None:
        ctypes.memmove(address, device_address, size)  # which lets other threads run meanwhile

    def copy_in(self, device_address: int, address: int, size: int) -> None:
        ctypes.memmove(device_address, address, size)

    def wait(self) -> None:
        """Host stores are done when they return."""

    def close(self) -> None:
        self._device.close()


def open_host_memory(device: Device) -> HostMemory:
    """What copies of this device's slabs are best kept in."""
    if is_host(device.name):
        return PlainMemory()
    from holdfast.memory.devices.cuda import CudaDevice
    from holdfast.memory.devices.cuda_pinned import PinnedMemory

    assert isinstance(device, CudaDevice)
    return PinnedMemory(device)
