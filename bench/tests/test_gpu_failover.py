"""Failover on a real GPU: direct memory past the GPU fence, the first kernel in vault memory, planted late writes.

`run_on_gpu.sh` runs this, and then the same with the numbers that are published. The bench's own processes are tried
everywhere, on host memory, so that a GPU's minutes are not spent on its mistakes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.failover_gpu import measure as failover_gpu
from bench.failover_gpu.measure import GpuBench
from tests.rigs.gpu.smi import gpu_uuid

pytestmark = pytest.mark.alone
GPU = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU here"),
]
ON_GPU = pytest.param("cuda-0", 100.0, 3, marks=GPU)
ON_HOST = pytest.param("host-0", 0.05, 1, marks=[pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(60)])


def bench_of(device: str, gib: float, kills: int) -> GpuBench:
    return GpuBench(gpu_uuid(device), gib, kills, kills, kills, kills)


@pytest.mark.parametrize(("device", "gib", "kills"), [ON_GPU, ON_HOST])
def test_past_the_gpu_fence_direct_memory_can_be_had(device: str, gib: float, kills: int) -> None:
    """Every standby of a killed engine with direct memory gets as much itself, once the fence is shown (fact 1)."""
    found = failover_gpu.run_direct(bench_of(device, gib, kills), fenced=True)
    assert found["met"], found
    assert found["lock_ms_max"] <= found["gpu_fence_ms_max"] <= found["allocated_ms_max"]


@pytest.mark.parametrize(("device", "gib", "kills"), [ON_GPU])
def test_the_lock_alone_is_not_enough(device: str, gib: float, kills: int) -> None:
    """A standby that trusts the lock meets a device that is still full, and can wake only past the fence (fact 1)."""
    found = failover_gpu.run_direct(bench_of(device, gib, kills), fenced=False)
    assert found["met"], found
    assert found["out_of_memory"] > 0, found


@pytest.mark.parametrize(("device", "gib", "kills"), [ON_GPU, ON_HOST])
def test_a_mapped_standby_works_before_the_gpu_fence(device: str, gib: float, kills: int) -> None:
    """Its first kernel in vault memory is finished with no other driver call, and every word it believes is right."""
    found = failover_gpu.run_vault(bench_of(device, gib, kills))
    assert found["met"], found
    if not device.startswith("host"):
        assert found["first_kernel_ms_p50"] < found["gpu_fence_ms_p50"], found


@pytest.mark.parametrize(("device", "gib", "kills"), [ON_GPU, ON_HOST])
def test_planted_late_writes_corrupt_nothing(device: str, gib: float, kills: int) -> None:
    """Writes that land after their owner's death reach quarantined blocks only, and those wait for the fence (4b)."""
    found = failover_gpu.run_late(bench_of(device, gib, kills))
    assert found["met"], found
    assert found["late_writes_landed_in"] > 0, found
