"""No false alarm: engines slowed 20 times on a machine whose cores are all taken, and nothing is moved."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from dataclasses import dataclass
from typing import Any

import uvloop

from holdfast.testing.deployment import Deployment
from holdfast.testing.load import Load, run_streams


@dataclass(frozen=True, slots=True)
class CalmBench:
    seconds: float = 60.0
    busy: int = 16
    slow_factor: float = 20.0
    streams: int = 64


def _spin(until: float) -> None:
    while time.monotonic() < until:
        pass


async def _load_for(deployment: Deployment, bench: CalmBench) -> int:
    """Keep streams open for the whole time; how many were lost."""
    deadline = time.monotonic() + bench.seconds
    lost = 0
    seed = 1
    # 20 ms x 20 = 0.4 s a token: 40 tokens is 16 s and more on taken cores.
    while time.monotonic() < deadline:
        answers = await run_streams(deployment.port, Load(bench.streams, 40, seed))
        lost += sum(not answer.done for answer in answers)
        seed += 1
        await asyncio.sleep(0)
    return lost


def run(bench: CalmBench) -> dict[str, Any]:
    with Deployment(workers=2) as deployment:
        until = time.monotonic() + bench.seconds
        spinners = [multiprocessing.Process(target=_spin, args=(until,), daemon=True) for _ in range(bench.busy)]
        for spinner in spinners:
            spinner.start()
        for name in deployment.worker_names:
            deployment.chaos(name, "slow", factor=bench.slow_factor)
        lost = uvloop.run(_load_for(deployment, bench))
        for spinner in spinners:
            spinner.join(30)
        deployment.wait_until(lambda: bool(deployment.health()), "the frontend to answer")
        facts = deployment.health()
        verdicts = [line for line in deployment.log("frontend").splitlines() if " -> " in line]
    return {
        "seconds": bench.seconds,
        "busy_processes": bench.busy,
        "slow_factor": bench.slow_factor,
        "streams_lost": lost,
        "resumed": facts["resumed_total"],
        "verdicts": verdicts[-20:],
    }
