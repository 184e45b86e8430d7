"""`python -m bench.health --soak`: nothing is broken, and nothing may be found. Clients for twice the places there are,
on cores that are all taken, for as long as you like: a check that judges by lateness alone convicts a worker here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop

from bench.health.judging import alarms
from bench.health.rig import FaultRig, breakable
from bench.health.run import LOOK_EVERY_S, START_S, HealthBench, Tell
from bench.overload import STORIES, hammer, judge
from holdfast.testing.clients import read_answer
from holdfast.testing.deployment import Deployment
from holdfast.testing.waiting import in_thread, until
from holdfast.testing.workload import Asking, Workload

PLACES, QUEUE = 4, 4  # of each worker
CLIENTS = 2  # for each place
BURNERS = 1  # for each core, beside what serving takes
TELL_EVERY_S = 30.0


def soak(bench: HealthBench, seconds: float, tell: Tell = lambda text: None) -> dict[str, Any]:
    """For so long; `missed` says what is not as it must be."""
    with bench.deployment(concurrency=PLACES, queue=QUEUE) as deployment:
        return uvloop.run(_soak(bench, deployment, seconds, tell))


async def _soak(bench: HealthBench, deployment: Deployment, seconds: float, tell: Tell) -> dict[str, Any]:
    places = bench.workers * (PLACES + QUEUE)
    async with breakable(deployment) as rig:
        await until(rig.is_whole, "every worker's first check", START_S, every_s=LOOK_EVERY_S)
        load = Workload(STORIES, bench.tokens, bench.seed)
        expected = [read_answer(one) for one in await Asking(deployment.port, load).once()]
        tell(f"{CLIENTS * places} clients for {places} places, {seconds:g} s")
        first, over = len(rig.verdicts.history), asyncio.Event()
        rig.take_cores(BURNERS, 2 * seconds)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(hammer([deployment.port], [CLIENTS * places], load, expected, over))
            await _wait(rig, first, seconds, tell)
            over.set()
        await rig.calm_down()
        found = alarms(rig.verdicts.history[first:], {})
        ended = [name for name in deployment.worker_names if rig.has_ended(name)]
        page = (await in_thread(deployment.get, "/metrics"))[1].decode()
    seen = judge(asking.result(), [page])
    figures = ("completed", "clients_starved", "refused_429", "refused_otherwise")
    lost = {"streams_lost": seen["lost"], "wrong_answers": seen["wrong"], "streams_moved": seen["resumed"]}
    must = {"false_positives": len(found), "workers_ended": len(ended), **lost}
    missed = [f"{name} {count}" for name, count in must.items() if count] + [f"false: {text}" for text in found]
    if not seen["completed"]:
        missed.append("nothing was answered")
    told = {"seconds": seconds, "workers": bench.workers, "canary_interval_s": bench.canary_interval_s}
    return {"faults": [], **must, **{name: seen[name] for name in figures}, **told, "missed": missed}


async def _wait(rig: FaultRig, first: int, seconds: float, tell: Tell) -> None:
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, TELL_EVERY_S))
        tell(f"{max(0.0, end_s - time.monotonic()):.0f} s left, {len(alarms(rig.verdicts.history[first:], {}))} alarms")
