"""Whether what is wanted of a model is there, or could ever be, as nodes tell it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from holdfast.cli.fleet.observed import ObservedFleet
from holdfast.cli.fleet.waiting import how_far, is_in_place, trouble_of
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import Health, LeasedMemory, Node, Replica, ReplicaPhase
from holdfast.fleet.outlook import too_large
from holdfast.fleet.records import DesiredModel, FleetRecord, NodeRecord
from holdfast.fleet.scaling import Scaling
from tests.rigs.cli.fleet_terminal import GIB, replica


def make_desired(**said: Any) -> DesiredModel:
    model = Model(key="m", version="v", device_bytes=GIB, host_bytes=GIB, replicas_max=9, **said)
    return DesiredModel(name="m", model=model, manifest="")


def fleet(desired: DesiredModel, replicas: list[Replica], *sizes: list[int]) -> ObservedFleet:
    """Nodes n1, n2, … with devices of so many GiB, and 2 in the host."""
    nodes = {}
    for place, gib in enumerate(sizes or ([8],)):
        name = f"n{place + 1}"
        devices = {f"d{at}": LeasedMemory(size * GIB) for at, size in enumerate(gib)}
        own = tuple(one for one in replicas if one.node == name)
        nodes[name] = NodeRecord(node=Node(name=name, devices=devices, host=LeasedMemory(2 * GIB)), replicas=own)
    return ObservedFleet("local", {"m": desired}, nodes, FleetRecord(), is_led=True)


WARM = {"level": Level.WARM, "devices": ()}


@pytest.mark.parametrize(
    ("said", "observed", "is_so"),
    [
        ({"wanted": 0}, [], True),
        ({"wanted": 1}, [], False),
        ({"wanted": 1}, [{}], True),
        ({"wanted": 1}, [{"phase": ReplicaPhase.PROVISIONING}], False),
        ({"wanted": 1}, [{"version": "old"}], False),
        ({"wanted": 1}, [{}, {"version": "old"}], False),
        ({"wanted": 1}, [{}, {"phase": ReplicaPhase.GONE}], True),
        ({"wanted": 1}, [{}, {"phase": ReplicaPhase.DRAINING}], False),
        ({"wanted": 1}, [{}, {}], False),
        ({"wanted": 1}, [{"health": Health.AWAY, "ill_s": 1.0}], False),
        ({"wanted": 1}, [{}, WARM], True),
        ({"wanted": 0, "replicas_min": 1, "floor": Level.HOT}, [WARM], False),
        ({"wanted": 0, "replicas_min": 1, "floor": Level.WARM}, [], False),
        ({"wanted": 0, "replicas_min": 1, "floor": Level.WARM}, [WARM], True),
        ({"wanted": 1, "replicas_min": 2, "floor": Level.WARM}, [{}, WARM], True),
    ],
)
def test_it_is_in_place(said: dict[str, Any], observed: list[dict[str, Any]], is_so: bool) -> None:
    """So many of this version serve, as many as must are kept, and nobody else is on a device."""
    desired = make_desired(**said)
    replicas = [replica(desired, number, **each) for number, each in enumerate(observed)]
    assert is_in_place(fleet(desired, replicas), desired) is is_so


def test_replicas_of_lost_nodes_are_not_counted_and_a_fleet_without_nodes_is_told_what_makes_one() -> None:
    """Its record may stand though its agent is stopped; on Ray no command of ours makes a node."""
    desired = make_desired(wanted=1)
    observed = fleet(desired, [replica(desired, 1)])
    assert is_in_place(observed, desired)
    assert not is_in_place(dataclasses.replace(observed, record=FleetRecord(lost=("n1",))), desired)
    for backend, word in (("", "holdfast up --backend local"), ("ray", "ray start --address")):
        assert word in trouble_of(dataclasses.replace(observed, nodes={}, backend=backend))


@pytest.mark.parametrize(
    ("wanted", "observed", "told"),
    [
        (2, [{}], "1 of 2 HOT"),
        (1, [{}, {}], "2 HOT, 1 desired"),
        (1, [{"health": Health.DOUBTED, "ill_s": 1.0}], "0 of 1 HOT; r0 doubted on n1"),
        (0, [{"phase": ReplicaPhase.DRAINING}], "0 HOT, 0 desired; r0 draining on n1"),
    ],
)
def test_how_far_it_is(wanted: int, observed: list[dict[str, Any]], told: str) -> None:
    """In numbers, and who is on the way."""
    desired = make_desired(wanted=wanted)
    replicas = [replica(desired, number, **each) for number, each in enumerate(observed)]
    assert how_far(fleet(desired, replicas), desired) == told


def test_scaling_may_have_more() -> None:
    """How many it has now is not the wish's to say."""
    desired = structs.replace(make_desired(wanted=1), scaling=Scaling())
    assert is_in_place(fleet(desired, [replica(desired, 1), replica(desired, 2)]), desired)


@pytest.mark.parametrize(
    ("said", "sizes", "told"),
    [
        ({"wanted": 8}, [[8]], ""),
        ({"wanted": 9}, [[8]], "9 replicas are desired, and all nodes together could hold 8, of 1.00 GiB"),
        ({"wanted": 9}, [[8], [1]], ""),
        ({"wanted": 2, "per_node_max": 1}, [[8]], "2 replicas are desired, and all nodes together could hold 1"),
        ({"wanted": 1, "devices": 2}, [[8], [8]], "each replica needs 2 devices with 1.00 GiB each, and no node has"),
        ({"wanted": 1, "devices": 2}, [[8, 1]], ""),
        ({"wanted": 1, "nodes": frozenset({"n2"})}, [[8], [0]], "no node has that: the largest device has 0.00 GiB"),
        ({"wanted": 1, "nodes": frozenset({"n7"})}, [[8]], ""),
        ({"wanted": 0}, [[0]], ""),
        ({"wanted": 0, "replicas_min": 2, "floor": Level.WARM}, [[8]], ""),
        ({"wanted": 0, "replicas_min": 3, "floor": Level.WARM}, [[8]], "3 are to be WARM, and the host memory of all"),
        ({"wanted": 1, "replicas_min": 3, "floor": Level.WARM}, [[8]], ""),
        ({"wanted": 0, "replicas_min": 3, "floor": Level.WARM}, [[8], [8]], ""),
        ({"wanted": 0, "replicas_min": 1, "floor": Level.WARM}, [[0]], "each WARM replica needs 1.00 GiB of host"),
    ],
)
def test_what_no_node_could_hold_is_told(said: dict[str, Any], sizes: list[list[int]], told: str) -> None:
    """Were it empty; of nodes that are not there nobody knows."""
    desired = make_desired(**said)
    lack = too_large((one.node for one in fleet(desired, [], *sizes).nodes.values()), desired.model)
    assert told in lack
    assert bool(told) == bool(lack)
