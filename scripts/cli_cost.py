"""What each command that only looks costs, in CPU seconds of its process, the interpreter's start included.

The least of some runs: a busy machine only adds. `python scripts/cli_cost.py [RUNS]`, with the interpreter that has
Holdfast installed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

COMMANDS = (
    "--version",
    "--help",
    "ps",
    "ps --json",
    "top --json",
    "incidents",
    "get",
    "diff -f examples/upgrade-v1.yaml",
    "rollout status",
    "rollout history",
    "memory status",
    "down",
    "up --help",
    "worker --help",
    "chaos nobody slow",
    "chat hello",
)
FLOORS = {"python -c pass": "pass", "python -c 'import asyncio, msgspec'": "import asyncio, msgspec"}


def cpu_s(command: list[str], runs: int) -> float:
    """Of the cheapest run."""
    least = float("inf")
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return least


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOLDFAST_STATE_DIR"] = folder  # nothing runs there
        for name, code in FLOORS.items():
            print(f"{cpu_s([sys.executable, '-c', code], runs):.3f}  {name}")
        for words in COMMANDS:
            print(f"{cpu_s([sys.executable, '-m', 'holdfast', *words.split()], runs):.3f}  holdfast {words}")


if __name__ == "__main__":
    main()
