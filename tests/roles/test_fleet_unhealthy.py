"""A fleet whose replicas are up and do not serve: real processes, whose place is broken or whose breaker is open."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.testing.waiting import wait_until
from tests.rigs.fleet.fleet_rig import FleetRig

SIM = ("--engine", "sim", "--vault-gib", "0.1", "--sim-ttft-ms", "5", "--ready-s", "60", "--allow-chaos")
BOUND_S = 180.0  # on a loaded machine


@pytest.fixture
def fleet() -> Iterator[FleetRig]:
    with FleetRig("--breaker-failures", "1", "--breaker-open-s", "600", devices=3) as place:
        yield place


def _of(fleet: FleetRig, replica: str) -> dict[str, int]:
    """Return the pids of a replica's processes, by name."""
    mark = f"-{replica.removeprefix('r')}-"
    return {name: one["pid"] for name, one in fleet.processes_of("n1").items() if mark in name}


def _break_place(fleet: FleetRig, replica: str) -> None:
    """End all processes of a replica, and leave its vault no socket to listen on: it crashes again and again."""
    (one,) = [one for one in fleet.model("chat")["replicas"] if one["id"] == replica]
    socket = fleet.folder / "gms" / f"gms_{one['devices'][0]}.sock"
    socket.unlink()
    (socket / "in the way").mkdir(parents=True)
    pids = _of(fleet, replica).values()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "it to end", BOUND_S)


def _ids(fleet: FleetRig) -> set[str]:
    return {one["id"] for one in fleet.model("chat")["replicas"]}


@pytest.mark.long
def test_a_replica_that_does_not_serve_leaves_first_and_is_replaced(fleet: FleetRig) -> None:
    """Fewer are wanted: the one whose vault crashes leaves, though it came last. The other one's place breaks, too:
    another replica is started where there is room, and a request that waits is answered as before."""
    fleet.told("deploy", "chat", *SIM, "--wanted", "2", "--wait")
    tokens = fleet.ask("chat", 1)
    healthy = {name for name in fleet.engine_pids() if "-1-engine" in name}
    _break_place(fleet, "r2")
    fleet.told("scale", "chat", "1", "--wait")
    assert set(fleet.engine_pids()) == healthy
    assert _ids(fleet) == {"r1"}
    assert fleet.ask("chat", 1) == tokens
    for path in (fleet.folder / "gms").glob("gms_*.sock/*"):
        shutil.rmtree(path.parent)
    _break_place(fleet, "r1")
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(fleet.ask, "chat", 1)
        wait_until(lambda: fleet.model("chat")["unmet"], "a reason to be told", BOUND_S, every_s=0.5)
        wait_until(lambda: _ids(fleet) == {"r3"}, "another replica in its place", BOUND_S, every_s=0.5, logs=fleet.logs)
        assert asked.result(BOUND_S) == tokens
    told = (fleet.folder / "logs" / "control.log").read_text()
    assert "ModelActor:chat:r1 on n1 is away" in told


@pytest.mark.long
def test_a_replica_that_health_takes_the_traffic_of_is_replaced_and_then_leaves(fleet: FleetRig) -> None:
    """Its streams end without a token, its breaker opens: another is started first, and it drains when that serves."""
    # Without standbys: an engine with one hands over to it when its breaker opens, and the replica is sound again.
    fleet.told("deploy", "chat", *SIM, "--standbys", "0", "--wanted", "2", "--max", "3", "--wait")
    tokens = fleet.ask("chat", 1)
    for name in _of(fleet, "r2"):
        if "vault" not in name:
            fleet.chaos(name, "zero_tokens")

    numbers = itertools.count(2)

    def is_doubted() -> bool:
        with ThreadPoolExecutor(8) as clients:  # at once: one after the other, all would go to one replica
            asked = [clients.submit(fleet.ask, "chat", number) for number in itertools.islice(numbers, 8)]
        assert all(len(one.result(BOUND_S)) == len(tokens) for one in asked)
        return any(one["health"] == "doubted" for one in fleet.model("chat")["replicas"])

    wait_until(is_doubted, "its breaker to open", BOUND_S, every_s=0.1, logs=fleet.logs)
    wait_until(lambda: _ids(fleet) == {"r1", "r3"}, "another in its place", BOUND_S, every_s=0.5, logs=fleet.logs)
    assert fleet.ask("chat", 1) == tokens
    told = (fleet.folder / "logs" / "control.log").read_text()
    placed, drained = told.index("place ModelActor:chat:r3"), told.index("drain ModelActor:chat:r2")
    assert placed < drained
    assert "its breaker is open" in told[drained:]
