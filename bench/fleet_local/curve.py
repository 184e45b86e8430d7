"""One model that its traffic scales, under a load that grows, falls and ends: how many replicas there are, how many are
wanted, and how long requests waited. Its times are shorter than the defaults, its rules are the same."""

from __future__ import annotations

import asyncio
import time

from bench.prove import Row, tell
from holdfast.testing.waiting import until
from tests.rigs.fleet.clients import END_S, Crowd
from tests.rigs.fleet.fleet_rig import FleetRig
from tests.rigs.fleet.watch import Watch

GIB, KEY, NUMBERS, MOST = 0.5, "chat", 20, 4
TOKENS = 50  # two seconds, and four blocks of KV
SIM = (
    *("--engine", "sim", "--vault-gib", "0.1", "--sim-ttft-ms", "20", "--sim-tpot-ms", "40", "--standbys", "0"),
    *("--sim-concurrency", "2", "--sim-queue", "0", "--sim-kv-blocks", "12"),
)
SCALING = (
    *("--autoscale", "--scale-wait-s", "1", "--scale-up-after-s", "1", "--scale-up-every-s", "5"),
    *("--scale-down-after-s", "6", "--scale-down-every-s", "6", "--scale-idle-s", "10"),
)
CURVE = ((0, 1), (10, 3), (25, 10), (65, 4), (95, 1), (120, 0))  # from so many seconds on, so many clients
LOOK_S = 0.5


def run() -> Row:
    with FleetRig("--queue-s", "30", nodes=2, gib=GIB) as fleet:  # a client would ask again after its 429
        fleet.told("deploy", KEY, *SIM, *SCALING, "--memory-gib", "0.2", "--wanted", "0", "--max", str(MOST))
        return asyncio.run(_curve(fleet))


async def _curve(fleet: FleetRig) -> Row:
    crowd, samples = Crowd(fleet.port), list[Row]()
    async with Watch(fleet, GIB) as watch, asyncio.timeout(CURVE[-1][0] + 2 * END_S):
        began_s = time.monotonic()

        def clients() -> int:
            now_s = time.monotonic() - began_s
            return [count for at_s, count in CURVE if at_s <= now_s][-1]

        async def one(number: int) -> None:
            if number < clients():
                await crowd.ask(KEY, (number + len(crowd.asked)) % NUMBERS, TOKENS)
            else:
                await asyncio.sleep(0.1)

        def look() -> bool:
            hot, there = watch.hot(KEY), len(watch.replicas(KEY))
            at_s = round(time.monotonic() - began_s, 1)
            samples.append({"at_s": at_s, "clients": clients(), "hot": hot, "replicas": there})
            tell(f"{at_s:.0f} s: {clients()} clients, {hot} of {there} replicas serve")
            return at_s > CURVE[-1][0] and not there

        async with crowd.asking(max(count for _, count in CURVE), one):
            await until(look, "the load to end and all replicas with it", CURVE[-1][0] + END_S, every_s=LOOK_S)
        tell("")
        over = [*watch.memory.over, *watch.over_leased]
    seen, most = crowd.row(), max(one["hot"] for one in samples)
    unix_s = time.time() - (time.monotonic() - began_s)
    return {
        **seen,
        "most_hot": most,
        "ended_s": samples[-1]["at_s"],
        "over": len(over),
        "samples": samples,
        "waits": [[round(one.at_s - unix_s, 1), round(one.wait_s, 2)] for one in crowd.asked],
        "bound": f"none lost or wrong, from none to {MOST} and to none again",
        "met": not (seen["lost"] or seen["wrong"] or over) and most == MOST,
    }
