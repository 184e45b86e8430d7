"""The controller by itself, where its stories (`test_fleet_controller_stories.py`) cannot look: what it hears of nodes,
and what it writes where there is nothing to do.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from holdfast.fleet.planner import FORGET_S, GRACE_S, UNREAD_S, FleetController, NodeHeartbeats
from holdfast.fleet.records import DesiredModel, FleetRecord, NodeRecord, Orders
from holdfast.fleet.room import HOST
from holdfast.fleet.scaling import Scaling
from holdfast.health.records import Demand
from tests.rigs.worlds.fleet_controllers import (
    DESIRED,
    NODES,
    ORDERS,
    RECORD,
    ControllersWorld,
    Keeper,
    desired_model,
    model,
)
from tests.rigs.worlds.fleet_node import Machine


def place(nodes: int = 1) -> ControllersWorld:
    made = ControllersWorld()
    for number in range(nodes):
        made.add(Machine(f"n{number}", {"gpu0": 80, HOST: 100}))
    return made


def told(keeper: Keeper) -> list[str]:
    return [one.what for one in keeper.controller.take_events()]


def test_nothing_is_written_where_nothing_is_desired() -> None:
    """With no desired, nodes or none: the store stays as it is."""
    for nodes in (0, 2):
        made = place(nodes)
        before = dict(made.shelf.values)
        keeper = made.keeper()
        assert not keeper.controller.step(made.now_s)
        assert made.shelf.values == before
        assert keeper.controller.is_idle is (nodes == 0)


def test_a_node_whose_agent_is_stopped_is_lost_and_not_by_a_controller_that_was() -> None:
    """Its record stands, and is not told again: three times that long. A controller that comes late listens again."""
    told_again = structs.replace(place(1).agents["n0"].record(), again_s=5.0)
    controller = FleetController("d", "c")
    controller.begin(FleetRecord(), {}, {}, {"n0": told_again}, 100.0)
    assert controller.next_deadline_s() == 115.0

    def lost(now_s: float) -> list[str]:
        if controller.step(now_s):  # the record says which nodes are lost
            controller.written(now_s)
        return [one.what for one in controller.take_events()]

    assert lost(114.0) == []
    controller.on_node_record("n0", told_again, 114.0)
    assert lost(128.9) == []
    assert lost(129.0) == ["lost"]
    controller.on_node_record("n0", told_again, 130.0)
    assert lost(130.0) == ["back"]
    assert lost(200.0) == [], "either may have been stopped"
    assert lost(214.9) == []
    assert lost(215.0) == ["lost"]


def test_a_store_that_was_lost_loses_no_node() -> None:
    """Leased records vanish with it and come again, later than a node's grace after they were first missed."""
    made = place(2)
    made.want(model())
    keeper = made.keeper()
    made.run(30)
    kept = dict(made.shelf.values)
    for name in made.agents:
        made.shelf.values.pop(NODES + name)
    keeper.read_changes(made.now_s)
    made.now_s += GRACE_S - 1.0
    assert not keeper.controller.step(made.now_s)
    made.now_s += 20.0
    keeper.controller.on_store_back(made.now_s)
    assert not keeper.controller.step(made.now_s)
    made.now_s += GRACE_S - 1.0
    assert not keeper.controller.step(made.now_s)
    made.shelf.values.update(kept)
    keeper.read_changes(made.now_s)
    assert not keeper.controller.step(made.now_s)
    assert told(keeper) == ["place"]


def test_a_node_that_cannot_be_read_is_waited_for_and_stays_as_it_was() -> None:
    """A controller that begins waits longer than for one that is not there; else nothing changes."""
    made = place(2)
    made.want(model())
    made.keeper()
    made.run(30)
    (there,) = [name for name, agent in made.agents.items() if agent.machine.bodies]
    values, begun_s, controller = made.shelf, made.now_s, FleetController("d", "k9")
    nodes = {name: one for name, one in values.under(NODES, NodeRecord).items() if name != there}
    controller.begin(
        values.read(RECORD, FleetRecord) or FleetRecord(),
        values.under(ORDERS, Orders),
        values.under(DESIRED, DesiredModel),
        nodes,
        begun_s,
        [there],
    )
    for late_s in (0.0, GRACE_S + 1, UNREAD_S - 1):
        assert not controller.step(begun_s + late_s)
        controller.node_unreadable(there, begun_s + late_s)
    controller.on_node_record(there, values.read(NODES + there, NodeRecord), begun_s + UNREAD_S - 1)
    assert not controller.step(begun_s + UNREAD_S - 1), "all is as it should be"
    controller.node_unreadable(there, begun_s + UNREAD_S)
    assert not controller.step(begun_s + 10 * UNREAD_S)
    assert controller.take_events() == []


def test_a_node_that_cannot_be_read_is_not_waited_for_for_ever() -> None:
    """What it has comes elsewhere then, and it is told."""
    made = place()
    made.want(model())
    controller = FleetController("d", "k9")
    desired_models, nodes = made.shelf.under(DESIRED, DesiredModel), made.shelf.under(NODES, NodeRecord)
    controller.begin(FleetRecord(), {}, desired_models, nodes, 1000.0, ["n7"])
    assert not controller.step(1000.0 + UNREAD_S - 1)
    assert controller.next_deadline_s() == 1000.0 + UNREAD_S
    assert controller.step(1000.0 + UNREAD_S)
    assert [one.what for one in controller.take_events()] == ["lost"]


def test_a_node_whose_record_stands_is_not_forgotten() -> None:
    """Its agent is stopped, or writes what cannot be read: it is there, and what was asked of it is."""
    heartbeats = NodeHeartbeats()
    heartbeats.begin(["a", "b", "c"], ["a"], ["b"], 0.0)
    heartbeats.on_report("a", 5.0, 0.0)
    heartbeats.on_unreadable("c", 10.0)
    assert dict(heartbeats.pop_lost(100.0)) == {"a": "its agent told nothing for 15 s; is it stopped?"}
    assert heartbeats.pop_forgotten(FORGET_S * 2) == []
    heartbeats.on_removed("b", 100.0)
    assert heartbeats.pop_forgotten(100.0 + FORGET_S) == ["b"]
    assert heartbeats.pop_forgotten(100.0 + FORGET_S) == []


def test_waits_of_all_frontends_count() -> None:
    """Their sum, and the first of them; one that is gone says nothing more."""
    controller = FleetController("d", "k")
    controller.set_desired("m", desired_model(model(wanted=0), Scaling()))
    controller.on_frontend_report("f1", {"served-m": Demand(2, 50.0)})
    controller.on_frontend_report("f2", {"served-m": Demand(1, 40.0), "other": Demand(9, 1.0)})
    assert controller._view.demand == {"m": Demand(3, 40.0)}
    controller.on_frontend_report("f2", None)
    assert controller._view.demand == {"m": Demand(2, 50.0)}
    controller.on_frontend_report("f1", {})
    assert controller._view.demand == {}


def test_records_survive_the_way_through_the_store() -> None:
    """What a controller writes, the next one reads as it was."""
    made = place(2)
    made.want(model(wanted=2))
    made.keeper()
    for _ in range(12):
        made.keepers[0].advance(made.now_s)
    for kind, key in ((FleetRecord, RECORD), (Orders, f"{ORDERS}n0")):
        value = made.shelf.values[key]
        assert msgspec.json.encode(msgspec.json.decode(value, type=kind)) == value
