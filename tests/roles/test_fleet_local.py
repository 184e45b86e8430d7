"""A fleet on one machine, by its commands: real processes, killed and replaced while requests are answered."""

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
BOUND_S = 90.0  # on a loaded machine


@pytest.fixture
def fleet() -> Iterator[FleetRig]:
    with FleetRig() as place:
        yield place


def _meanwhile(fleet: FleetRig, model: str, deed: Callable[[], Any]) -> None:
    """Do something while clients ask, and go on after it for a while; every answer must be the one from before."""
    first = {number: fleet.ask(model, number) for number in range(4)}
    is_done = threading.Event()

    def ask_on() -> None:
        more = 8
        while more:
            for number, tokens in first.items():
                assert fleet.ask(model, number) == tokens
                more -= is_done.is_set() and more > 0

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask_on) for _ in range(4)]
        try:
            deed()
        finally:
            is_done.set()
        for one in asking:
            one.result(BOUND_S)


@pytest.mark.long
def test_a_model_is_deployed_scaled_and_evicted(fleet: FleetRig) -> None:
    """Every request meanwhile has the answer that it always has; no device is over its lease, and nothing is left."""
    fleet.told("deploy", "chat", *SIM, "--max", "3", "--wait")
    tokens = fleet.ask("chat", 1)
    assert len(tokens) == 40
    _meanwhile(fleet, "chat", lambda: fleet.told("scale", "chat", "3", "--wait"))
    replicas = fleet.model("chat")["replicas"]
    assert {one["name"] for one in replicas} == {f"ModelActor:chat:r{number}" for number in (1, 2, 3)}
    assert all(leased <= total for leased, total in fleet.leased().values())
    _meanwhile(fleet, "chat", lambda: fleet.told("scale", "chat", "1", "--wait"))
    assert fleet.ask("chat", 1) == tokens
    fleet.told("evict", "chat", "--wait")
    assert fleet.engine_pids() == {}
    assert {leased for leased, _ in fleet.leased().values()} == {0}


@pytest.mark.long
def test_whoever_is_killed_nothing_is_lost_or_started_twice(fleet: FleetRig) -> None:
    """Engines, the control and the node's agent: what is wanted comes to be, and who lives is the same process."""
    fleet.told("deploy", "chat", *SIM, "--wanted", "2", "--wait")

    def kill_and_see(name: str) -> None:
        kill_group(fleet.record(name)["pid"])

    def engine_dies() -> None:
        for name in list(fleet.engine_pids())[:2]:
            kill_and_see(name)
        fleet.told("models", "--json")

    _meanwhile(fleet, "chat", engine_dies)
    # Its control dies in the middle of a change: the next one goes on from what is written.
    pids = fleet.engine_pids()

    def control_dies() -> None:
        fleet.told("scale", "chat", "1")
        kill_and_see("control")
        wait_until(lambda: fleet.model("chat")["hot"] == 1, "one replica to be left", BOUND_S, every_s=0.2)

    _meanwhile(fleet, "chat", control_dies)
    left = fleet.engine_pids()
    assert set(left.items()) <= set(pids.items()), "who stayed is who was there"
    # The supervisor, which is the node's agent: the next one adopts what runs.
    fleet.kill_agent("n1")

    def begin_again() -> None:
        fleet.up()
        wait_until(lambda: fleet.model("chat")["hot"] == 1, "the node to tell of it again", BOUND_S, every_s=0.2)

    _meanwhile(fleet, "chat", begin_again)
    assert fleet.engine_pids() == left
    fleet.told("scale", "chat", "2", "--wait")
    assert len(fleet.model("chat")["replicas"]) == 2
