"""Whether what is wanted of a model is there, or could ever be, as nodes tell it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from holdfast.cli.fleet.hope import how_far, is_in_place, trouble_of
from holdfast.cli.fleet.seen import FleetSeen
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import Health, Memory, Node, Phase, Replica
from holdfast.fleet.prospects import too_large
from holdfast.fleet.records import Book, NodeRecord, Wish
from holdfast.fleet.scaling import Scaling
from tests.rigs.cli.fleet_terminal import GIB, replica


def wished(**said: Any) -> Wish:
    model = Model(key="m", version="v", device_bytes=GIB, host_bytes=GIB, replicas_max=9, **said)
    return Wish(name="m", model=model, manifest="")


def fleet(wish: Wish, replicas: list[Replica], *sizes: list[int]) -> FleetSeen:
    """Nodes n1, n2, … with devices of so many GiB, and 2 in the host."""
    nodes = {}
    for place, gib in enumerate(sizes or ([8],)):
        name = f"n{place + 1}"
        devices = {f"d{at}": Memory(size * GIB) for at, size in enumerate(gib)}
        own = tuple(one for one in replicas if one.node == name)
        nodes[name] = NodeRecord(node=Node(name=name, devices=devices, host=Memory(2 * GIB)), replicas=own)
    return FleetSeen("local", {"m": wish}, nodes, Book(), is_led=True)


WARM = {"level": Level.WARM, "devices": ()}


@pytest.mark.parametrize(
    ("said", "seen", "is_so"),
    [
        ({"wanted": 0}, [], True),
        ({"wanted": 1}, [], False),
        ({"wanted": 1}, [{}], True),
        ({"wanted": 1}, [{"phase": Phase.PROVISIONING}], False),
        ({"wanted": 1}, [{"version": "old"}], False),
        ({"wanted": 1}, [{}, {"version": "old"}], False),
        ({"wanted": 1}, [{}, {"phase": Phase.GONE}], True),
        ({"wanted": 1}, [{}, {"phase": Phase.DRAINING}], False),
        ({"wanted": 1}, [{}, {}], False),
        ({"wanted": 1}, [{"health": Health.AWAY, "ill_s": 1.0}], False),
        ({"wanted": 1}, [{}, WARM], True),
        ({"wanted": 0, "replicas_min": 1, "floor": Level.HOT}, [WARM], False),
        ({"wanted": 0, "replicas_min": 1, "floor": Level.WARM}, [], False),
        ({"wanted": 0, "replicas_min": 1, "floor": Level.WARM}, [WARM], True),
        ({"wanted": 1, "replicas_min": 2, "floor": Level.WARM}, [{}, WARM], True),
    ],
)
def test_it_is_in_place(said: dict[str, Any], seen: list[dict[str, Any]], is_so: bool) -> None:
    """So many of this version serve, as many as must are kept, and nobody else is on a device."""
    wish = wished(**said)
    replicas = [replica(wish, number, **each) for number, each in enumerate(seen)]
    assert is_in_place(fleet(wish, replicas), wish) is is_so


def test_replicas_of_lost_nodes_are_not_counted_and_a_fleet_without_nodes_is_told_what_makes_one() -> None:
    """Its record may stand though its agent is stopped; on Ray no command of ours makes a node."""
    wish = wished(wanted=1)
    seen = fleet(wish, [replica(wish, 1)])
    assert is_in_place(seen, wish)
    assert not is_in_place(dataclasses.replace(seen, book=Book(lost=("n1",))), wish)
    for backend, word in (("", "holdfast up --backend local"), ("ray", "ray start --address")):
        assert word in trouble_of(dataclasses.replace(seen, nodes={}, backend=backend))


@pytest.mark.parametrize(
    ("wanted", "seen", "told"),
    [
        (2, [{}], "1 of 2 HOT"),
        (1, [{}, {}], "2 HOT, 1 desired"),
        (1, [{"health": Health.DOUBTED, "ill_s": 1.0}], "0 of 1 HOT; r0 doubted on n1"),
        (0, [{"phase": Phase.DRAINING}], "0 HOT, 0 desired; r0 draining on n1"),
    ],
)
def test_how_far_it_is(wanted: int, seen: list[dict[str, Any]], told: str) -> None:
    """In numbers, and who is on the way."""
    wish = wished(wanted=wanted)
    replicas = [replica(wish, number, **each) for number, each in enumerate(seen)]
    assert how_far(fleet(wish, replicas), wish) == told


def test_scaling_may_have_more() -> None:
    """How many it has now is not the wish's to say."""
    wish = structs.replace(wished(wanted=1), scaling=Scaling())
    assert is_in_place(fleet(wish, [replica(wish, 1), replica(wish, 2)]), wish)


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
    wish = wished(**said)
    lack = too_large((one.node for one in fleet(wish, [], *sizes).nodes.values()), wish.model)
    assert told in lack
    assert bool(told) == bool(lack)
