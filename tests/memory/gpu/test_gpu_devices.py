"""GPU memory as a device, on a real GPU: the contract, what it survives, and what a remap costs (facts 3-5).

Figures go to the file that HOLDFAST_GPU_RESULTS names, as JSON. `run_on_gpu.sh` runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from holdfast.memory.devices import Device, FdKind, WrongFd, fd_kind, open_device
from tests.rigs.gpu.smi import used_mib
from tests.rigs.memory.device_agent import Peer
from tests.rigs.memory.device_contract import CHECKS, Rig, mapped, slab, until
from tests.rigs.memory.gpu_agent import engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU here"),
]

GPU = "cuda-0"
MIB, GIB = 1 << 20, 1 << 30
REMAP_TURNS = 7


FIGURES: dict[str, Any] = {}


@pytest.fixture
def figures() -> Iterator[dict[str, Any]]:
    """What was measured so far, written down after each test, failed or not."""
    yield FIGURES
    target = os.environ.get("HOLDFAST_GPU_RESULTS")
    if target:
        Path(target).write_text(json.dumps(FIGURES, indent=1) + "\n")


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = open_device(GPU)
    yield device
    device.close()


def ask_smi(*query: str) -> list[str]:
    answer = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=60, check=True)
    return answer.stdout.split("\n")


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_cuda_keeps_the_contract(device: Device, check: Callable[[Rig], None]) -> None:
    """Each check's name is what must be true: the same list as on the host."""
    check(Rig(device, lambda: engine(GPU), 4 * MIB))


def test_what_the_kernel_shows_of_an_exported_fd(device: Device, figures: dict[str, Any]) -> None:
    """A CUDA-free process can tell a GPU's slab from every other kind of fd; an fd with no slab fails at import."""
    with slab(Rig(device, lambda: engine(GPU), 4 * MIB)) as fd:
        status = os.fstat(fd)
        figures["exported_fd"] = {
            "link": os.readlink(f"/proc/self/fd/{fd}"),
            "mode": oct(status.st_mode),
            "rdev": [os.major(status.st_rdev), os.minor(status.st_rdev)],
            "size": status.st_size,
            "fdinfo": Path(f"/proc/self/fdinfo/{fd}").read_text(),
        }
        assert fd_kind(fd) is FdKind.CUDA
    address = device.reserve(4 * MIB)
    empty = os.open("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC)
    with pytest.raises(WrongFd):
        device.map(address, 4 * MIB, empty, writable=False)
    os.close(empty)
    device.release(address, 4 * MIB)


def test_a_slab_is_mapped_whole(device: Device, figures: dict[str, Any]) -> None:
    """More than the slab has cannot be mapped; whether the driver takes less is written down."""
    rig = Rig(device, lambda: engine(GPU), 4 * MIB)
    with slab(rig) as fd:
        address = device.reserve(8 * MIB)
        for size, name in ((8 * MIB, "twice_its_size"), (2 * MIB, "half_its_size")):
            try:
                device.map(address, size, fd, writable=False)
            except Exception as error:
                figures[f"map_{name}"] = repr(error)
            else:
                device.unmap(address, size)
                figures[f"map_{name}"] = "accepted"
        device.release(address, 8 * MIB)
        assert figures["map_twice_its_size"] != "accepted"
        with mapped(rig, fd) as whole:
            device.write(whole, b"ok")


def remap_turn(keeper: Peer, standby: Peer, *, each: bool) -> dict[str, float]:
    """Take the fds from their keeper, map, and unmap again; in milliseconds."""
    fds = keeper.ask("give")["fds"]
    done = standby.ask("map", fds, writable=False, each=each)
    close_all(fds)
    assert "error" not in done, done
    unmapped = standby.ask("unmap")
    return {
        "remap_ms": done["receive_ms"] + done["map_ms"],
        "map_ms": done["map_ms"],
        "unmap_ms": unmapped["unmap_ms"],
    }


def summary(turns: list[dict[str, float]]) -> dict[str, Any]:
    names = turns[0].keys()
    shown = {f"{name}_p50": round(median(turn[name] for turn in turns), 3) for name in names}
    return shown | {f"{name}_all": [round(turn[name], 3) for turn in turns] for name in names}


def measure_remap(gib: int, slab_mib: int) -> dict[str, Any]:
    """Slabs made by one process, kept by a CUDA-free one, mapped by a third after the first was killed."""
    size, count = slab_mib * MIB, gib * 1024 // slab_mib
    with Peer("none") as keeper, engine(GPU) as standby:
        before_mib = used_mib()
        with engine(GPU) as creator:
            made = creator.ask("create", count=count, size=size, seed=gib)
            assert "error" not in made, made
            keeper.ask("keep", made["fds"])
            close_all(made["fds"])
        held_mib = used_mib()  # leaving the block killed the creator
        apps = ask_smi("--query-compute-apps=pid", "--format=csv,noheader")
        standby.ask("reserve", sizes=[size] * count)
        together = [remap_turn(keeper, standby, each=False) for _ in range(REMAP_TURNS)]
        one_by_one = [remap_turn(keeper, standby, each=True) for _ in range(3)]
        fds = keeper.ask("give")["fds"]
        assert "error" not in standby.ask("map", fds, writable=False)
        close_all(fds)
        wrong = standby.ask("verify", seed=gib)["wrong"]
        standby.ask("unmap")
        keeper.ask("drop")
        return summary(together) | {
            "gib": gib,
            "slab_mib": slab_mib,
            "handles": count,
            "remap_one_by_one_ms_p50": summary(one_by_one)["remap_ms_p50"],
            "wrong_words": wrong,
            "held_beside_the_slabs_mib": held_mib - before_mib - gib * 1024,
            "all_given_back": until(lambda: used_mib() < before_mib + 256),
            "keeper_is_a_gpu_process": str(keeper.hello["pid"]) in [app.strip() for app in apps],
            "keeper_loaded": keeper.hello["loaded"],
        }


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("gib", "slab_mib", "remap_ms_max"), [(16, 1024, 10), (120, 1024, 40), (16, 64, 1000)])
def test_remap_after_the_creators_sigkill(figures: dict[str, Any], gib: int, slab_mib: int, remap_ms_max: int) -> None:
    """Every byte survives the creator, the keeper costs the GPU nothing, and a remap keeps its bound (facts 3, 5)."""
    found = figures[f"remap_{gib}gib_{slab_mib}mib"] = measure_remap(gib, slab_mib)
    assert found["wrong_words"] == 0
    assert found["keeper_loaded"] == []
    assert not found["keeper_is_a_gpu_process"]
    assert found["held_beside_the_slabs_mib"] == 0
    assert found["all_given_back"]
    assert found["remap_ms_p50"] <= remap_ms_max


@pytest.mark.timeout(240)
def test_pages_survive_a_fault_of_the_active_engine(figures: dict[str, Any]) -> None:
    """Xid 31 takes the active engine; who had the pages mapped before and who maps them now see every byte."""
    gib = 16
    with Peer("none") as keeper, engine(GPU) as mapped_before, engine(GPU) as mapped_after, engine(GPU) as active:
        made = active.ask("create", count=gib, size=GIB, seed=31)
        keeper.ask("keep", made["fds"])
        mapped_before.ask("reserve", sizes=[GIB] * gib)
        mapped_before.ask("map", made["fds"], writable=True)
        close_all(made["fds"])
        fault = active.ask("fault")
        after_fault = active.ask("verify", seed=31)
        mapped_after.ask("reserve", sizes=[GIB] * gib)
        fds = keeper.ask("give")["fds"]
        imported = mapped_after.ask("map", fds, writable=True)
        close_all(fds)
        late = mapped_after.ask("verify", seed=31)
        early = mapped_before.ask("verify", seed=31)
        active.kill()
        mapped_after.ask("fill", seed=32)
        found = figures["fault"] = {
            "gib": gib,
            "active_was_told": fault.get("cause"),
            "active_is_told_again": after_fault.get("cause"),
            "map_after_fault_ms": imported.get("map_ms"),
            "wrong_words_mapped_after": late.get("wrong"),
            "wrong_words_mapped_before": early.get("wrong"),
            "wrong_words_overwritten": mapped_before.ask("verify", seed=32).get("wrong"),
            "kernel_log": kernel_log(),
        }
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(found["active_was_told"])
    assert "error" not in imported, imported
    assert found["wrong_words_mapped_after"] == found["wrong_words_mapped_before"] == 0
    assert found["wrong_words_overwritten"] == 0


def kernel_log() -> list[str]:
    """The driver's words on faults, where this user may read them."""
    lines = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=30, check=False).stdout.split("\n")
    return [line for line in lines if "Xid" in line][-5:]


def opening_fails(environment: dict[str, str]) -> str:
    """What a fresh process is told when it opens the GPU; empty if it opens."""
    code = (
        "from holdfast.memory.devices import *\n"
        f"try: open_device({GPU!r})\n"
        "except DeviceError as error: print(type(error).__name__, error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout.strip()


def test_exclusive_process_mode_is_refused_by_name(figures: dict[str, Any]) -> None:
    """A standby could not have its context: said at once, with the mend."""
    if subprocess.run(["nvidia-smi", "-c", "EXCLUSIVE_PROCESS"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not change the GPU's compute mode")
    try:
        told = figures["exclusive_mode"] = opening_fails(dict(os.environ))
    finally:
        ask_smi("-c", "DEFAULT")
    assert told.startswith("Unsupported")
    assert "exclusive-process mode" in told
    assert opening_fails(dict(os.environ)) == ""


def test_mps_is_refused_by_name(figures: dict[str, Any], tmp_path: Path) -> None:
    """Under MPS one engine's fault is everyone's: said at once, with the mend."""
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "log")}
    environment = dict(os.environ) | pipes
    try:
        for folder in pipes.values():
            Path(folder).mkdir()
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, timeout=30, check=True)
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        figures["mps"] = f"not tried: {error}"
        pytest.skip(f"no MPS daemon can be started here: {error}")
    try:
        told = figures["mps"] = opening_fails(environment)
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 1\n", env=environment, timeout=60, check=False)
    assert told.startswith("Unsupported")
    assert "MPS" in told
    assert opening_fails(dict(os.environ)) == ""
