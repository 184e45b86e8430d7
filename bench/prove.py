"""`python -m bench.prove NAME [ROW…]`, which `make prove-NAME` runs: rows, each with its bound, in a results file.

A proof is a module of this folder: its ROWS are functions that measure, its FIGURES what is shown of what they found.
One that has options of its own (`add_options`) makes its rows of what was chosen (`rows`), and may say where it ran
(`machine`). Each row has what it is
compared with measured in the same run. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ROOT
from holdfast.spec.names import is_host
from tests.rigs.gpu.smi import gpu_names

Row = dict[str, Any]
Rows = Mapping[str, Callable[[], Row]]


def main(argv: list[str]) -> int:
    """Run the rows asked for (default: all) of the proof named first."""
    files = (ROOT / "bench").glob("prove_*.py")
    proofs = sorted(file.stem.removeprefix("prove_").replace("_", "-") for file in files)
    if not argv or argv[0] not in proofs:
        print(f"name one of {', '.join(proofs)}, and its rows if not all are meant", file=sys.stderr)
        return 2
    name, *words = argv
    proof = importlib.import_module(f"bench.prove_{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"prove-{name}", description=proof.__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="only these; default: all")
    out = ROOT / "bench" / "results" / f"{name}.json"
    parser.add_argument("--out", type=Path, default=out, help="where to write the results")
    if has_options := hasattr(proof, "add_options"):
        proof.add_options(parser)
    chosen = parser.parse_intermixed_args(words)
    rows: Rows = proof.rows(chosen) if has_options else proof.ROWS
    unknown = [row for row in chosen.rows if row not in rows]
    if unknown:
        parser.error(f"unknown row {unknown[0]}; there are: {', '.join(rows)}")
    kept: dict[str, Row] = json.loads(chosen.out.read_text())["rows"] if chosen.rows and chosen.out.exists() else {}
    asked = {row: rows[row] for row in chosen.rows or rows}
    machine = proof.machine(chosen) if hasattr(proof, "machine") else this_machine()
    met = run_rows(asked, chosen.out, about_run(f"make prove-{name}", machine), proof.FIGURES, kept)
    return 0 if met else 1


def run_rows(rows: Rows, out: Path | None, about: Row, figures: Sequence[str], results: dict[str, Row]) -> bool:
    """Run them, show `figures` of each, write them beside the `results` of others; whether all bounds are met."""
    for name, row in rows.items():
        print(f"{name:24}", end=" ", flush=True)
        began_s = time.monotonic()
        results[name] = row() | {"took_s": round(time.monotonic() - began_s, 1)}
        print("met " if results[name]["met"] else "MISSED", shown(results[name], figures), flush=True)
        if out is not None:  # after each: what took ten minutes is not lost with the next row
            write_rows(out, about, results)
    return all(row["met"] for row in results.values())


def write_rows(out: Path, about: Row, rows: Mapping[str, Row]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def about_run(command: str, machine: str) -> Row:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"command": command, "date": today, "machine": machine}


def cores() -> int:
    """That this process may use: those it may run on, or as many as its container's quota is worth."""
    seen = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(seen, int(quota) // int(period)))
    return seen


def this_machine() -> str:
    return f"{cores()} cores, {platform.machine()}, Python {platform.python_version()}"


def machine_of(device: str) -> str:
    """Return what a results file says of the machine: its GPUs, if `device` is one, and its cores."""
    return "; ".join([*([] if is_host(device) else gpu_names()), this_machine()])


def tell(text: str) -> None:
    """How far it is, on a screen only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def shown(row: Row, figures: Sequence[str]) -> str:
    return ", ".join(f"{key} {row[key]}" for key in figures if key in row) + f"  ({row['bound']})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
