"""`make test` runs both of its halves even if the first one fails, and then fails itself."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Stands in for the venv's python: notes how it was called, and fails for the half named by $FAILS.
PYTHON = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in *"-m $FAILS"*) exit 3 ;; esac
"""


def make(target: str, folder: Path, *, fails: str) -> tuple[int, list[str]]:
    """Run a target with a stand-in for python; return make's status and the expressions that select tests."""
    (folder / "bin").mkdir(parents=True)
    (python := folder / "bin" / "python").write_text(PYTHON)
    python.chmod(0o755)
    (folder / ".installed-dev").touch()
    calls = folder / "calls"
    words = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    ended = subprocess.run(
        ["make", target, f"VENV={folder}"], cwd=ROOT, env=words | {"CALLS": str(calls), "FAILS": fails},
        capture_output=True, timeout=60,
    )  # fmt: skip
    asked = [re.split(" tests| bench/| --ignore", line.split(" -m ")[1])[0] for line in calls.read_text().splitlines()]
    return ended.returncode, asked


@pytest.mark.parametrize("fails", ["not long and not alone", "alone and not long", "neither"])
def test_both_halves_are_run(tmp_path: Path, fails: str) -> None:
    """`make test` fails if either half does, and runs both in each case."""
    status, asked = make("test", tmp_path / "venv", fails=fails)
    assert asked == ["not long and not alone", "alone and not long"]
    assert (status == 0) == (fails == "neither")


def test_both_halves_of_the_long_ones_are_run(tmp_path: Path) -> None:
    """So does `make test-all`."""
    status, asked = make("test-all", tmp_path / "venv", fails="long and not alone")
    assert asked == ["long and not alone", "long and alone"]
    assert status != 0
