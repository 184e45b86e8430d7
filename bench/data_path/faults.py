"""The fault matrix: 64 open streams, two workers, one of them hit in mid-stream, and what the clients saw.

Each case runs in a deployment of its own: first unbroken, then broken, with the same requests and seeds. And no false
alarm: engines slowed 20 times on a machine whose cores are all taken, and nothing is moved.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from typing import Any

import uvloop

from holdfast.testing.deployment import Deployment
from holdfast.testing.load import Load, Outcome, compare, hit_in_the_middle, run_streams

BUSY, SLOW_FACTOR = 16, 20.0  # processes that take all cores, and how much slower engines are

HITS: dict[str, Callable[[Deployment, str], Any]] = {
    "kill": lambda deployment, name: deployment.kill(name),
    "stop": lambda deployment, name: deployment.signal(name, signal.SIGSTOP),
    "wedge": lambda deployment, name: deployment.chaos(name, "wedge"),
    "reset": lambda deployment, name: deployment.chaos(name, "reset"),
    "terminate": lambda deployment, name: deployment.signal(name, signal.SIGTERM),
    "error": lambda deployment, name: deployment.chaos(name, "error_after", tokens=3),
    "cut": lambda deployment, name: deployment.chaos(name, "cut"),
}
# Worst stall each fault may cause, in milliseconds.
STALL_MS_MAX = {"kill": 150, "stop": 2000, "wedge": 2000, "reset": 150, "terminate": 150, "error": 150, "cut": 150}


def run_case(fault: str, load: Load | None = None) -> Outcome:
    """One row of the matrix."""
    load = load or Load()
    with Deployment(workers=2) as deployment:
        unbroken = uvloop.run(run_streams(deployment.port, load))
        broken = uvloop.run(hit_in_the_middle(deployment, load, lambda: HITS[fault](deployment, "worker-0")))
        return compare(fault, unbroken, broken)


def run_stop_and_continue(load: Load, continue_after_s: float) -> tuple[Outcome, list[str]]:
    """SIGSTOP, and SIGCONT while the moved streams still run: what the worker then sends must reach nobody.

    Also tells the verdicts the frontend went through until it trusts the worker again."""

    def hit() -> None:
        deployment.signal("worker-0", signal.SIGSTOP)
        time.sleep(continue_after_s)
        deployment.signal("worker-0", signal.SIGCONT)

    with Deployment(workers=2) as deployment:
        unbroken = uvloop.run(run_streams(deployment.port, load))
        broken = uvloop.run(hit_in_the_middle(deployment, load, hit))
        deployment.wait_until(lambda: len(deployment.alive_workers()) == 2, "the worker to be trusted again", 20.0)
        log = deployment.log("frontend").splitlines()
    verdicts = [line.split(" -> ")[1].split(":")[0] for line in log if " -> " in line]
    return compare("stop", unbroken, broken), verdicts[2:]


def _spin(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


def run_calm(seconds: float, streams: int) -> dict[str, Any]:
    """Streams are open all the time, on slow engines and cores that are taken."""
    lost, seed = 0, 0
    with Deployment(workers=2) as deployment:
        until_s = time.monotonic() + seconds
        spinners = [multiprocessing.Process(target=_spin, args=(until_s,), daemon=True) for _ in range(BUSY)]
        for spinner in spinners:
            spinner.start()
        for name in deployment.worker_names:
            deployment.chaos(name, "slow", factor=SLOW_FACTOR)
        while time.monotonic() < until_s:
            seed += 1
            # 20 ms x 20 = 0.4 s a token: 40 tokens is 16 s and more on taken cores.
            answers = uvloop.run(run_streams(deployment.port, Load(streams, 40, seed)))
            lost += sum(not answer.done for answer in answers)
        for spinner in spinners:
            spinner.join(30)
        deployment.wait_until(lambda: bool(deployment.health()), "the frontend to answer")
        resumed = deployment.health()["resumed_total"]
    told = {"seconds": seconds, "busy_processes": BUSY, "slow_factor": SLOW_FACTOR}
    return told | {"streams_lost": lost, "resumed": resumed}
