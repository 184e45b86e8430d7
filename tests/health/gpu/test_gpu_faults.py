"""A real fault of a real GPU, as NVIDIA's management library and the kernel's log tell it. Needs a GPU; `run_on_gpu.sh`
beside this file runs it on a bare GPU host and keeps what was seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.health.device_faults import DeviceFault, Severity, Source, device_address
from holdfast.health.fault_sources import KernelLog, Nvml, NvmlError, NvmlWatch

pytestmark = pytest.mark.gpu

CAUSE = Path(__file__).parents[2] / "rigs" / "health" / "cause_xid.py"
BOUND_S = 15.0
RESULTS = os.environ.get("HOLDFAST_GPU_RESULTS", "")
# What an access outside of what is mapped is called: by the memory unit, by the compute unit, and what follows it.
ACCESS = {31, 13, 43, 45}


def keep(**figures: Any) -> None:
    """For whoever ran it."""
    print(json.dumps(figures))
    if RESULTS:
        with open(RESULTS, "a") as file:
            file.write(json.dumps(figures) + "\n")


@pytest.fixture(scope="module")
def nvml() -> Iterator[Nvml]:
    try:
        library = Nvml()
    except NvmlError as error:
        pytest.skip(f"no NVML here: {error}")
    yield library
    library.close()


def until(found: Callable[[], bool], what: str) -> float:
    began_s = time.monotonic()
    while not found():
        assert time.monotonic() - began_s < BOUND_S, f"no {what} within {BOUND_S:g} s"
        time.sleep(0.01)
    return time.monotonic() - began_s


def cause() -> dict[str, Any]:
    """Have a process of its own break the first GPU's context."""
    done = subprocess.run([sys.executable, str(CAUSE), "0"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def heard_of_a_fault(source: Source) -> tuple[list[DeviceFault], str | None]:
    """What a source that reads already says of a fault that is caused now, and the device that had it."""
    told = cause()
    faults: list[DeviceFault] = []

    def some() -> bool:
        faults.extend(fault for fault in source.poll() if fault.number)
        return bool(faults)

    took_s = until(some, f"word from {source!r}")
    keep(source=source.name, state=source.state, took_s=round(took_s, 3), told=told, heard=[str(one) for one in faults])
    return faults, device_address(told["bus"])


def test_each_gpu_says_who_it_is_and_what_it_needs(nvml: Nvml) -> None:
    """A GPU has a PCI address and a UUID, and a sound one asks for no recovery, where its driver tells."""
    gpus = nvml.gpus()
    assert gpus
    actions: list[Any] = []
    for gpu in gpus:
        assert device_address(gpu.pci) == gpu.pci
        assert gpu.uuid.startswith("GPU-")
        try:
            actions.append(nvml.recovery_action(gpu))
        except NvmlError as error:
            actions.append(str(error))
    keep(gpus=[(gpu.pci, gpu.uuid) for gpu in gpus], recovery_actions=actions)
    assert all(action == 0 for action in actions if isinstance(action, int))


def test_a_worker_and_nvml_call_a_gpu_the_same(nvml: Nvml) -> None:
    """What a worker says of where it is has the address and the UUID that faults are told with."""
    pytest.importorskip("msgspec")
    pytest.importorskip("cuda.bindings.driver")
    from holdfast.health.records import device_name
    from holdfast.roles.devices import gpus_of
    from holdfast.spec.engines import FailoverSettings

    said = gpus_of(FailoverSettings(device="cuda-0"))
    keep(worker_says=said)
    ((pci, uuid),) = said
    assert (device_name("b", pci), uuid) in {(device_name("b", gpu.pci), gpu.uuid) for gpu in nvml.gpus()}


def test_nvml_tells_of_a_real_fault(nvml: Nvml) -> None:
    """A process that touches memory which is not mapped is told of as an Xid of its device, and is nobody else's
    matter: it is ignorable."""
    source = NvmlWatch()
    source.start()
    try:
        until(lambda: "starting" not in source.state, "GPUs")
        keep(nvml=source.state)
        assert "hears" in source.state, source.state
        if "hears 0 of" in source.state:
            pytest.skip(f"events cannot be had here: {source.state}")
        faults, device = heard_of_a_fault(source)
    finally:
        source.stop()
    assert {fault.device for fault in faults} == {device}
    assert faults[0].number in ACCESS, faults
    assert faults[0].severity is Severity.IGNORABLE


def test_the_kernels_log_tells_of_a_real_fault(nvml: Nvml) -> None:
    """The same, from the log, with the process's pid or without; skipped where it cannot be read."""
    source = KernelLog()
    source.start()
    keep(kernel_log=source.state)
    if "reads" not in source.state:
        pytest.skip(source.state)
    try:
        faults, device = heard_of_a_fault(source)
    finally:
        source.stop()
    assert {fault.device for fault in faults} == {device}
    assert faults[0].number in ACCESS, faults
