"""Replicas that are up and do not serve: what agents tell of them, what the planner does, and what clients hear."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from holdfast.fleet.actions import Tries, Verb, subject_of
from holdfast.fleet.agent import LocalReplica, ObservedProcesses, step
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Health, Node, Observed, Replica, ReplicaPhase
from holdfast.fleet.outlook import ModelOutlook, unhealthy_outlook
from holdfast.fleet.planner import FleetController, plan
from holdfast.fleet.records import DesiredModel, FleetRecord, NodeRecord, Orders
from holdfast.fleet.scaling import Scaling
from tests.rigs.fleet.moment import NOW_S, model, node, observe, planned_words, replica
from tests.rigs.worlds.fleet_storms import Ailing, play

WORLDS = 100
AWAY, DOUBTED, UNCHECKED, UNFIT = Health.AWAY, Health.DOUBTED, Health.UNCHECKED, Health.UNFIT


def ill(serial: int, health: Health, for_s: float, **fields: Any) -> Replica:
    return replica(serial=serial, **{"health": health, "ill_s": NOW_S - for_s, "came_s": 10.0, **fields})


ROOM, FULL = node(gpus=4), node(size=80)


@pytest.mark.parametrize(
    ("wanted", "observed", "does"),
    [
        pytest.param(1, observe([ROOM], [ill(1, AWAY, 39)]), [], id="a takeover and a load have their time"),
        pytest.param(1, observe([ROOM], [ill(1, AWAY, 41)]), ["stop a1 n", "place a2 n"], id="then it has failed"),
        pytest.param(
            1, observe([ROOM], [ill(1, AWAY, 599, came_s=0.0)]), [], id="a load that is not known takes longest"
        ),
        pytest.param(1, observe([ROOM], [ill(1, DOUBTED, 999)]), [], id="control says how long doubts last"),
        pytest.param(1, observe([ROOM], [ill(1, UNFIT, 1)]), ["place a2 n"], id="a replacement comes first"),
        pytest.param(1, observe([ROOM], [ill(1, UNCHECKED, 21)]), [], id="a first check has the time of a load"),
        pytest.param(1, observe([ROOM], [ill(1, UNFIT, 1), replica(serial=2)]), ["drain a1 n"], id="then it leaves"),
        pytest.param(
            1,
            observe([ROOM], [ill(1, UNFIT, 1), ill(2, UNCHECKED, 1)]),
            [],
            id="not for one that nobody has checked",
        ),
        pytest.param(
            1, observe([FULL], [ill(1, UNFIT, 1, size=80)]), [], id="the last that answers keeps its place"
        ),
        pytest.param(
            2,
            observe([FULL], [ill(1, UNFIT, 1), ill(2, UNFIT, 1)]),
            ["drain a1 n"],
            id="of two without room one gives up its place",
        ),
        pytest.param(1, observe([ROOM], [replica(), ill(2, DOUBTED, 1)]), ["drain a2 n"], id="fewer: doubted first"),
        pytest.param(1, observe([ROOM], [replica(serial=1), ill(2, AWAY, 1)]), ["stop a2 n"], id="fewer: away first"),
        pytest.param(0, observe([ROOM], [ill(1, UNFIT, 1)]), ["drain a1 n"], id="none is wanted"),
    ],
)
def test_what_does_not_serve_is_replaced_leaves_first_and_never_counts(
    wanted: int, observed: Observed, does: list[str]
) -> None:
    """Past a bound another is placed; what can still answer leaves only when that serves."""
    size = next(iter(observed.replicas.values())).device_bytes
    assert planned_words([model(wanted=wanted, host_bytes=0, size=size)], observed) == does


def test_a_failed_replica_is_replaced_on_another_node() -> None:
    """Where there is room elsewhere its own node is not tried first, though the files are there."""
    nodes = [structs.replace(ROOM, on_disk=frozenset({"a"})), node("m", gpus=4)]
    assert planned_words([model()], observe(nodes, [ill(1, AWAY, 41)])) == ["stop a1 n", "place a2 m"]


def test_others_take_the_place_of_what_does_not_serve_first() -> None:
    """Of two replicas that may give way the one in doubt does, though the other is idle for longer."""
    there = [replica(serial=1, idle_s=1.0), ill(2, DOUBTED, 1, running=1)]
    first = model("b", size=40, floor=Level.HOT, replicas_min=1)
    assert planned_words([model(wanted=2), first], observe([FULL], there)) == ["drain a2 n"]


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_worlds_whose_replicas_fall_ill(part: int) -> None:
    """None that could answer is ended for its health before another can; where fewer are wanted, what serves stays."""
    for number in range(WORLDS):
        play(part * WORLDS + number, Ailing)


# -- what agents tell


def test_an_agent_tells_since_when_a_replica_does_not_serve_and_how_long_it_took_to_come_up() -> None:
    """Another cause begins no new count; to serve again ends it."""
    name, local = (
        replica().name,
        LocalReplica(replica=replica(phase=ReplicaPhase.PROVISIONING, since_s=1.0), placed=True),
    )

    def look(processes: ObservedProcesses, now_s: float) -> Replica:
        nonlocal local
        local = step({name: local}, Orders(), {name: processes}, now_s).replicas[name]
        return local.replica

    there = ObservedProcesses(exists=True, serves=True)
    assert (look(there, 8.0).came_s, local.replica.serves) == (7.0, True)
    gone = look(ObservedProcesses(exists=True, why="its vault: crash loop"), 10.0)
    assert (gone.health, gone.ill_s, gone.ill_why, gone.is_up) == (AWAY, 10.0, "its vault: crash loop", True)
    back = look(structs.replace(there, health=DOUBTED, why="its breaker is open"), 12.0)
    assert (back.health, back.ill_s, back.ill_why) == (DOUBTED, 10.0, "its breaker is open")
    assert (look(there, 13.0).ill_s, local.replica.ill_why, local.replica.came_s) == (0.0, "", 7.0)


# -- what the controller counts and tells


def _controller(*replicas: Replica, nodes: Node = ROOM, scaling: Scaling | None = None) -> FleetController:
    desired = DesiredModel(name="chat", model=model(), manifest="", scaling=scaling)
    controller = FleetController("d", "c")
    controller.begin(FleetRecord(), {}, {"a": desired}, {"n": NodeRecord(node=nodes, replicas=replicas)}, NOW_S)
    return controller


def _record(controller: FleetController, now_s: float = NOW_S) -> FleetRecord:
    """Return what stands once nothing more is to be written."""
    record = FleetRecord()
    while writes := controller.step(now_s):
        controller.written(now_s)
        record = writes.record or record
    return record


def test_a_replica_that_failed_is_told_counted_and_replaced() -> None:
    """People are told once, and its model backs off as after a failed start."""
    controller = _controller(ill(1, AWAY, 41, ill_why="its vault: crash loop"))
    record = _record(controller)
    assert [one.what for one in controller.take_events()] == ["failed", "stop", "place"]
    assert record.tries[subject_of(Verb.PLACE, "a")] == Tries(1, NOW_S)
    assert record.unmet["a"] == "r1 on n: its vault: crash loop; another is being started"
    assert (record.hopeless, record.stands) == ((), ())


def test_clients_hear_why_nothing_serves_and_wait_no_longer_than_streams_are_held_where_no_other_comes() -> None:
    """While another may be started they wait for that."""
    there = ill(1, DOUBTED, 1, size=80, ill_why="its breaker is open")
    soon = _record(_controller(there, nodes=FULL))
    assert soon.unmet["a"] == "r1 on n: its breaker is open; another is started unless it serves again soon"
    assert soon.stands == ()
    later = _record(_controller(structs.replace(there, health=UNFIT), nodes=FULL))
    assert (later.stands, later.hopeless) == (("a",), ())
    assert later.unmet["a"].startswith("r1 on n: its breaker is open; no other comes: ")
    assert unhealthy_outlook("ill", ModelOutlook("no room"), is_coming=True) == ModelOutlook(
        "ill; another is being started"
    )


def test_scaling_counts_those_that_serve() -> None:
    """Two are wanted and one of them is dead: that is no surplus, however little KV is used."""
    scaling = Scaling(low_s=0.0, step_down_s=0.0, idle_s=0.0)
    there = (replica(serial=1), ill(2, AWAY, 1, devices=("gpu1",)))
    controller = _controller(*there, scaling=scaling)
    desired = DesiredModel(name="chat", model=model(wanted=2), manifest="", scaling=scaling)
    controller.set_desired("a", desired)
    for now_s in (NOW_S, NOW_S + 5.0):
        while writes := controller.step(now_s):
            assert not writes.desired
            controller.written(now_s)


def test_lost_nodes_are_named_in_the_book() -> None:
    """What they last told does not count, for commands neither."""
    controller = _controller(replica())
    controller.on_node_record("n", None, NOW_S)
    assert _record(controller, NOW_S + 6.0).lost == ("n",)
    assert plan([model()], observe([structs.replace(ROOM, alive=False)], [replica()]), NOW_S).unmet
