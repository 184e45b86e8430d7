"""A worker killed in the middle of an answer, however long it takes to find out which one has it."""

from __future__ import annotations

from holdfast.testing.deployment import Deployment

SLOWER = 10.0


def slow_down(deployment: Deployment, factor: float = SLOWER) -> None:
    """Make answers that are asked for next so slow that a test can look at them."""
    for name in deployment.worker_names:
        deployment.chaos(name, "slow", factor=factor)


def speed_up(deployment: Deployment) -> None:
    """Return all workers to their usual pace."""
    for name in deployment.worker_names:
        deployment.chaos(name, "clear")


def serving(deployment: Deployment, streams: int = 1) -> str:
    """The worker that has so many streams."""
    found: list[str] = []

    def look() -> bool:
        facts = {name: deployment.worker_facts(name) for name in deployment.worker_names}
        found[:] = [name for name, fact in facts.items() if fact["running"] + fact["waiting"] >= streams]
        return bool(found)

    deployment.wait_until(look, "a worker to have the stream")
    return found[0]


def kill_serving(deployment: Deployment) -> str:
    """Kill the one that has the stream, which the other then ends at its usual pace; its name."""
    victim = serving(deployment)
    for name in set(deployment.worker_names) - {victim}:
        deployment.chaos(name, "clear")
    deployment.kill(victim)
    return victim
