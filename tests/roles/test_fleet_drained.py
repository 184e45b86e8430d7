"""`holdfast drain` with real processes: two nodes on one machine, while clients ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.testing.processes import kill_group
from holdfast.testing.waiting import wait_until
from tests.rigs.fleet.fleet_rig import FleetRig

SIM = ("--engine", "sim", "--vault-gib", "0.1", "--sim-ttft-ms", "5")
BOUND_S = 180.0  # on a loaded machine
CLIENTS = 3


@pytest.fixture
def fleet() -> Iterator[FleetRig]:
    with FleetRig(nodes=2) as place:
        yield place


def meanwhile(fleet: FleetRig, deed: Callable[[], Any]) -> None:
    """Do something while clients ask without a pause; every answer must be the one from before."""
    first = {number: fleet.ask("chat", number) for number in range(CLIENTS)}
    is_done = threading.Event()

    def ask_on(number: int) -> int:
        asked = 0
        while not is_done.is_set() or not asked:
            assert fleet.ask("chat", number) == first[number]
            asked += 1
        return asked

    with ThreadPoolExecutor(CLIENTS) as clients:
        asking = [clients.submit(ask_on, number) for number in first]
        try:
            deed()
        finally:
            is_done.set()
        assert all(one.result(BOUND_S) for one in asking)


def on_node(fleet: FleetRig, node: str) -> list[str]:
    return [one["id"] for one in fleet.nodes()[node]["replicas"]]


def test_a_drained_node_is_empty_and_no_answer_is_lost(fleet: FleetRig) -> None:
    """Its replica is replaced on the other node before it leaves. The node can be stopped, and used again."""
    fleet.told("deploy", "chat", *SIM, "--wanted", "2", "--wait")
    assert [len(on_node(fleet, node)) for node in ("n1", "n2")] == [1, 1]
    drained: list[str] = []
    meanwhile(fleet, lambda: drained.append(fleet.told("drain", "n2", "--timeout", "3m")))
    assert "node n2: it is empty and can be stopped" in drained[0]
    assert (len(on_node(fleet, "n1")), on_node(fleet, "n2")) == (2, [])
    assert "n2 (drained)" in fleet.told("get", "nodes")
    last = fleet.run("drain", "n1")
    assert (last.returncode, "nothing can move from n1" in last.stderr) == (1, True), last
    meanwhile(fleet, lambda: fleet.told("down", "--node", "n2"))
    assert "n2 (gone, drained)" in fleet.told("get", "nodes")
    fleet.join("n2")
    assert "n2 (drained)" in fleet.told("get", "nodes"), "a node that joins again is still cordoned"
    fleet.told("drain", "n2", "--undo")
    fleet.told("scale", "chat", "1", "--wait")
    fleet.told("deploy", "chat", *SIM, "--per-node", "1", "--max", "2", "--wanted", "2", "--wait")
    assert [len(on_node(fleet, node)) for node in ("n1", "n2")] == [1, 1]


@pytest.mark.long
def test_a_drain_goes_on_when_control_is_killed(fleet: FleetRig) -> None:
    """The next control goes on from what is written, and the command that waits notices nothing."""
    fleet.told("deploy", "chat", *SIM, "--wanted", "3", "--max", "3", "--wait")

    def drain_and_kill() -> None:
        with ThreadPoolExecutor(1) as beside:
            ended = beside.submit(fleet.run, "drain", "n2", "--timeout", "3m")
            wait_until(lambda: fleet.nodes()["n2"]["cordon"], "the cordon", BOUND_S, every_s=0.05)
            for _ in range(3):
                kill_group(fleet.record("control")["pid"])
                fleet.nodes()
            done = ended.result(BOUND_S)
        assert done.returncode == 0, done

    meanwhile(fleet, drain_and_kill)
    assert (len(on_node(fleet, "n1")), on_node(fleet, "n2")) == (3, [])
