"""`make prove-vault`: 300 kills under load, one physical copy, and remap against its floor.

The kills of all categories are mixed in one run, so that each meets what the others have left.
"""

from __future__ import annotations

import statistics
import time
from functools import cache, partial

from bench import memory
from bench.prove import Row, Rows, tell
from bench.vault.kills import CATEGORIES, Campaign

KILLS = 300
REMAP_OVER_FLOOR_MAX = 20
# Page tables and what Python itself shares are no copies of weights.
COPIES_MAX = 1.02
FIGURES = (
    "kills", "recover_ms_p50", "recover_ms_max", "commits", "adoptions", "verified", "vault_fds", "keeper_fds",
    "memfds", "physical_copies", "remap_ms_p50", "unmap_ms_p50", "floor_ms_p50", "remap_over_floor",
)  # fmt: skip


@cache
def _campaign() -> Campaign:
    """Once for all rows; the seed is printed first, so that a run's choices can be made again."""
    seed = int(time.time())
    print(f"seed {seed}", end=" ", flush=True)
    return Campaign(seed, tell).run(KILLS)


def _kills(category: str) -> Row:
    wrong, took_ms = _campaign().watch.wrong, _campaign().recover_ms[category]
    bound = "everyone else goes on; bytes intact; nothing uncommitted seen; published pages survive"
    return {
        "kills": len(took_ms),
        "recover_ms_p50": round(statistics.median(took_ms), 1) if took_ms else None,
        "recover_ms_max": round(max(took_ms), 1) if took_ms else None,
        "wrong": wrong,
        "bound": bound,
        "met": not wrong and len(took_ms) >= KILLS // len(CATEGORIES),
    }


def _leaks() -> Row:
    done = _campaign()
    did, leaked = done.watch.did, done.leaked
    row: Row = {"seed": done.seed, "leaked": leaked, "bound": "as many as before", "met": not leaked}
    row |= {"commits": did["commit"], "adoptions": did["adopt"], "verified": did["verify"]}
    if done.before is not None and done.after is not None:
        for name in ("processes", "vault_fds", "keeper_fds", "memfds"):
            row[name] = [getattr(done.before, name), getattr(done.after, name)]
    return row


def _one_copy() -> Row:
    row = memory.run(memory.MemoryBench("host-0", 2.0, 1024))
    met = row["remap_over_floor"] <= REMAP_OVER_FLOOR_MAX and row["physical_copies"] <= COPIES_MAX
    bound = f"one physical copy for two importers; remap <= {REMAP_OVER_FLOOR_MAX} x floor"
    return row | {"bound": bound, "met": met}


ROWS: Rows = {
    **{f"kill-{category}": partial(_kills, category) for category in CATEGORIES},
    "no-leaks": _leaks,
    "share-2-gib": _one_copy,
}
