"""What sharing weights through a vault costs: unmap and remap against their floor, and the memory importers use.

One run, real processes: a keeper and its vault, a writer that commits and ends, and importers. The floor is a bare
socket exchange of the same descriptors plus the same map calls, taken in turn with what it is compared to.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.memory.devices import is_host
from holdfast.memory.layout import SLABS_MAX
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings

GIB = 1024**3
MIB = 1024**2
# Two engines, an active and a standby, are what a device has.
IMPORTERS = 2
END_S = 30.0  # for a process to leave; tearing down many GiB of mappings takes the kernel a while

Progress = Callable[[int, int], None]  # bytes written so far, of all


@dataclass(frozen=True, slots=True)
class MemoryBench:
    """What to measure."""

    device: str = "host-0"
    gib: float = 2.0
    slab_mib: int = 1024
    rounds: int = 50

    @property
    def total_bytes(self) -> int:
        """In whole pieces of the granularity every device has."""
        return max(1, round(self.gib * GIB / (2 * MIB))) * 2 * MIB

    @property
    def slabs(self) -> int:
        return -(-self.total_bytes // (self.slab_mib * MIB))


class Child:
    """A process of the bench: JSON lines out, commands in."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        command = [sys.executable, "-m", "holdfast.bench.memory_child", json.dumps(settings)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._log = log

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def next(self) -> dict[str, Any]:
        """Its next line; UserError with its own words if it could not go on."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text().strip().splitlines()[-1:] or ["it ended without a word"]
            raise UserError(f"a process of the bench failed: {last[0]}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise UserError(f"cannot measure: {said['error']}")
        return said

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.next()


def run(bench: MemoryBench, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Everything, in a folder of its own; nothing is left behind."""
    if bench.slabs > SLABS_MAX:
        raise UserError(f"{bench.slabs} slabs are more than the {SLABS_MAX} a vault keeps; use a larger --slab-mib")
    folder = Path(tempfile.mkdtemp(prefix="hf-bench-", dir="/tmp"))
    path = str(folder / "gms.sock")
    vault = VaultProcesses(VaultSettings(bench.device, path), folder / "vault.log")
    shared = {
        "device": bench.device,
        "path": path,
        "slab_bytes": bench.slab_mib * MIB,
        "total_bytes": bench.total_bytes,
    }
    try:
        vault.start()
        _write(shared, folder, bench.total_bytes, progress)
        with ExitStack() as stack:
            importers = [
                stack.enter_context(Child(shared | {"role": "import", "engine_id": place}, folder / f"{place}.log"))
                for place in range(IMPORTERS)
            ]
            for importer in importers:
                importer.next()
            copies = _copies(bench, importers)
            return _figures(bench, importers[0].ask(f"measure {bench.rounds}")) | copies
    finally:
        vault.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _write(shared: dict[str, Any], folder: Path, total_bytes: int, progress: Progress) -> None:
    with Child(shared | {"role": "write", "engine_id": 0}, folder / "writer.log") as writer:
        while "committed" not in (said := writer.next()):
            progress(said["written"], total_bytes)


def _copies(bench: MemoryBench, importers: list[Child]) -> dict[str, Any]:
    """All importers have touched every page: their shares of shared pages add up to the copies there are."""
    if not is_host(bench.device):
        return {"pss_mib": None, "physical_copies": None}
    pss_bytes = sum(int(importer.ask("pss")["pss_bytes"]) for importer in importers)
    return {
        "importers": len(importers),
        "pss_mib": round(pss_bytes / MIB, 1),
        "physical_copies": round(pss_bytes / bench.total_bytes, 3),
    }


def _figures(bench: MemoryBench, took: dict[str, list[float]]) -> dict[str, Any]:
    p50 = {name: statistics.median(values) for name, values in took.items()}
    return {
        "device": bench.device,
        "gib": round(bench.total_bytes / GIB, 3),
        "slab_mib": bench.slab_mib,
        "slabs": bench.slabs,
        "rounds": bench.rounds,
        "remap_ms_p50": round(p50["remap_ms"], 3),
        "unmap_ms_p50": round(p50["unmap_ms"], 3),
        "floor_ms_p50": round(p50["floor_ms"], 3),
        "remap_over_floor": round(p50["remap_ms"] / p50["floor_ms"], 1),
        "remap_ms_max": round(max(took["remap_ms"]), 3),
        # Remap is answered by other processes, the floor by nobody: on a busy machine their ratio grows.
        "load_1m": round(os.getloadavg()[0], 1),
    }
