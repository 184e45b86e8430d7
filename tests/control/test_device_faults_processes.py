"""A GPU's fault, with real processes: read where control runs, it reaches exactly the workers on that GPU, whoever
comes to it later too, and goes when the driver says so. The GPUs are a libnvidia-ml of our own and a pipe in place of
the kernel's log."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.health.standing import HealthStatus
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import fetch, get_json
from holdfast.testing.waiting import in_thread, until
from tests.rigs.health.fault_sources import FIRST, SECOND, FakeNvml, LogPipe, fake_nvml
from tests.rigs.health.verdicts import Verdict, WatchedDeployment, watched

pytestmark = [pytest.mark.processes, pytest.mark.alone]

HEALTH = {"canary_interval_s": 0.3, "canary_share": 1.0}
BOUND_S = 60.0
STREAMS = 12
# Two on the first GPU, one on the second, one on none.
GPUS = {"worker-0": FIRST, "worker-1": FIRST, "worker-2": SECOND, "worker-3": ""}


class OnGpus(Deployment):
    """Workers that say which GPU they are on."""

    def start_worker(self, name: str, **other: Any) -> None:
        gpu = GPUS.get(name) or other.pop("gpu", "")
        super().start_worker(name, gpus=[(gpu, f"GPU-of-{gpu}")] if gpu else [], **other)


nvml = pytest.fixture(fake_nvml)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogPipe]:
    made = LogPipe(tmp_path)
    yield made
    made.close()


async def has(rig: WatchedDeployment, name: str, status: HealthStatus) -> Verdict:
    def found() -> Verdict | None:
        verdict = rig.verdict(name)
        return verdict if verdict is not None and verdict.status is status else None

    return await until(found, f"{name} to be {status.name}", BOUND_S)  # type: ignore[no-any-return]


def control_page(rig: WatchedDeployment, path: str) -> bytes:
    return fetch(rig.deployment.record("control")["status"], path)[1]


@contextlib.asynccontextmanager
async def running(nvml: FakeNvml, log: LogPipe) -> AsyncIterator[WatchedDeployment]:
    nvml.asks(0, 0)
    nvml.asks(1, 0)
    health = HEALTH | {"kernel_log": str(log.path), "nvml": str(nvml.library)}
    with OnGpus(len(GPUS), {"ttft_ms": 5, "tpot_ms": 10}, control={"health": health}) as place:
        async with watched(place) as rig:
            await until(lambda: not rig.unsound(), "every worker to be found sound", BOUND_S)
            yield rig


async def test_a_fault_reaches_who_is_on_its_gpu_and_nobody_else(nvml: FakeNvml, log: LogPipe) -> None:
    """An ignorable Xid is counted; a fatal one moves the streams of both workers on its GPU, and none is lost."""
    async with running(nvml, log) as rig:
        await _ignorable(rig, log)
        await _fatal(rig, nvml)
        await _own_report(rig)


@pytest.mark.long
async def test_a_fault_stands_until_it_is_mended(nvml: FakeNvml, log: LogPipe) -> None:
    """One that needs a reset serves on at half weight, since most others are out; a control that comes later, and a
    worker that comes to the GPU later, know of faults; and when the driver says that the GPU was reset its worker is
    sound again."""
    async with running(nvml, log) as rig:
        nvml.xid(0, 79)
        await has(rig, "worker-0", HealthStatus.UNHEALTHY)
        await _reset_needed(rig, nvml, log)
        await _remembered(rig)
        await _mended(rig, nvml)


async def _ignorable(rig: WatchedDeployment, log: LogPipe) -> None:
    log.write(f"NVRM: Xid (PCI:{FIRST}): 31, pid=4242, name=other, MMU fault")
    told = f'holdfast_device_faults_total{{device="{FIRST}",severity="ignorable",source="kernel log",xid="31"}} 1.0'
    await until(lambda: in_thread(lambda: told in _lines(rig)), "the fault to be counted", BOUND_S)
    assert not rig.unsound()


def _lines(rig: WatchedDeployment) -> set[str]:
    """Of the metrics, each with its labels in order."""
    lines = control_page(rig, "/metrics").decode().splitlines()
    return {_sorted(line) for line in lines if line.startswith("holdfast_device_faults_total{")}


def _sorted(line: str) -> str:
    name, _, rest = line.partition("{")
    labels, _, value = rest.rpartition("}")
    return f"{name}{{{','.join(sorted(labels.split(',')))}}}{value}"


async def _fatal(rig: WatchedDeployment, nvml: FakeNvml) -> None:
    place = rig.deployment
    # Five seconds and more: the last of them run still when the fault comes.
    streams = [await in_thread(lambda: place.stream("hello", 500)) for _ in range(STREAMS)]
    for stream in streams:
        await in_thread(stream.wait_tokens)
    nvml.xid(0, 79)
    for name in ("worker-0", "worker-1"):
        verdict = await has(rig, name, HealthStatus.UNHEALTHY)
        assert "Xid 79: the GPU has fallen off the bus" in verdict.record.standing.reason
        assert verdict.record.standing.fall == 1
    answers = [await in_thread(stream.answer) for stream in streams]
    assert {(answer.finish, answer.error) for answer in answers} == {("length", None)}
    assert any(answer.resumed for answer in answers)
    assert sorted(rig.unsound()) == ["worker-0", "worker-1"]


async def _own_report(rig: WatchedDeployment) -> None:
    """A worker that meets an error which stays says so, and exits."""
    name = "worker-3"
    await in_thread(lambda: rig.deployment.chaos(name, "device_error"))

    def told() -> bool:
        causes = [one.record.standing.causes for one in rig.verdicts.history if one.name == name]
        return any("device error that stays" in one.get("engine-failed", "") and "gone" in one for one in causes)

    await until(told, "its own word, and its end", BOUND_S)


async def _reset_needed(rig: WatchedDeployment, nvml: FakeNvml, log: LogPipe) -> None:
    log.write(f"NVRM: Xid (PCI:{SECOND}): 64, pid=<unknown>, Row Remapper Error")
    kept = await has(rig, "worker-2", HealthStatus.SUSPICIOUS)
    assert "Xid 64: a row of memory could not be remapped" in kept.record.standing.reason
    assert kept.record.last_resort, "two of four are out already: a third that drains would leave one"
    nvml.asks(1, 1)
    nvml.xid(1, 45)  # whereupon it is looked up what the driver asks for
    await until(lambda: "must be reset" in rig.deployment.log("control"), "the driver's wish to be read", BOUND_S)
    sound = rig.verdict("worker-3")
    assert sound is not None
    assert sound.sound


async def _remembered(rig: WatchedDeployment) -> None:
    place = rig.deployment
    place.kill("control")
    place.start_control()
    place.start_worker("worker-4", gpu=FIRST)
    told = lambda: (one := rig.verdict("worker-4")) and "device-lost" in one.record.standing.causes  # noqa: E731
    await until(told, "the new worker to be told", BOUND_S)
    reads = lambda: place.log("control").count("must be reset") > 1  # noqa: E731
    await until(reads, "the driver's wish to be read by the new control", BOUND_S)
    shown = await in_thread(get_json, place.record("control")["status"], "/health", BOUND_S)
    assert shown["fault_sources"]["NVML"] == "hears 2 of 2 GPUs"
    errors = {one["name"]: [error["reason"] for error in one["errors"]] for one in shown["verdicts"]}
    assert any("Xid 79" in reason for reason in errors["worker-0"])
    assert shown["fault_sources"]["kernel log"].startswith("reads ")


async def _mended(rig: WatchedDeployment, nvml: FakeNvml) -> None:
    nvml.asks(1, 0)
    nvml.xid(1, 45)
    await has(rig, "worker-2", HealthStatus.HEALTHY)
    fallen = {one.name for one in rig.verdicts.history if one.record.standing.fall}
    assert fallen == {"worker-0", "worker-1", "worker-4"}
