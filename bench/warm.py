"""`python -m bench.warm`: what moving weights between a device and host memory takes, by a real vault with its keeper.

One run: weights are written by a process that ends, demoted and promoted again and again, and at the end read by an
importer, which finds every 2 MiB of them in its place. After each move the vault's own count is checked.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from bench.command import Progress, loading, main, show
from bench.memory import GIB, MIB, BenchProcess, commit_weights
from holdfast.cli.arguments import CommandOptions, Json
from holdfast.core.errors import UserError
from holdfast.memory.client.calls import VaultRefused, demote, open_connection, promote
from holdfast.memory.protocol import GetStatus, Moved
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.settings import Environment
from holdfast.spec.settings import about

SLAB_BYTES = GIB  # the default, and what facts 5 speaks of
READY_S = 30.0
FREED_S = 60.0  # for pinned memory to be given back, which is done after a promotion was answered
LOOK_S = 0.02
REST_S = 1.0  # between two moves, as in a fleet: what a driver does with memory that was just given back is not counted


@dataclass(frozen=True, slots=True)
class WarmBench:
    """What to measure."""

    device: str = "host-0"
    gib: float = 1.0
    rounds: int = 5

    @property
    def total_bytes(self) -> int:
        """In whole pieces of the granularity every device has."""
        return max(1, round(self.gib * GIB / (2 * MIB))) * 2 * MIB


@dataclass(slots=True)
class Way:
    """One way's figures, in milliseconds: while bytes were on their way, all that the vault did, and as its asker saw
    it."""

    copy_ms: list[float] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)
    asked_ms: list[float] = field(default_factory=list)

    def add(self, moved: Moved, asked_s: float) -> None:
        self.copy_ms.append(moved.copy_ms)
        self.took_ms.append(moved.took_ms)
        self.asked_ms.append(asked_s * 1000)

    def figures(self, name: str, total_bytes: int) -> dict[str, Any]:
        copy_ms = statistics.median(self.copy_ms)
        return {
            f"{name}_copy_ms_p50": round(copy_ms, 1),
            f"{name}_copy_gb_per_s_p50": round(total_bytes / 1e6 / copy_ms, 1),
            f"{name}_took_ms_p50": round(statistics.median(self.took_ms), 1),
            f"{name}_asked_ms_p50": round(statistics.median(self.asked_ms), 1),
            f"{name}_asked_ms_max": round(max(self.asked_ms), 1),
        }


def run(bench: WarmBench, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Everything, in a folder of its own; nothing is left behind."""
    folder = Path(tempfile.mkdtemp(prefix="hf-bench-", dir="/tmp"))
    path = str(folder / "gms.sock")
    settings = VaultSettings(bench.device, path, host_budget_bytes=bench.total_bytes)
    vault = VaultProcesses(settings, folder / "vault.log")
    shared = {"device": bench.device, "path": path, "slab_bytes": SLAB_BYTES, "total_bytes": bench.total_bytes}
    try:
        vault.start()
        commit_weights(shared, folder, progress)
        try:
            result = asyncio.run(_measure(bench, path))
        except (VaultRefused, OSError) as error:
            raise UserError(f"cannot measure: {error}") from error
        with BenchProcess(shared | {"role": "import", "engine_id": 0}, folder / "importer.log") as importer:
            importer.said()  # that every piece is where it belongs
        return result
    finally:
        vault.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _measure(bench: WarmBench, path: str) -> dict[str, Any]:
    down, up = Way(), Way()
    for _ in range(bench.rounds):
        began_s = time.perf_counter()
        down.add(await demote(path), time.perf_counter() - began_s)
        await _counts(path, device_bytes=0, host_bytes=bench.total_bytes)
        await asyncio.sleep(REST_S)
        began_s = time.perf_counter()
        up.add(await promote(path), time.perf_counter() - began_s)
        await _counts(path, device_bytes=bench.total_bytes, host_bytes=0)
    return {
        "device": bench.device,
        "gib": round(bench.total_bytes / GIB, 3),
        "rounds": bench.rounds,
        **down.figures("demote", bench.total_bytes),
        **up.figures("promote", bench.total_bytes),
    }


async def _counts(path: str, **wanted: int) -> None:
    """Wait until the vault counts so many bytes; UserError if it does not."""
    until_s = time.perf_counter() + FREED_S
    connection, _ = await open_connection(path, "bench-warm", -1, READY_S)
    try:
        while True:
            facts = json.loads((await connection.call(GetStatus, READY_S)).facts)
            found = {name: facts[name] for name in wanted}
            if found == wanted:
                return
            if time.perf_counter() > until_s:
                raise UserError(f"the vault counts {found}, and should {wanted}")
            await asyncio.sleep(LOOK_S)
    finally:
        connection.close()


class WarmOptions(CommandOptions, frozen=True):
    """Measure how long moving weights takes between a device and host memory (demote and promote, repeated)."""

    device: Annotated[str, about("Device: host-0, a GPU's UUID (nvidia-smi -L), or cuda-0.")] = "host-0"
    gib: Annotated[float, about("Size of the weights; needs the same amount of host memory.", "GiB", min=0.002)] = 1.0
    rounds: Annotated[int, about("Number of demote/promote rounds.", min=1)] = 5
    json: Json = False

    def run(self, env: Environment) -> int:
        with loading(f"writing {self.gib:g} GiB to {self.device}") as progress:
            result = run(WarmBench(self.device, self.gib, self.rounds), progress)
        return show(result, self.json)


if __name__ == "__main__":
    main(WarmOptions, "warm")
