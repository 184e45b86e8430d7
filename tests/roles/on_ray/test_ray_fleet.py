"""A fleet on a real Ray cluster of three nodes: the same commands as without Ray, and everything broken that Ray has.

What each fault cost is written to `$HOLDFAST_RAY_FIGURES`, if that is a file's name. Each test leaves a fleet of two
replicas on three nodes to the next.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.supervise.incidents import read_incidents
from holdfast.testing.processes import state_of
from tests.rigs.roles.ray_cluster import BOUND_S, DEVICES, SIM, STREAMS, RayRig, answers, note

pytestmark = [pytest.mark.processes, pytest.mark.alone]

TORCH = ("--engine", "torch", "--model", "tiny", "--kv-gib", "0.1", "--memory-gib", "0.4")


@pytest.fixture(scope="module")
def fleet(cluster: Any) -> Iterator[RayRig]:
    with RayRig(cluster) as place:
        place.told("deploy", "chat", *SIM, "--wanted", "2", "--max", "3", "--per-node", "1", "--wait")
        yield place


def _survives(fleet: RayRig, fault: str, hit: Callable[[], str], model: str = "chat", count: int = 2) -> None:
    """Streams that are under way go on with the tokens they would have had; capacity returns without what was hit."""
    unbroken = answers(fleet.streams(model))
    assert all(one.tokens and not one.wrong for one in unbroken), [one.wrong for one in unbroken]
    streams = fleet.streams(model)
    for one in streams:
        one.wait_tokens(5)
    began_s = time.monotonic()
    without = hit()
    broken = answers(streams)
    assert [one.wrong for one in broken] == [""] * STREAMS
    assert [one.tokens for one in broken] == [one.tokens for one in unbroken]
    took_s = fleet.returned(model, count, without, began_s)
    resumed = sum(one.resumed > 0 for one in broken)
    stall_s = max(max(one.gaps_s) for one in broken)
    note(fault, {"resumed": resumed, "streams": STREAMS, "worst_gap_s": stall_s, "capacity_back_s": took_s})


def _one_of(fleet: RayRig, key: str = "chat") -> str:
    return min(fleet.ready(key))


def _away_from_head(fleet: RayRig) -> str:
    """A node that has a replica, and not the cluster's own head."""
    return next(node for node in fleet.ready("chat").values() if not fleet.ray_node(node).head)


def test_ray_shows_what_a_user_of_ray_expects(fleet: RayRig) -> None:
    """Each replica is an actor of its name, each node has its agent, and what they take is counted by Ray."""
    replicas = fleet.ready("chat")
    assert len(replicas) == 2
    actors = fleet.listed("actors", "ALIVE")
    assert set(replicas) <= set(actors)
    assert {f"HoldfastAgent:local:{node}" for node in fleet.nodes()} <= set(actors)
    for name, node in replicas.items():
        assert actors[name]["class_name"] == "ModelActor"
        assert actors[name]["node_id"].startswith(node)

    def is_counted() -> bool:
        return f"0.8/{3 * DEVICES}.0 holdfast_device" in fleet.ray("status").replace("0.7999999999999998", "0.8")

    fleet.wait_until(is_counted, "Ray's count, told every few s", BOUND_S)


def test_an_actor_is_killed(fleet: RayRig) -> None:
    """Its engines die with it, its streams go on elsewhere, and the fleet brings another; its node remembers it."""
    killed: dict[str, str] = {}

    def hit() -> str:
        replica = _one_of(fleet)
        killed[replica] = fleet.ready("chat")[replica]
        fleet.kill_actor(replica)
        return replica

    _survives(fleet, "actor killed", hit)
    ((replica, node),) = killed.items()
    assert replica in [one.name for one in read_incidents(fleet.folder_of(node)) if one.role == "actor"]


def test_an_actor_is_stopped(fleet: RayRig) -> None:
    """Ray never notices; its agent does, kills it by its pid, and the fleet brings another."""
    pids: list[int] = []

    def hit() -> str:
        replica = _one_of(fleet)
        pids.append(fleet.stop_actor(replica))
        return replica

    _survives(fleet, "actor stopped", hit)
    assert state_of(pids[0]) in ("", "Z")


def test_an_agent_is_killed(fleet: RayRig) -> None:
    """No replica notices: the next agent of the node adopts them, the same processes."""
    node, engines = _away_from_head(fleet), fleet.record_of(_one_of(fleet))["pid"]
    before, agent = fleet.ready("chat"), fleet.agent_pid(node)
    streams = fleet.streams()
    for one in streams:
        one.wait_tokens(5)
    began_s = time.monotonic()
    os.kill(agent, signal.SIGKILL)
    assert [one.wrong for one in answers(streams)] == [""] * STREAMS
    assert [one.resumed for one in answers(streams)] == [0] * STREAMS
    fleet.wait_until(lambda: fleet.nodes().get(node, {}).get("agent_pid", agent) != agent, "another agent", BOUND_S)
    took_s = time.monotonic() - began_s
    fleet.wait_until(lambda: fleet.ready("chat") == before, "the same replicas", BOUND_S)
    assert fleet.record_of(_one_of(fleet))["pid"] == engines
    note("agent killed", {"resumed": 0, "streams": STREAMS, "agent_back_s": took_s})


def test_an_agent_is_stopped(fleet: RayRig) -> None:
    """Another comes in its place, ends it, and adopts its replicas. It takes as long as a node may be silent: where
    others were placed meanwhile, who is too many leaves; no stream breaks."""
    node = _away_from_head(fleet)
    agent = fleet.agent_pid(node)
    unbroken = answers(fleet.streams())
    streams = fleet.streams()
    for one in streams:
        one.wait_tokens(5)
    began_s = time.monotonic()
    os.kill(agent, signal.SIGSTOP)
    fleet.wait_until(lambda: fleet.nodes().get(node, {}).get("agent_pid", agent) != agent, "another agent", BOUND_S)
    took_s = time.monotonic() - began_s
    assert state_of(agent) in ("", "Z")
    broken = answers(streams)
    assert [one.wrong for one in broken] == [""] * STREAMS
    assert [one.tokens for one in broken] == [one.tokens for one in unbroken]
    fleet.wait_until(lambda: len(fleet.ready("chat")) == len(fleet.model("chat")["replicas"]) == 2, "two", BOUND_S)
    note("agent stopped", {"streams": STREAMS, "agent_back_s": took_s})


def test_a_raylet_is_killed(fleet: RayRig) -> None:
    """Ray ends its node with all of its actors; the fleet goes on with the others."""
    node = _away_from_head(fleet)

    def hit() -> str:
        fleet.kill_raylet(node)
        return node

    _survives(fleet, "raylet killed", hit)
    fleet.mend(node)
    fleet.wait_until(lambda: len(fleet.nodes()) == 3, "an agent on the new node", BOUND_S)


def test_a_node_is_lost(fleet: RayRig) -> None:
    """All of its processes at one stroke."""
    node = _away_from_head(fleet)

    def hit() -> str:
        fleet.kill_node(node)
        return node

    _survives(fleet, "node lost", hit)
    fleet.mend(node)
    fleet.wait_until(lambda: len(fleet.nodes()) == 3, "an agent on the new node", BOUND_S)


def test_two_devices_are_one_placement_group(fleet: RayRig) -> None:
    """A replica over two devices has both in one group on one node, and comes back as a whole."""
    fleet.told("deploy", "wide", *TORCH, "--devices", "2", "--wanted", "1", "--max", "1", "--wait", "--timeout", "300")

    def groups() -> list[Any]:
        return [one for name, one in fleet.listed("placement-groups", "CREATED").items() if ":wide:" in name]

    (group,) = groups()
    assert len(group["bundles"]) == 2
    assert len({bundle["node_id"] for bundle in group["bundles"]}) == 1

    def hit() -> str:
        replica = _one_of(fleet, "wide")
        fleet.kill_actor(replica)
        return replica

    _survives(fleet, "actor over two devices killed (torch)", hit, model="wide", count=1)
    assert len(groups()) == 1
    fleet.told("evict", "wide", "--wait")


def test_nothing_is_left_on_the_cluster(fleet: RayRig) -> None:
    """Who is told to stop takes its actors and placement groups away."""
    fleet.told("down")
    assert fleet.listed("actors", "ALIVE") == {}
    assert fleet.listed("placement-groups", "CREATED") == {}
    fleet.wait_until(lambda: "holdfast_device (" not in fleet.ray("status"), "Ray's count, told every few s", BOUND_S)
    assert not list(fleet.pids())
