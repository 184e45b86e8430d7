"""`python -m bench.memory`: unmap and remap of shared weights against their floor, and the memory importers use.

One run, real processes: a keeper and its vault, a writer that commits and ends, and importers (`bench.memory_child`).
The floor is a bare socket exchange of the same descriptors plus the same map calls, taken in turn with what it is
compared to.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bench import ROOT
from bench.command import Progress, loading, main, show
from holdfast.cli.arguments import CommandOptions, Json
from holdfast.core.errors import UserError
from holdfast.memory.layout import SLABS_MAX
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.settings import Environment
from holdfast.spec.names import is_host
from holdfast.spec.settings import about
from tests.rigs.children import Child, ChildFailed

GIB = 1024**3
MIB = 1024**2
# Two engines, an active and a standby, are what a device has.
IMPORTERS = 2
SILENT_S = 600.0  # a writer of a large model says how far it is; an importer waits for it


@dataclass(frozen=True, slots=True)
class MemoryBench:
    """Says which device, size and rounds to measure."""

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


class BenchProcess(Child):
    """A process of the bench; what it could not do is the user's to hear."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        super().__init__("-m", "bench.memory_child", json.dumps(settings), log=log, folder=ROOT)

    def said(self) -> dict[str, Any]:
        try:
            heard: dict[str, Any] = self.next(SILENT_S)
        except ChildFailed as error:
            raise UserError(f"a process of the bench failed: {error}") from None
        if "error" in heard:
            raise UserError(f"cannot measure: {heard['error']}")
        return heard

    def asked(self, order: str) -> dict[str, Any]:
        self.tell(order)
        return self.said()


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
        commit_weights(shared, folder, progress)
        with ExitStack() as stack:
            roles = (shared | {"role": "import", "engine_id": place} for place in range(IMPORTERS))
            importers = [stack.enter_context(BenchProcess(role, folder / f"{role['engine_id']}.log")) for role in roles]
            for importer in importers:
                importer.said()
            copies = _copies(bench, importers)
            return _figures(bench, importers[0].asked(f"measure {bench.rounds}")) | copies
    finally:
        vault.stop()
        shutil.rmtree(folder, ignore_errors=True)


def commit_weights(shared: dict[str, Any], folder: Path, progress: Progress) -> None:
    """Write the weights in a process of its own, which has ended when this returns."""
    with BenchProcess(shared | {"role": "write", "engine_id": 0}, folder / "writer.log") as writer:
        while "committed" not in (said := writer.said()):
            progress(said["written"], shared["total_bytes"])


def _copies(bench: MemoryBench, importers: list[BenchProcess]) -> dict[str, Any]:
    """All importers have touched every page: their shares of shared pages add up to the copies there are."""
    if not is_host(bench.device):
        return {"pss_mib": None, "physical_copies": None}
    pss_bytes = sum(int(importer.asked("pss")["pss_bytes"]) for importer in importers)
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
        # Remap is answered by other processes, the floor by none: on a busy machine their ratio grows.
        "load_1m": round(os.getloadavg()[0], 1),
    }


class MemoryOptions(CommandOptions, frozen=True):
    """Measure what sharing weights through a vault costs: remap and unmap times, and the memory used."""

    device: Annotated[str, about("Device: host-0, a GPU's UUID (nvidia-smi -L), or cuda-0.")] = "host-0"
    gib: Annotated[float, about("Size of the weights.", "GiB", min=0.002)] = 2.0
    slab_mib: Annotated[
        int, about("Slab size, a multiple of 2; remapping takes longer with more slabs.", "MiB", min=2)
    ] = 1024
    rounds: Annotated[int, about("Number of unmap/remap rounds.", min=1)] = 50
    json: Json = False

    def run(self, env: Environment) -> int:
        if self.slab_mib % 2:
            raise UserError(f"--slab-mib must be a multiple of 2, the granularity of every device; got {self.slab_mib}")
        with loading(f"writing {self.gib:g} GiB to {self.device}") as progress:
            result = run(MemoryBench(self.device, self.gib, self.slab_mib, self.rounds), progress)
        return show(result, self.json)


if __name__ == "__main__":
    main(MemoryOptions, "memory")
