"""What determines how a device rounds. Engines compare their answers only if all of it is equal."""

from __future__ import annotations

import torch

from holdfast.core.procfs import cpu_model, read_text

DRIVER = "/proc/driver/nvidia/version"


def arithmetic(device: torch.device, threads: int) -> str:
    """Return the versions of torch, CUDA and the driver with the GPU's model; or the CPU's model and `threads`."""
    if device.type != "cuda":  # libraries select their kernels by the processor's features
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{device.type}, torch {torch.__version__}, {capability} of {cpu_model()}, {threads} threads"
    major, minor = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    first = (read_text(DRIVER) or "").partition("\n")[0]
    words = first.partition("Module")[2].split()  # "NVRM version: NVIDIA UNIX … Kernel Module  570.86.15  <date>"
    driver = next((word for word in words if word[:1].isdigit()), "unknown")
    return f"{device.type}, torch {torch.__version__}, CUDA {torch.version.cuda}, driver {driver}, {name}"
