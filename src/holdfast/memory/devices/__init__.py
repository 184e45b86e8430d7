"""Devices behind one small interface: `host` (memfds, everywhere) and `cuda` (the driver's virtual memory management).

Always true: neither importing this nor opening a host device loads torch or cuda.
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.core.errors import UserError
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

GPUS = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]+)")
_KNOWN = re.compile(r"(GPU|MIG)-[0-9a-fA-F][0-9a-fA-F/-]*")


def open_device(name: str, host: HostSettings | None = None) -> Device:
    """Open a device by name: `host-<n>`, `GPU-<uuid>`, `MIG-<uuid>`, or `cuda-<n>` in PCI bus order."""
    if is_host(name):
        return HostDevice(name, host or HostSettings())
    if name.startswith(("GPU-", "MIG-", "cuda-")):
        from holdfast.memory.devices.cuda import CudaDevice

        return CudaDevice(name)
    raise Unsupported(f"no device is named {name!r}", "name it host-0, a GPU's UUID (nvidia-smi -L), or cuda-0")


def gpu_uuids(folder: Path = GPUS) -> list[str]:
    """Return the UUIDs of this machine's GPUs in PCI bus order, which is the order of `cuda-<n>`. Reads /proc, without
    CUDA."""
    found = [_UUID.search(path.read_text()) for path in sorted(folder.glob("*/information"))]
    return [match.group(1) for match in found if match is not None]


def device_name(name: str, folder: Path = GPUS) -> str:
    """Return the name of a device's socket: for `cuda-<n>`, the GPU's UUID. Raises UserError if there is no such
    device."""
    if is_host(name) or _KNOWN.fullmatch(name):
        return name
    number = name.removeprefix("cuda-")
    if not name.startswith("cuda-") or not number.isdigit():
        raise UserError(f"no device is named {name!r}; name it host-0, a GPU's UUID (nvidia-smi -L), or cuda-0")
    uuids = gpu_uuids(folder)
    if int(number) >= len(uuids):
        there = f"there are {len(uuids)}" if uuids else "no NVIDIA driver is loaded"
        always = "host-0 is always there (`cpu` for `holdfast up`)"
        raise UserError(f"there is no GPU {name} on this machine ({there}); {always}")
    return uuids[int(number)]
