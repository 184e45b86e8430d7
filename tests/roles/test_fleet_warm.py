"""WARM replicas of a fleet on one machine: moved to host memory and back, killed on the way, and asked meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.memory.client.calls import VaultStatus, vault_status
from holdfast.testing.processes import VAULT, vault_processes
from holdfast.testing.waiting import wait_until
from tests.rigs.fleet.fleet_rig import FleetRig

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

MIB = 2**20
# Weights of 98 MiB and a little KV: of two models there is room for one on the device, and for both in the host.
SIM = ("--engine", "sim", "--vault-gib", "0.1", "--sim-ttft-ms", "5", "--memory-gib", "0.2", "--host-gib", "0.12")
BOUND_S = 90.0  # on a loaded machine


@pytest.fixture
def fleet() -> Iterator[FleetRig]:
    with FleetRig(devices=1, gib=0.3, host_gib=0.3) as place:
        yield place


def socket_of(fleet: FleetRig, model: str) -> str:
    (launch,) = (fleet.folder / "run").glob(f"*-{model}-*-vault.launch")
    found: str = json.loads(launch.read_bytes())["socket_path"]
    return found


def said(fleet: FleetRig, model: str) -> VaultStatus:
    """By its vault itself."""
    return asyncio.run(vault_status(socket_of(fleet, model)))


def until(fleet: FleetRig, model: str, **wanted: Any) -> None:
    def met() -> bool:
        seen = fleet.model(model)
        return all(seen[name] == value for name, value in wanted.items())

    wait_until(met, f"{model} to be {wanted}", BOUND_S, every_s=0.2)


def goes_warm(fleet: FleetRig, model: str) -> None:
    fleet.told("scale", model, "0")
    until(fleet, model, hot=0, warm=1)


def test_two_models_on_memory_for_one_answer_in_turn(fleet: FleetRig) -> None:
    """Each is answered as at first, from host memory back on the device; at no time do both vaults have more there
    than there is, by their own count."""
    fleet.told("deploy", "a", *SIM, "--wait")
    right = {"a": fleet.ask("a", 1)}
    fleet.told("deploy", "b", *SIM)
    right["b"] = fleet.ask("b", 1)
    for asked, other in (("a", "b"), ("b", "a")):
        assert fleet.ask(asked, 1) == right[asked]
        here, away = said(fleet, asked), said(fleet, other)
        assert (here.weights, here.host_bytes, away.weights, away.device_bytes) == ("RO", 0, "WARM", 0)
        assert here.device_bytes <= 0.3 * 1024 * MIB
        until(fleet, other, hot=0, warm=1)
        (node,) = fleet.nodes().values()
        assert list(node["host"]["leases"]) == [f"ModelActor:{other}:r1"]
        assert [list(one["leases"]) for one in node["devices"]] == [[f"ModelActor:{asked}:r1"]]


def test_one_that_sleeps_outlives_its_engines_and_its_agent_and_not_its_vault(fleet: FleetRig) -> None:
    """The next agent finds it WARM, with the same processes. Engines that start anew wait. With its vault dead its
    weights are gone: it leaves, and never comes to the device by itself."""
    fleet.told("deploy", "a", *SIM, "--wait")
    right = fleet.ask("a", 1)
    goes_warm(fleet, "a")
    pids = fleet.engine_pids()
    fleet.kill_agent("n1")
    fleet.up()
    until(fleet, "a", hot=0, warm=1)
    assert fleet.engine_pids() == pids
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not set(pids.values()) & set(fleet.engine_pids().values()), "new engines", BOUND_S)
    assert (said(fleet, "a").weights, said(fleet, "a").device_bytes) == ("WARM", 0)
    fleet.told("scale", "a", "1")
    assert fleet.ask("a", 1) == right
    goes_warm(fleet, "a")
    (vault,) = (pid for pid, role in vault_processes(socket_of(fleet, "a")).items() if role == VAULT)
    os.kill(vault, signal.SIGKILL)
    until(fleet, "a", hot=0, warm=0, replicas=[])
    assert {leased for leased, _ in fleet.leased().values()} == {0}
    fleet.told("scale", "a", "1")
    assert fleet.ask("a", 1) == right


def test_a_floor_of_warm_is_kept_and_woken(fleet: FleetRig) -> None:
    """It is loaded by way of the device, moved, and answers once somebody wants it HOT."""
    fleet.told("deploy", "a", *SIM, "--min", "1", "--max", "1", "--wanted", "0", "--floor", "warm")
    until(fleet, "a", hot=0, warm=1)
    assert (said(fleet, "a").weights, said(fleet, "a").device_bytes) == ("WARM", 0)
    fleet.told("scale", "a", "1")
    assert len(fleet.ask("a", 1)) == 40
