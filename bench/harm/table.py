"""`python -m bench.harm.table [FILE]`: the table of docs/health.md, from what `make prove-harm` wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.harm.cells import CASES
from bench.harm.judging import shown

RESULTS = ROOT / "bench" / "results" / "harm.json"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a line for each check, with a column for each of its four alarms."""
    titles = ("check", *(f"{case}: {text}" for case, text in CASES.items()))
    lines = [titles, ("---",) * len(titles)]
    lines += [(name, *(shown(row["cells"], case) for case in CASES)) for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS).read_text())["rows"]))
