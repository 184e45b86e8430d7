"""Three models, two simulated and one that computes, on memory for one and a half of them; requests to all at random,
and engines and vaults killed at random."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable

from bench.prove import Row, tell
from holdfast.fleet.desired import HYSTERESIS
from holdfast.testing.processes import vault_processes
from holdfast.testing.waiting import in_thread
from tests.rigs.fleet.clients import END_S, Crowd
from tests.rigs.fleet.fleet_rig import FIRST, FleetRig
from tests.rigs.fleet.watch import Watch

EACH_GIB, GIB = 0.2, 0.3
SIM = ("--engine", "sim", "--vault-gib", "0.18", "--sim-ttft-ms", "5", "--sim-tpot-ms", "5")
TORCH = ("--engine", "torch", "--model", "tiny", "--kv-gib", "0.15", "--exact", "--torch-threads", "1")
MODELS = {"ant": SIM, "bee": (*SIM, "--sim-revision", "2"), "cat": TORCH}
NUMBERS = 12  # requests of each model that differ
ASK_EVERY_S = 0.5  # on average: more than half of a turn's requests come for a model that is not there
KILLS = ("engine", "engine", "engine", "vault", "keeper", "vault and keeper", "replica")
KILL_EVERY_S = (4.0, 12.0)


def run(seconds: float, seed: int) -> Row:
    with FleetRig(devices=1, gib=GIB) as fleet:
        for key, words in MODELS.items():
            fleet.told("deploy", key, *words, "--memory-gib", str(EACH_GIB), "--wanted", "1")
        return asyncio.run(_storm(fleet, seconds, random.Random(seed))) | {"seed": seed}


async def _storm(fleet: FleetRig, seconds: float, rng: random.Random) -> Row:
    crowd, kills, began_s = Crowd(fleet.port), Counter[str](), time.monotonic()
    async with Watch(fleet, GIB) as watch:

        async def one(number: int) -> None:
            asking.create_task(crowd.ask(rng.choice(list(MODELS)), rng.randrange(NUMBERS)))
            await asyncio.sleep(rng.expovariate(1 / ASK_EVERY_S))

        async with asyncio.timeout(seconds + END_S), asyncio.TaskGroup() as asking, crowd.asking(1, one):
            while (left_s := seconds - (time.monotonic() - began_s)) > 0:
                await asyncio.sleep(min(left_s, rng.uniform(*KILL_EVERY_S)))
                kind = rng.choice(KILLS)
                kills[kind] += await in_thread(_kill, fleet, kind, rng)
                tell(f"{seconds - left_s:.0f} of {seconds:g} s, {len(crowd.asked)} answers, {watch.swaps} swaps")
        tell("")
        took_s = time.monotonic() - began_s
        return _row(crowd, watch, took_s) | {"kills": dict(kills), "killed": kills.total()}


def _row(crowd: Crowd, watch: Watch, took_s: float) -> Row:
    seen = crowd.row()
    allowed = int(took_s / HYSTERESIS.resident_s) + 1
    residences_s = sorted(round(one, 1) for one in watch.residences_s)
    over = [*watch.memory.over, *watch.over_leased]
    good = not (seen["lost"] or seen["wrong"] or over) and set(seen["wait_ms"]) == set(MODELS)
    return {
        **seen,
        "seconds": round(took_s, 1),
        "swaps": watch.swaps,
        "swaps_allowed": allowed,
        "resident_s": HYSTERESIS.resident_s,
        "residences_s": residences_s,  # of those that gave way
        "vault_samples": watch.memory.samples,
        "most_mib": {device: round(size / 2**20, 1) for device, size in watch.memory.most.items()},
        "device_mib": round(GIB * 1024, 1),
        "over": len(over),
        "first_over": over[:3],
        "bound": "none lost or wrong, no device over, and no model gives way before its time",
        "met": good and watch.swaps <= allowed and all(one >= HYSTERESIS.resident_s - 1.0 for one in residences_s),
    }


# -- what is killed


def _kill(fleet: FleetRig, kind: str, rng: random.Random) -> bool:
    """Return True if there was a process to kill."""
    processes = fleet.processes_of(FIRST)
    engines = [one["pid"] for one in processes.values() if one["role"] == "worker"]
    sockets = fleet.vault_sockets(FIRST)
    vaults = vault_processes(rng.choice(sockets)) if sockets else {}
    if kind == "engine":
        return _end(rng.sample(engines, min(1, len(engines))))
    if kind == "replica":
        return _end([*engines, *vaults])
    return _end(pid for pid, role in vaults.items() if role in kind)


def _end(pids: Iterable[int]) -> bool:
    ended = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(pid, signal.SIGKILL)
            ended = True
    return ended
