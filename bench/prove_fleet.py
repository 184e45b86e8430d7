"""`make prove-fleet`: the fleet's planner in worlds that are data alone; no process is started, no device is needed.

10,000 random worlds (`worlds`), in each of which nodes come and go, models of many sizes are wanted, replicas crash and
messages are lost, and in one of ten nodes are drained; one that broke a promise is named by its seed. Models that take
turns on too little memory (`turns`). And what a pass costs for 10,000 replicas of 1,000 models on 2,000 nodes
(`scale`).
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from bench.fleet import scale, turns
from bench.prove import Row, Rows, cores, tell
from tests.rigs.worlds.fleet_storms import Drains, Storm, play

WORLDS, WORLDS_S_MAX, BATCH = 10_000, 120.0, 100
DRAINS_EVERY = 10  # one world in so many has nodes that are drained and versions that are replaced
FIGURES = (
    "worlds", "broken", "seconds", "cpu_s", "evictions", "restarts", "requests", "answered", "swaps", "wait_p50_s",
    "wait_p99_s", "replicas", "place_all_s", "at_rest_s", "one_node_changed_ms",
)  # fmt: skip


def batch(first: int) -> tuple[Counter[str], list[str], float]:
    began_s, counts, broken = time.process_time(), Counter[str](), []
    for seed in range(first, first + BATCH):
        try:
            counts += play(seed, Storm if seed % DRAINS_EVERY else Drains)
        except AssertionError as error:
            broken.append(str(error)[:500])
    return counts, broken, time.process_time() - began_s


def worlds() -> Row:
    began_s, cpu_s, counts, broken = time.monotonic(), 0.0, Counter[str](), list[str]()
    with ProcessPoolExecutor(cores()) as pool:
        for done, (found, wrong, took_s) in enumerate(pool.map(batch, range(0, WORLDS, BATCH)), 1):
            counts += found
            broken += wrong
            cpu_s += took_s
            tell(f"{done * BATCH} of {WORLDS} worlds, {len(broken)} broken")
    tell("")
    own_s = cpu_s / cores()  # what it takes where nothing else runs
    return {
        "worlds": WORLDS,
        "broken": len(broken),
        "seconds": round(time.monotonic() - began_s, 1),
        "cpu_s": round(cpu_s, 1),
        **{str(what): count for what, count in sorted(counts.items())},
        "first_broken": broken[:5],
        "bound": f"none broken, within {WORLDS_S_MAX:g} s of all cores' CPU time",
        "met": not broken and own_s <= WORLDS_S_MAX,
    }


ROWS: Rows = {"worlds": worlds, "turns": turns.run, "scale": scale.run}
