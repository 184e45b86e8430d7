"""Devices behind one small interface: `host` (memfds, everywhere) and `cuda` (the driver's virtual memory management).

Always true: importing this loads neither torch nor cuda, and opening a host device does not either.
"""

from __future__ import annotations

from holdfast.memory.devices.contract import BusyError, Device, DeviceError, OutOfMemory, Unsupported, WrongFd
from holdfast.memory.devices.fds import FdKind, check_slab_fd, fd_kind, is_sealed, seal_memfd
from holdfast.memory.devices.host import HostDevice, HostSettings, view
from holdfast.spec.names import is_host

__all__ = [
    "BusyError",
    "Device",
    "DeviceError",
    "FdKind",
    "HostDevice",
    "HostSettings",
    "OutOfMemory",
    "Unsupported",
    "WrongFd",
    "check_slab_fd",
    "fd_kind",
    "is_sealed",
    "open_device",
    "seal_memfd",
    "view",
]


def open_device(name: str, host: HostSettings | None = None) -> Device:
    """The device of a name: `host-<n>`, `GPU-<uuid>`, `MIG-<uuid>`, or `cuda-<n>` counted in PCI bus order."""
    if is_host(name):
        return HostDevice(name, host or HostSettings())
    if name.startswith(("GPU-", "MIG-", "cuda-")):
        from holdfast.memory.devices.cuda import CudaDevice

        return CudaDevice(name)
    raise Unsupported(f"no device is named {name!r}", "name it host-0, a GPU's UUID (nvidia-smi -L), or cuda-0")
