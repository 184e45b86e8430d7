"""One model is scaled 1, 4, 1, 0, 1 while clients ask: no request is lost, and requests are held while there is none.
Of four that come at once the first that is ready answers, while the others are on their way.
"""

from __future__ import annotations

import asyncio
import time

from bench.prove import Row
from holdfast.testing.waiting import in_thread, until
from tests.rigs.fleet.clients import END_S, Asked, Crowd
from tests.rigs.fleet.fleet_rig import FleetRig
from tests.rigs.fleet.watch import Watch

GIB, KEY = 0.5, "chat"
SIM = ("--engine", "sim", "--vault-gib", "0.1", "--sim-ttft-ms", "5", "--sim-tpot-ms", "5", "--standbys", "0")
CLIENTS, NUMBERS = 6, 20
CALM_S = 2.0  # of asking between two steps


def run() -> Row:
    with FleetRig(nodes=2, gib=GIB) as fleet:
        fleet.told("deploy", KEY, *SIM, "--memory-gib", "0.2", "--max", "4", "--wait")
        return asyncio.run(_steps(fleet))


async def _steps(fleet: FleetRig) -> Row:
    crowd, took = Crowd(fleet.port), {}

    async def one(number: int) -> None:
        await crowd.ask(KEY, (number + len(crowd.asked)) % NUMBERS)

    async with Watch(fleet, GIB) as watch, asyncio.timeout(3 * END_S):
        async with crowd.asking(CLIENTS, one):
            before = 1
            for count in (4, 1, 0, 1):
                began_s = time.monotonic()
                await _scale(fleet, watch, count)
                took[f"{before} to {count}"] = round(time.monotonic() - began_s, 1)
                if count:
                    await asyncio.sleep(CALM_S)
                else:
                    await until(lambda: crowd.under_way == CLIENTS, "all clients to be held")
                before = count
        held = [one for one in crowd.asked if one.wait_s > 1.0]
        first = await _first_of_four(fleet, watch, crowd)
        over = [*watch.memory.over, *watch.over_leased]
    seen = crowd.row()
    return {
        **seen,
        "step_s": took,
        "held": len(held),
        **first,
        "over": len(over),
        "nodes_used": len({action.node for _, action in watch.orders.values() if action.devices}),
        "bound": "none lost or wrong, all clients held at none, the first replica answers before the last is ready",
        "met": not (seen["lost"] or seen["wrong"] or over)
        and len(held) >= CLIENTS
        and first["first_answer_s"] < first["ready_s"][-1],
    }


async def _scale(fleet: FleetRig, watch: Watch, count: int) -> None:
    await in_thread(fleet.told, "scale", KEY, str(count))
    await watch.until_hot(KEY, count)


async def _first_of_four(fleet: FleetRig, watch: Watch, crowd: Crowd) -> Row:
    """From none, with a request held."""
    await _scale(fleet, watch, 0)
    held = asyncio.create_task(crowd.ask(KEY, 1))
    await until(lambda: crowd.under_way == 1, "a request to be held")
    before, began_s = set(watch.ready_s), time.time()
    await _scale(fleet, watch, 4)
    answered: Asked = await held
    ready_s = sorted(at_s - began_s for name, at_s in watch.ready_s.items() if name not in before)
    first_s = answered.at_s + answered.wait_s - began_s
    return {"first_answer_s": round(first_s, 2), "ready_s": [round(one, 2) for one in ready_s]}
