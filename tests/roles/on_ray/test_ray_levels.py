"""WARM replicas on a real Ray cluster, and a fleet beside other people's jobs there."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.roles.ray_cluster import BOUND_S, DEVICES, SIM, RayRig, note

pytestmark = [pytest.mark.processes, pytest.mark.alone]

EXAMPLES = Path(__file__).parents[3] / "examples"
# Of 0.5 GiB one has a device for itself.
WARM = (*SIM[:-1], "0.4", "--host-gib", "0.12")
HOLD = f"""
import ray, sys, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=0, resources={{"holdfast_device": {DEVICES}}})
def hold():
    time.sleep({2 * BOUND_S})
ray.get(hold.options(scheduling_strategy=NodeAffinitySchedulingStrategy(sys.argv[2], soft=False)).remote())
"""


@pytest.fixture(scope="module")
def fleet(cluster: Any) -> Iterator[RayRig]:
    with RayRig(cluster, host_gib=0.5) as place:
        yield place


def group_of(node: str, model: str) -> str:
    return f"Holdfast:local:{node}:ModelActor:{model}:r1"


def until(fleet: RayRig, model: str, **wanted: Any) -> None:
    def met() -> bool:
        seen = fleet.model(model)
        return all(seen[name] == value for name, value in wanted.items())

    fleet.wait_until(met, f"{model} to be {wanted}", BOUND_S)


def test_replicas_give_their_devices_to_others_and_come_back(fleet: RayRig) -> None:
    """One that goes to host memory gives its devices back in Ray's own count, so that two others fit where it was; it
    outlives its node's agent there; and woken, once they have gone the same way, it is the same processes with the same
    answer."""
    node = min(fleet.nodes())
    host = f"Holdfast:local:{node}:host"
    fleet.told("deploy", "a", *WARM, "--node", node, "--wait")
    right = fleet.ask("a", 1)
    groups = fleet.listed("placement-groups", "CREATED")
    assert {group_of(node, "a"), host} <= set(groups)
    assert groups[host]["bundles"][0]["unit_resources"]["memory"] == 2**29
    actors = {name: pid for name, pid in fleet.actor_pids().items() if "a-" in name}
    fleet.told("scale", "a", "0")
    until(fleet, "a", hot=0, warm=1)
    for model in ("b", "c"):  # Ray would have room for one beside it
        fleet.told("deploy", model, *WARM, "--node", node, "--wait")
    assert group_of(node, "a") not in fleet.listed("placement-groups", "CREATED")
    agent = fleet.agent_pid(node)
    os.kill(agent, signal.SIGKILL)
    fleet.wait_until(lambda: fleet.nodes().get(node, {}).get("agent_pid", agent) != agent, "another agent", BOUND_S)
    until(fleet, "a", hot=0, warm=1)
    for model in ("b", "c"):
        fleet.told("scale", model, "0")
        until(fleet, model, hot=0, warm=1)
    began_s = time.monotonic()
    fleet.told("scale", "a", "1")
    assert fleet.ask("a", 1) == right
    note("woken from WARM, with its command", {"answered_s": time.monotonic() - began_s})
    assert {name: pid for name, pid in fleet.actor_pids().items() if "a-" in name} == actors
    assert group_of(node, "a") in fleet.listed("placement-groups", "CREATED")
    for model in ("a", "b", "c"):
        fleet.told("evict", model, "--forget", "--wait")


def test_a_floor_of_warm_is_kept_and_woken(fleet: RayRig) -> None:
    """It is loaded by way of a device, moved, and answers once somebody wants it HOT."""
    fleet.told("deploy", "d", *WARM, "--min", "1", "--max", "1", "--wanted", "0", "--floor", "warm")
    until(fleet, "d", hot=0, warm=1)
    fleet.told("scale", "d", "1")
    assert len(fleet.ask("d", 1)) == 40
    fleet.told("evict", "d", "--forget", "--wait")


def test_a_manifest_is_the_same_as_without_ray(fleet: RayRig) -> None:
    """The example for one machine, onto this fleet: who is wanted comes, who is not comes when asked for."""
    fleet.told("apply", "-f", str(EXAMPLES / "fleet.yaml"))
    assert len(fleet.ask("words", 1)) == len(fleet.ask("more-words", 1)) == 40
    assert {"ModelActor:words:r1", "ModelActor:more-words:r1"} <= set(fleet.listed("actors", "ALIVE"))
    for model in ("words", "more-words"):
        fleet.told("evict", model, "--forget", "--wait")


def test_devices_that_another_job_holds_are_told_as_the_reason(fleet: RayRig) -> None:
    """Whoever waits for a replica where Ray has given the devices to somebody else is told so; once they are free it
    comes."""
    node = min(fleet.nodes())
    holder = fleet.start("hold", (sys.executable, "-c", HOLD, fleet.cluster.address, fleet.ray_node(node).node_id))
    fleet.wait_until(lambda: f"{DEVICES}.0/{3 * DEVICES}.0 holdfast" in fleet.ray("status"), "another job", BOUND_S)
    fleet.told("deploy", "e", *SIM, "--node", node)
    says = f"holdfast_device free on {node}; `ray status` shows who has"
    fleet.wait_until(lambda: says in fleet.told("models"), "the reason", BOUND_S)
    holder.kill()
    until(fleet, "e", hot=1)
    fleet.told("evict", "e", "--forget", "--wait")
