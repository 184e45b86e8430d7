"""What a kill costs on a GPU, and what the fences are for: `python -m bench.failover_gpu.measure`.

Parts: `direct` (memory of the engine's own: it can be had past the GPU fence; an engine that trusts the lock alone is
refused),
`vault` (everything mapped ahead: from the kill to the CPU fence, the first finished kernel, the GPU fence) and `late`
(planted late writes never reach what an heir believes). Real processes, real SIGKILL, real vaults. Each part is written
down as soon as it is done. On host-0 the same processes run without a GPU, to try the bench itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.failover_gpu.chain import Chain
from bench.failover_gpu.engine import Settings
from bench.prove import Row, about_run, machine_of, run_rows
from holdfast.spec.names import is_host
from tests.rigs.gpu.smi import gpu_uuid

GIB, MIB = 1024**3, 1024**2
FIGURES = ("lock", "owner_gone", "cpu_fence", "adopted", "first_kernel", "gpu_fence", "room", "allocated")
FIGURES_SHOWN = ("kills", "woke", "failed", *(f"{name}_ms_{of}" for name in FIGURES for of in ("p50", "max")))
# An engine that tries at once hears the vault only afterwards.
UNFENCED_FIGURES = ("lock", "refused", "allocated", "gpu_fence")
# All that may be asked of the driver between the kill and the first finished kernel.
KERNEL_ONLY = ["cuLaunchKernel", "cuCtxSynchronize"]


@dataclass(frozen=True, slots=True)
class GpuBench:
    """What to measure; `gib` is an engine's direct memory, and the other parts' pools are in proportion to it."""

    device: str = "cuda-0"
    gib: float = 100.0
    fenced_kills: int = 50
    unfenced_kills: int = 20
    vault_kills: int = 30
    late_kills: int = 20
    queue_ms: int = 450

    @property
    def on_host(self) -> bool:
        return is_host(self.device)

    def bytes_of(self, share: float, unit: int) -> int:
        return max(1, round(self.gib * share * GIB / unit)) * unit

    def direct(self) -> Settings:
        return Settings("direct", self.device, "", "", direct_bytes=self.bytes_of(1.0, 2 * MIB))

    def vault(self) -> Settings:
        """Blocks as an 8B model's are (facts 8), 16 GiB of weights and 64 of pool beside 100 of direct memory."""
        block = 64 * 1024 if self.on_host else 2 * MIB
        pool, weights = self.bytes_of(0.64, 2 * MIB), self.bytes_of(0.16, 2 * MIB)
        count = pool // block
        return Settings(
            "vault", self.device, "", "", weights_bytes=weights, private_bytes=2 * MIB, block_bytes=block,
            block_count=count, full_count=count // 8, open_count=max(1, min(64, count // 8)),
        )  # fmt: skip

    def late(self) -> Settings:
        """Larger blocks, so that a queue the driver takes whole is long."""
        block = 64 * 1024 if self.on_host else 8 * MIB
        count = self.bytes_of(0.08, 8 * MIB) // block
        return Settings(
            "late", self.device, "", "", private_bytes=2 * MIB, block_bytes=block, block_count=count,
            full_count=count // 2, open_count=max(1, min(16, count // 8)), queue_ms=self.queue_ms,
        )  # fmt: skip


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def figures(rows: list[Row], names: Sequence[str]) -> Row:
    """Return p50 and max of every time from the kill on, in milliseconds."""
    shown: Row = {}
    for name in names:
        took = [row[f"{name}_ms"] for row in rows if f"{name}_ms" in row]
        if took:
            shown |= {f"{name}_ms_p50": round(statistics.median(took), 2), f"{name}_ms_max": round(max(took), 2)}
    return shown


def kills(settings: Settings, count: int, how: str = "", names: Sequence[str] = FIGURES) -> tuple[list[Row], Row]:
    """So many; those that woke, and what is told of all."""
    with Chain(settings, tell) as chain:
        rows = chain.rounds(count, how)
    good = [row for row in rows if "failed" not in row]
    failed = [row["failed"] for row in rows if "failed" in row]
    return good, {"kills": len(rows), "woke": len(good), "failed": failed, **figures(good, names)}


def run_direct(bench: GpuBench, *, fenced: bool) -> Row:
    """Measure direct memory, with the GPU fence or without."""
    count = bench.fenced_kills if fenced else bench.unfenced_kills
    names = FIGURES if fenced else UNFENCED_FIGURES
    good, found = kills(bench.direct(), count, "fenced" if fenced else "unfenced", names)
    found |= {"gib": round(bench.gib, 3), "bound": "every wake succeeds", "met": len(good) == count}
    if fenced:
        return found
    refused = [row["free_bytes"] / GIB for row in good if row.get("refused")]
    found |= {"out_of_memory": len(refused), "bound": "shows how many fail"}
    if refused:
        found["free_gib_when_refused_p50"] = round(statistics.median(refused), 1)
    return found


def run_vault(bench: GpuBench) -> Row:
    """Vault memory: the way from the kill to the first kernel, and how long the GPU fence takes after it."""
    settings = bench.vault()
    good, found = kills(settings, bench.vault_kills)
    allowed = [] if bench.on_host else KERNEL_ONLY
    found |= _sizes(settings) | {"wrong_words": sum(row["wrong_words"] for row in good)}
    found["other_driver_calls"] = sum(row["driver_calls"] != allowed for row in good)
    met = len(good) == bench.vault_kills and not found["wrong_words"] and not found["other_driver_calls"]
    bound = "every wake serves from intact memory; kill to first kernel: no driver call but launch and synchronize"
    return found | {"bound": bound, "met": met}


def run_late(bench: GpuBench) -> Row:
    """Planted late writes."""
    settings = bench.late()
    good, found = kills(settings, bench.late_kills)
    found |= _sizes(settings) | {"late_writes_landed_in": sum(row["late_words"] > 0 for row in good)}
    for name in ("late_words", "late_ops", "planted", "passes"):
        found[f"{name}_p50"] = statistics.median(row[name] for row in good) if good else None
    for name in ("wrong_words", "handed_out_early"):
        found[name] = sum(row[name] for row in good)
    kept = not found["wrong_words"] and not found["handed_out_early"]
    met = len(good) == bench.late_kills and kept and found["late_writes_landed_in"] > 0
    bound = "late writes land, and no whole block, and nothing the heir wrote, is ever wrong"
    return found | {"bound": bound, "met": met}


def _sizes(settings: Settings) -> Row:
    return {
        "pool_gib": round(settings.block_bytes * settings.block_count / GIB, 3),
        "weights_gib": round(settings.weights_bytes / GIB, 3),
        "block_mib": settings.block_bytes / MIB,
        "whole_blocks": settings.full_count,
        "open_blocks": settings.open_count,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="failover_gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", help="direct-fenced, vault, late-writes, direct-unfenced; default: all")
    parser.add_argument("--device", default="cuda-0")
    parser.add_argument("--gib", type=float, default=100.0)
    parser.add_argument("--kills", type=int, default=0, help="in every part; default: 50, 30, 20, 20")
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args(argv)
    device = gpu_uuid(asked.device)
    bench = GpuBench(device, asked.gib, *[asked.kills] * 4) if asked.kills else GpuBench(device, asked.gib)
    parts: dict[str, Callable[[], Row]] = {
        "direct-fenced": lambda: run_direct(bench, fenced=True),
        "vault": lambda: run_vault(bench),
        "late-writes": lambda: run_late(bench),
        "direct-unfenced": lambda: run_direct(bench, fenced=False),
    }
    rows = {name: part for name, part in parts.items() if name in (asked.parts or parts)}
    words = ["python -m bench.failover_gpu.measure", *argv]
    return 0 if run_rows(rows, asked.out, about_run(" ".join(words), machine_of(device)), FIGURES_SHOWN, {}) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
