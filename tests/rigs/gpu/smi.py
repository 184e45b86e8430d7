"""A GPU as nvidia-smi tells of it: its name and its memory. Nothing, where there is none."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.memory.devices.cuda import Driver, find_gpu
from holdfast.spec.names import is_host

SMI_S = 20.0  # nvidia-smi answers in a tenth of a second; the driver may be busy with a teardown


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """MiB in use on the GPU, in all and by process as far as they are shown."""

    used_mib: int | None
    by_pid: dict[int, int]

    def over(self, other: DeviceMemory) -> int | None:
        return None if self.used_mib is None or other.used_mib is None else self.used_mib - other.used_mib

    def facts(self, states: Mapping[int, str]) -> dict[str, Any]:
        """For a results file; `states` are the engines' by pid."""
        by_state: dict[str, list[int]] = {}
        for pid, mib in self.by_pid.items():
            by_state.setdefault(states.get(pid, "other"), []).append(mib)
        used = "none" if self.used_mib is None else self.used_mib
        return {"device_used_mib": used, "device_used_mib_by_process": by_state or "none"}


def gpu_uuid(device: str) -> str:
    """What nvidia-smi and vaults call it. Asked of the driver: some sandboxes show a GPU without the driver's files."""
    return device if is_host(device) else find_gpu(Driver(), device)[1]


def device_memory(gpu: str) -> DeviceMemory:
    """As nvidia-smi tells of the GPU with this UUID; nothing on a host device, or where there is no nvidia-smi."""
    if is_host(gpu):
        return DeviceMemory(None, {})
    used = _smi("--query-gpu=memory.used", gpu)
    apps = _smi("--query-compute-apps=pid,used_memory", gpu)
    return DeviceMemory(read_used(used), read_apps(apps))


def used_mib() -> int:
    """MiB in use on the first GPU, which must be there."""
    used = read_used(_smi("--query-gpu=memory.used"))
    assert used is not None, "nvidia-smi shows no GPU"
    return used


def _smi(query: str, gpu: str = "") -> str:
    """Ask for all GPUs, or for one."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", *(("-i", gpu) if gpu else ())]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=False).stdout
    return ""


def read_apps(text: str) -> dict[int, int]:
    """Return MiB by pid from `--query-compute-apps=pid,used_memory --format=csv,noheader,nounits`. A sandbox may show
    none, or no sizes."""
    found = {}
    for line in text.splitlines():
        pid, _, used = (word.strip() for word in line.partition(","))
        if pid.isdigit() and used.isdigit():
            found[int(pid)] = int(used)
    return found


def read_used(text: str) -> int | None:
    """`--query-gpu=memory.used --format=csv,noheader,nounits`, of one GPU: MiB; None where there is none."""
    first = text.strip().splitlines()[0].strip() if text.strip() else ""
    return int(first) if first.isdigit() else None


def gpu_names() -> list[str]:
    """Return the name and driver of each GPU here."""
    return _smi("--query-gpu=name,driver_version").strip().splitlines()
