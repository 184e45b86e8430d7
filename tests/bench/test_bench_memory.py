"""The memory bench at a small size: one physical copy, remap near its floor, errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.timeout(120)]


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "bench", "memory", "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_two_importers_share_one_copy_and_remap_is_near_its_floor() -> None:
    """Both importers' shares add up to the weights once; remap takes at most 20 times its floor (with a half more for a
    busy machine)."""
    done = _bench("--device", "host-0", "--gib", "0.25", "--slab-mib", "64", "--rounds", "30")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["physical_copies"] == pytest.approx(1.0, abs=0.02), row
    assert row["remap_over_floor"] <= 30, row
    assert {"remap_ms_p50", "unmap_ms_p50", "floor_ms_p50", "slabs"} <= set(row)


def test_more_than_there_is_gets_one_line() -> None:
    """Weights that do not fit are refused before anything is taken, in one line."""
    for size, said in (("2000", "are free"), ("100000", "use a larger --slab-mib")):
        done = _bench("--gib", size)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert said in done.stderr
