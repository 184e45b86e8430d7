"""What the `make prove-…` commands share: rows that are run, shown with their bound, and written to a results file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Rows = Mapping[str, Callable[[], Row]]


def prove(command: str, about: str, rows: Rows, out: Path, figures: Sequence[str], argv: list[str]) -> int:
    """Run the rows asked for (default: all), show `figures` of each, write them; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog=command, description=about)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"only these: {', '.join(rows)}")
    parser.add_argument("--out", type=Path, default=out, help="where to write the results")
    chosen = parser.parse_args(argv)
    unknown = [name for name in chosen.rows if name not in rows]
    if unknown:
        parser.error(f"unknown row {unknown[0]}; there are: {', '.join(rows)}")
    results: dict[str, Any] = json.loads(chosen.out.read_text())["rows"] if chosen.rows and chosen.out.exists() else {}
    for name in chosen.rows or rows:
        print(f"{name:24}", end=" ", flush=True)
        results[name] = rows[name]()
        print("met " if results[name]["met"] else "MISSED", shown(results[name], figures), flush=True)
        write(chosen.out, command, results)  # after each: what took ten minutes is not lost with the next row
    return 0 if all(row["met"] for row in results.values()) else 1


def shown(row: Row, figures: Sequence[str]) -> str:
    return ", ".join(f"{key} {row[key]}" for key in figures if key in row) + f"  ({row['bound']})"


def write(path: Path, command: str, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "command": f"make {command}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }
    path.write_text(json.dumps({"about": about, "rows": results}, indent=1) + "\n")
