"""Nodes that join a fleet: real processes, three nodes on one machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from holdfast.testing.processes import processes_in
from holdfast.testing.waiting import wait_until
from tests.rigs.fleet.fleet_rig import FleetRig

SIM = ("--engine", "sim", "--vault-gib", "0.1", "--sim-ttft-ms", "5")
BOUND_S = 90.0  # on a loaded machine


@pytest.fixture
def fleet() -> Iterator[FleetRig]:
    with FleetRig(nodes=2) as place:
        yield place


@pytest.mark.long
def test_a_node_joins_and_leaves(fleet: FleetRig) -> None:
    """Replicas are spread over the nodes there are; Ctrl-C ends those of its node and nothing else, and others take
    their place; nobody of that name joins beside it."""
    node = fleet.start("n3", fleet.command("node", "--node", "n3", "--node-devices", "1", "--node-gib", "0.5"))
    wait_until(lambda: set(fleet.nodes()) == {"n1", "n2", "n3"}, "it to join", BOUND_S, logs=fleet.logs)
    wait_until(lambda: "is up: node n3 of the fleet local" in fleet.log("n3"), "it to say so", BOUND_S, logs=fleet.logs)
    twice = fleet.run("node", "--node", "n3", "--detach")
    assert (twice.returncode, "node n3 runs already" in twice.stderr) == (1, True), twice
    fleet.told("deploy", "chat", *SIM, "--wanted", "3", "--wait")
    replicas = fleet.model("chat")["replicas"]
    assert sorted(one["node"] for one in replicas) == ["n1", "n2", "n3"]
    tokens = fleet.ask("chat", 1)
    elsewhere = fleet.engine_pids()  # of n1 and n2
    node.send_signal(signal.SIGINT)
    assert node.wait(BOUND_S) == 0, fleet.log("n3")
    assert not [words for words in processes_in(fleet.folder).values() if f"{fleet.folder_of('n3')}/" in words]
    assert fleet.ask("chat", 1) == tokens
    wait_until(lambda: fleet.model("chat")["hot"] == 3, "another in its place", BOUND_S, every_s=0.2)
    assert set(elsewhere.items()) <= set(fleet.engine_pids().items()), "who was elsewhere is there still"
    assert set(fleet.nodes()) == {"n1", "n2"}
    ps = fleet.told("ps", "--node", "n2")
    assert "local-chat" in ps
    fleet.told("down", "--node", "n2")
    assert set(fleet.nodes()) == {"n1"}
    assert fleet.ask("chat", 1) == tokens
    fleet.told("down")
    wait_until(lambda: not fleet.pids(), "everything to end", BOUND_S)
