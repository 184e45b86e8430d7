"""Which devices this machine has. No CUDA: the driver says it in /proc.

Always true: a GPU is known by its UUID, whatever name a person used.
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.core.errors import UserError
from holdfast.spec.names import is_host

GPUS = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]+)")
_KNOWN = re.compile(r"(GPU|MIG)-[0-9a-fA-F][0-9a-fA-F/-]*")


def gpu_uuids(folder: Path = GPUS) -> list[str]:
    """In PCI bus order, which is how `cuda-<n>` counts."""
    found = [_UUID.search(path.read_text()) for path in sorted(folder.glob("*/information"))]
    return [match.group(1) for match in found if match is not None]


def device_name(name: str, folder: Path = GPUS) -> str:
    """The name a device's socket has: `cuda-<n>` becomes that GPU's UUID; UserError for what is no device."""
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
