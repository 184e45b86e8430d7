"""The fault matrix: 64 open streams, two workers, one of them hit in mid-stream, and what the clients saw.

Each case runs in a deployment of its own: first unbroken, then broken, with the same requests and seeds.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import uvloop

from holdfast.testing.deployment import Deployment
from holdfast.testing.load import Load, Outcome, compare, hit_in_the_middle, run_streams

Hit = Callable[[Deployment, str], Any]

HITS: dict[str, Hit] = {
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
