"""NVIDIA's driver API as this room calls it: loaded when first used, every result checked and named.

Always true: no call fails silently, and the names of a failure are the driver's own. No state but the loaded library.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from holdfast.memory.devices.contract import BusyError, DeviceError, OutOfMemory, Unsupported

# The driver's names -> ours; every other failure is a plain DeviceError.
_MEANINGS: dict[str, tuple[type[DeviceError], str]] = {
    "CUDA_ERROR_OUT_OF_MEMORY": (OutOfMemory, "free memory on the GPU"),
    "CUDA_ERROR_NOT_SUPPORTED": (Unsupported, ""),
    "CUDA_ERROR_NO_DEVICE": (Unsupported, "run on a machine with an NVIDIA GPU, or use host-0"),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (BusyError, "another process has the GPU for itself: nvidia-smi -c DEFAULT"),
    "CUDA_ERROR_ILLEGAL_ADDRESS": (DeviceError, "this process's GPU context is lost: restart it"),
}
_WITHOUT_MPS = "stop the MPS daemon (echo quit | nvidia-cuda-mps-control), or unset CUDA_MPS_PIPE_DIRECTORY"
_MPS_CONTROL = Path("/tmp/nvidia-mps/control")


class Driver:
    """`driver("cuMemCreate", …)` calls it and returns its value, its values as a tuple, or None."""

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise Unsupported("the package cuda-bindings is not installed", "pip install cuda-bindings") from error
        self("cuInit", 0)

    def __call__(self, function: str, *arguments: object) -> Any:
        try:
            result, *values = getattr(self.api, function)(*arguments)
        except RuntimeError as error:  # the bindings' word for a library, or a function in it, that is not there
            raise Unsupported(f"NVIDIA's driver cannot be used here: {error}", "install the GPU's driver") from error
        if int(result) != 0:
            raise self.failure(function, result)
        return values[0] if len(values) == 1 else tuple(values) or None

    def failure(self, function: str, result: Any) -> DeviceError:
        name = getattr(result, "name", str(result))
        kind, mend = _MEANINGS.get(name, (DeviceError, ""))
        if name.startswith("CUDA_ERROR_MPS_"):
            kind, mend = Unsupported, _WITHOUT_MPS
        return kind(f"{function}: {name}", mend)

    def attribute(self, device: Any, name: str, unknown: int = 0) -> int:
        """A device attribute's value, or `unknown` where driver or bindings are older than it."""
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:
            return unknown
        result, value = self.api.cuDeviceGetAttribute(attribute, device)
        return int(value) if int(result) == 0 else unknown


def find_gpu(driver: Driver, name: str) -> tuple[Any, str]:
    """The GPU of a UUID, or of `cuda-<n>` in PCI bus order (as nvidia-smi counts), and its UUID as its name."""
    gpus: list[tuple[str, Any, str]] = []
    for number in range(driver("cuDeviceGetCount")):
        gpu = driver("cuDeviceGet", number)
        gpus.append((_bus(driver, gpu), gpu, _uuid_text(bytes(driver("cuDeviceGetUuid", gpu).bytes))))
    gpus.sort(key=lambda one: one[0])
    kind, _, rest = name.partition("-")
    for position, (_, gpu, uuid) in enumerate(gpus):
        if kind == "cuda" and rest == str(position):
            return gpu, f"GPU-{uuid}"
        if kind != "cuda" and rest.lower() == uuid:
            return gpu, name
    found = ", ".join(f"GPU-{uuid}" for _, _, uuid in gpus) or "none"
    raise Unsupported(f"no GPU {name!r} is visible to this process", f"visible are: {found}")


def pci_and_uuid(driver: Driver, name: str) -> tuple[str, str]:
    """What a GPU is called in the kernel's log, and by its own name."""
    gpu, uuid = find_gpu(driver, name)
    return _bus(driver, gpu), uuid


def _bus(driver: Driver, gpu: Any) -> str:
    return bytes(driver("cuDeviceGetPCIBusId", 32, gpu)).split(b"\0")[0].decode()


def refuse_unfit(driver: Driver, gpu: Any, name: str) -> None:
    """A GPU whose mode or driver breaks what this room promises is refused by the reason's name."""
    mode = driver.attribute(gpu, "COMPUTE_MODE")
    modes = driver.api.CUcomputemode
    if mode == int(modes.CU_COMPUTEMODE_EXCLUSIVE_PROCESS):
        raise Unsupported(
            f"{name} is in exclusive-process mode, where a standby cannot have a context beside the active engine",
            "nvidia-smi -c DEFAULT",
        )
    if mode == int(modes.CU_COMPUTEMODE_PROHIBITED):
        raise Unsupported(f"{name} is in prohibited mode", "nvidia-smi -c DEFAULT")
    through_mps = driver.attribute(gpu, "MPS_ENABLED", unknown=-1)
    # A driver that does not tell: the daemon's pipe, where it is unless told otherwise.
    if through_mps > 0 or (through_mps < 0 and _MPS_CONTROL.exists()):
        raise Unsupported(
            f"{name} is shared through MPS, where one engine's fault takes its neighbours with it",
            _WITHOUT_MPS,
        )
    for attribute in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        if not driver.attribute(gpu, attribute):
            raise Unsupported(f"{name} lacks {attribute}", "use a GPU and driver with virtual memory management")


def _uuid_text(raw: bytes) -> str:
    digits = raw.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
