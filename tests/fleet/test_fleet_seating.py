"""Models beside each other, in one pass: whose turn it is, which room is waited for, who gives way for whom, and what
an order says of itself.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.fleet.actions import ASK_S, COPY_S, Action, Tries, Verb, replica_name
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import LeasedMemory, Node, Observed, ReplicaPhase
from holdfast.fleet.planner import plan
from holdfast.health.records import Demand
from tests.rigs.fleet.moment import (
    ASKED,
    NOW_S,
    PLACED,
    RESIDENT_S,
    model,
    node,
    observe,
    pending,
    planned_words,
    replica,
    warm,
)

JUST, BEFORE = Tries(1, NOW_S), Tries(1, NOW_S - 9)
NO_ROOM, IN_MAKING, FAILED = "there is no room for it", "room is being made for it", "it failed to start"
LONG_BEFORE = Tries(1, replica().since_s - 1)
LEAVES = replica(size=60, phase=ReplicaPhase.DRAINING, running=1, drain_until_s=NOW_S + 9)
BOTH_ASKED = {"demand": {"b": Demand(1, NOW_S - 5), "c": Demand(1, NOW_S - 3)}}
GONE_BY = model(size=60, wanted=0)  # of whom one leaves
EVICTABLE = model(size=60)
STRANGER = node("m", x1=60)
TWO_APART = {"wanted": 2, "size": 30, "per_node_max": 1}


# -- up


def test_whoever_waits_for_longest_comes_first() -> None:
    """Of two that matter as much, and with room for one."""
    asked = {"b": Demand(1, NOW_S - 1), "c": Demand(1, NOW_S - 2)}
    assert planned_words([model("b", 60), model("c", 60)], observe([node()], demand=asked)) == ["place c1 n"]


def seats(models: list[Model], observed: Observed) -> list[str]:
    """Where everybody is placed, e.g. `a1 n gpu0`."""
    actions = plan(models, observed, NOW_S).actions
    return [f"{one.model}{one.serial} {one.node} {'+'.join(one.devices)}" for one in actions]


@pytest.mark.parametrize(
    ("desired", "observed", "where"),
    [
        pytest.param(
            {"wanted": 4},
            observe([node("m", gpus=2), node(gpus=2)]),
            ["a1 m gpu0", "a2 n gpu0", "a3 m gpu1", "a4 n gpu1"],
            id="nodes first, then devices",
        ),
        pytest.param(
            {"wanted": 3},
            observe([node(gpus=2, a1=20)], [replica(size=20)], pending=pending(structs.replace(PLACED, serial=2))),
            ["a3 n gpu1"],
            id="those that are there and those that fly count",
        ),
        pytest.param(
            {"wanted": 3, "devices": 2},
            observe([node(gpus=4)]),
            ["a1 n gpu0+gpu1", "a2 n gpu2+gpu3", "a3 n gpu0+gpu1"],
            id="several devices each",
        ),
        pytest.param({"wanted": 2}, observe([node(gpus=2, size=30, x1=5)]), ["a1 n gpu0", "a2 n gpu1"], id="tightest"),
        pytest.param({"wanted": 2}, observe([node(gpus=1)]), ["a1 n gpu0", "a2 n gpu0"], id="where there is but one"),
    ],
)
def test_replicas_of_one_model_are_apart(desired: dict[str, object], observed: Observed, where: list[str]) -> None:
    """A node or a device that fails takes few of one model."""
    assert seats([model(size=20, **desired)], observed) == where


def test_different_models_are_together() -> None:
    """So that what is free is left whole."""
    assert seats([model("a", 20), model("b", 20)], observe([node(gpus=2)])) == ["a1 n gpu0", "b1 n gpu0"]


def test_one_that_is_warm_is_promoted_once() -> None:
    """And another is started beside it."""
    observed = observe([node(gpus=2, host=100)], [warm()])
    assert planned_words([model(wanted=2)], observed) == ["promote a1 n", "place a2 n"]


def test_the_tightest_of_those_that_are_warm_is_promoted() -> None:
    """So that the larger room is left whole."""
    nodes = [node("m", size=100, host=100), node(size=50, host=100), node("o", size=90, host=100)]
    there = [warm(serial=serial, node=name, since_s=NOW_S) for serial, name in enumerate("mno", 1)]
    assert planned_words([model()], observe(nodes, there)) == ["promote a2 n"]


def test_one_that_is_warm_on_a_node_that_fails_is_left_alone() -> None:
    """Another is started elsewhere."""
    observed = observe([node(host=100), node("m")], [warm()], tries={"node/n": JUST})
    assert planned_words([model()], observed) == ["place a2 m"]


def test_of_its_own_nodes_one_with_its_files() -> None:
    """Wherever it stands among them."""
    nodes = [node("m"), structs.replace(node(), on_disk=frozenset("a")), node("o")]
    assert planned_words([model(nodes=frozenset("mno"))], observe(nodes)) == ["place a1 n"]


def test_a_floor_is_placed_where_its_model_may_be_and_its_host_has_room() -> None:
    """Two of 40 in memory for one, on the one node that is named."""
    desired = model(wanted=0, floor=Level.WARM, replicas_min=2, nodes=frozenset("n"))
    planned = plan([desired], observe([node("m", host=100), node(host=50)]), NOW_S)
    assert [(one.node, one.level) for one in planned.actions] == [("n", Level.WARM)]
    assert planned.unmet == {"a": "no host has memory for it"}


# -- waiting for room


@pytest.mark.parametrize(
    ("desired", "nodes", "tries", "why"),
    [
        pytest.param({}, [node(a1=60)], {}, IN_MAKING, id="somebody leaves"),
        pytest.param({"nodes": frozenset("m")}, [node(a1=60), STRANGER], {}, NO_ROOM, id="where it may not be"),
        pytest.param({}, [node(a1=60)], {"node/n": JUST}, NO_ROOM, id="on a node that fails"),
        pytest.param({}, [node(a1=60)], {"place/b": JUST}, FAILED, id="and it failed to start"),
        pytest.param(TWO_APART, [node(x1=20, a1=60)], {}, NO_ROOM, id="for one, not two"),
        pytest.param({}, [node(a1=60)], {f"stop/{LEAVES.name}": BEFORE}, NO_ROOM, id="who was told in vain"),
        pytest.param({}, [node(a1=60)], {f"stop/{LEAVES.name}": LONG_BEFORE}, IN_MAKING, id="in what it was before"),
    ],
)
def test_which_room_is_waited_for(
    desired: dict[str, object], nodes: list[Node], tries: dict[str, Tries], why: str
) -> None:
    """What others leave, where it may be had."""
    observed = observe(nodes, [LEAVES], tries=tries, **ASKED)
    planned = plan([GONE_BY, model("b", **{"size": 60, **desired})], observed, NOW_S)
    assert planned.unmet == {"b": why}
    assert planned.actions == ()


def test_room_is_waited_for_where_ones_own_is_warm() -> None:
    """Two nodes are being left: it waits for the one with its weights, and who may only be there finds none."""
    leavers = [LEAVES, structs.replace(LEAVES, serial=2, node="m")]
    nodes = [node(host=100, a1=60), node("m", a2=60)]
    models = [GONE_BY, model("b", 60), model("c", 60, nodes=frozenset("n"))]
    planned = plan(models, observe(nodes, [*leavers, warm("b")], **BOTH_ASKED), NOW_S)
    assert planned.unmet == {"b": IN_MAKING, "c": NO_ROOM}


def test_room_that_is_made_in_this_pass_is_waited_for() -> None:
    """One leaves because fewer are wanted: nobody else gives way."""
    there = [replica(size=60), replica("c", size=60, node="m")]
    models = [GONE_BY, model("c", 60), model("b", 60)]
    assert planned_words(models, observe([node(a1=60), node("m", c1=60)], there, **ASKED)) == ["drain a1 n"]


def test_who_leaves_counts_once_as_room() -> None:
    """It drains already, and is told what comes after: that makes it no larger."""
    drained = replica(phase=ReplicaPhase.DRAINING, drain_until_s=NOW_S)
    observed = observe([node(host=100, a1=40, x1=40)], [drained], **ASKED)
    planned = plan([model(wanted=0), model("b", 70)], observed, NOW_S)
    assert [one.verb for one in planned.actions] == [Verb.DEMOTE]
    assert planned.unmet == {"b": NO_ROOM}


def test_who_is_told_in_vain_makes_no_room() -> None:
    """It was to be stopped before, and is again: nobody counts on it."""
    drained = replica(size=60, phase=ReplicaPhase.DRAINING, drain_until_s=NOW_S)
    tries = {f"stop/{drained.name}": BEFORE}
    planned = plan([GONE_BY, model("b", 60)], observe([node(a1=60)], [drained], tries=tries, **ASKED), NOW_S)
    assert [one.id for one in planned.actions] == [f"stop/{drained.name}/0.2"]
    assert planned.unmet == {"b": NO_ROOM}


# -- the next version in the place of the last


OLD = replica(size=60, version="x")


@pytest.mark.parametrize(
    ("desired", "tries", "does"),
    [
        ({}, {}, ["drain a1 n"]),
        ({"nodes": frozenset("m")}, {}, []),
        ({}, {"node/n": JUST}, []),
    ],
    ids=["it gives up its place", "where the next may not be", "on a node that fails"],
)
def test_an_old_version_gives_up_its_place(
    desired: dict[str, object], tries: dict[str, Tries], does: list[str]
) -> None:
    """If the next one can have it."""
    observed = observe([node(a1=60), STRANGER], [OLD], tries=tries)
    assert planned_words([model(size=60, version="y", **desired)], observed) == does


def test_old_versions_leave_one_at_a_time() -> None:
    """While one drains the other serves, though the room of the first cannot be had; one that is WARM is no matter."""
    other = structs.replace(OLD, serial=2, node="m")
    nodes, desired = [node(a1=60), node("m", a2=60)], model(size=60, version="y", wanted=2)
    leaves = structs.replace(OLD, phase=ReplicaPhase.DRAINING, running=1, drain_until_s=NOW_S + 9)
    assert planned_words([desired], observe(nodes, [leaves, other], tries={"node/n": JUST})) == []
    stop = Action(verb=Verb.STOP, model="a", serial=1, node="n", deadline_s=NOW_S + 9)
    asleep = warm(size=60, version="x")
    observed = observe([node(x1=60, host=100), nodes[1]], [asleep, other], pending=pending(stop))
    assert planned_words([structs.replace(desired, wanted=1)], observed) == ["drain a2 m"]


def test_the_next_version_takes_no_more_of_others_than_the_last() -> None:
    """While an old one serves, a new one is no model's first; and it evicts none of its own past their turn."""
    busy = replica("c", size=60, node="m", running=1)
    asked = {"demand": {"a": Demand(1, NOW_S - 5)}, "tries": {"node/n": JUST}}
    desired = model(size=60, version="y")
    assert (
        planned_words([desired, model("c", 60)], observe([node(a1=60), node("m", c1=60)], [OLD, busy], **asked)) == []
    )
    leaves = structs.replace(OLD, serial=3, node="o", phase=ReplicaPhase.DRAINING, running=1, drain_until_s=NOW_S + 9)
    there = [OLD, structs.replace(OLD, serial=2, node="m"), leaves]
    kept = structs.replace(desired, wanted=2, floor=Level.HOT, replicas_min=1)
    observed = observe([node(a1=60), node("m", a2=60), node("o", a3=60)], there, tries={"node/o": JUST})
    assert planned_words([kept], observed) == []


# -- giving way


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ({"nodes": frozenset("m")}, "it may only be where nobody can go"),
        ({"device_bytes": 100}, "it is larger than any device"),
        ({"devices": 2}, "it needs more devices than there are"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_that_finds_nobody_to_give_way_does_not_hinder_the_next(first: dict[str, object], why: str) -> None:
    """Which asks for less."""
    models = [EVICTABLE, model("b", **{"size": 60, **first}), model("c", 60)]
    assert planned_words(models, observe([node(a1=60), STRANGER], [replica(size=60)], **BOTH_ASKED)) == [
        "drain a1 n"
    ], why


@pytest.mark.parametrize(
    ("desired", "tries"),
    [
        ({"nodes": frozenset("m")}, {}),
        ({}, {f"drain/{replica().name}": JUST}),
        ({}, {"node/n": JUST}),
        ({}, {"place/b": JUST}),
    ],
    ids=["where it may not be", "who could not be drained", "on a node that fails", "for one that failed to start"],
)
def test_nobody_gives_way_in_vain(desired: dict[str, object], tries: dict[str, Tries]) -> None:
    """Its room would be of no use now."""
    observed = observe([node(a1=60), STRANGER], [replica(size=60)], tries=tries, **ASKED)
    assert planned_words([EVICTABLE, model("b", 60, **desired)], observed) == []


def test_one_gives_way_for_one() -> None:
    """Its room is promised, and the next newcomer has none; nor is what is free already filled meanwhile."""
    observed = observe([node(a1=60)], [replica(size=60)], **BOTH_ASKED)
    planned = plan([EVICTABLE, model("b", 60), model("c", 60)], observed, NOW_S)
    assert [one.verb for one in planned.actions] == [Verb.DRAIN]
    assert planned.unmet == {"b": IN_MAKING, "c": NO_ROOM}
    assert planned_words(
        [EVICTABLE, model("b", 80), model("c", 20)], observe([node(a1=60)], [replica(size=60)], **ASKED)
    ) == ["drain a1 n"]


@pytest.mark.parametrize(("there", "promised"), [(node(), 60), (node(a1=70), 20)], ids=["promised", "granted"])
def test_who_gives_way_leaves_what_it_has(there: Node, promised: int) -> None:
    """The larger of what was promised and what was granted."""
    assert planned_words([EVICTABLE, model("b", 60)], observe([there], [replica(size=promised)], **ASKED)) == [
        "drain a1 n"
    ]


def test_the_one_with_work_is_the_last_of_its_model_to_give_way() -> None:
    """Of two the idle one goes; and of a floor that is HOT, whoever is above it."""
    there = [replica(size=60, running=1), replica(serial=2, size=60, node="m")]
    observed = observe([node(a1=60), node("m", a2=60)], there, **ASKED)
    assert planned_words([model(size=60, wanted=2), model("b", 60)], observed) == ["drain a2 m"]
    kept = model(size=60, wanted=2, floor=Level.HOT, replicas_min=1)
    assert planned_words([kept, model("b", 60)], observed) == ["drain a2 m"]


def test_who_leaves_is_not_the_one_that_matters() -> None:
    """An old version leaves with its work: the new one is the first of its model now, and has its turn."""
    there = [replica(size=60, version="x", running=1), replica(serial=2, size=60, node="m", since_s=NOW_S - RESIDENT_S)]
    observed = observe([node(a1=60), node("m", a2=60)], there, **ASKED)
    assert planned_words([EVICTABLE, model("b", 60, nodes=frozenset("m"))], observed) == ["drain a1 n"]


@pytest.mark.parametrize(
    ("since_s", "tries", "at_s"),
    [
        (NOW_S - RESIDENT_S + 2, {}, NOW_S + 2),
        (NOW_S - RESIDENT_S + 9, {}, NOW_S + 5),
        (NOW_S, {"place/b": Tries(2, NOW_S)}, NOW_S + 2),
    ],
    ids=["somebody may give way soon", "not so soon", "it may be started soon"],
)
def test_when_to_look_again_at_one_that_misses_room(since_s: float, tries: dict[str, Tries], at_s: float) -> None:
    """When it may have some, and every few seconds."""
    observed = observe([node(a1=60)], [replica(size=60, since_s=since_s)], tries=tries, **ASKED)
    assert plan([EVICTABLE, model("b", 60)], observed, NOW_S).next_s == at_s


# -- what an order says


def test_what_an_order_says() -> None:
    """Until when it must be done and requests have time; and its id, which has the replica's turn."""
    sleeper = warm(turn=3, since_s=NOW_S)
    (promote,) = plan([model()], observe([node(host=100)], [sleeper]), NOW_S).actions
    assert (promote.id, promote.deadline_s) == (f"promote/{replica_name('a', 1)}/3.1", NOW_S + COPY_S)
    (place,) = plan([model(load_s=77.0)], observe([node()]), NOW_S).actions
    assert place.deadline_s == NOW_S + 77
    desired = model(wanted=0, drain_s=9.0)
    (drain,) = plan([desired], observe([node()], [replica()]), NOW_S).actions
    assert (drain.until_s, drain.deadline_s) == (NOW_S + 9, NOW_S + 9 + ASK_S)
    lost = replica(phase=ReplicaPhase.DRAINING, running=1)
    (again,) = plan([desired], observe([node()], [lost]), NOW_S).actions
    assert (again.verb, again.until_s) == (Verb.DRAIN, NOW_S + 9)
    drained = replica(phase=ReplicaPhase.DRAINING, drain_until_s=NOW_S - 4)
    (demote,) = plan([desired], observe([node(host=100)], [drained]), NOW_S).actions
    assert (demote.until_s, demote.deadline_s) == (NOW_S - 4, NOW_S + COPY_S)


def test_memory_of_those_that_are_dropped_counts_once() -> None:
    """Two go down to a host that is full of ones nobody needs: each has one of them dropped for it."""
    nodes = [structs.replace(node(a1=40, b1=40), host=LeasedMemory(80, {replica_name(key, 1): 40 for key in "cd"}))]
    drains = [replica(key, phase=ReplicaPhase.DRAINING, drain_until_s=NOW_S + 5) for key in "ab"]
    spares = [warm(key, since_s=NOW_S - 60) for key in "cd"]
    observed = observe(nodes, [*drains, *spares])
    assert planned_words([model(key, wanted=0) for key in "abcd"], observed) == ["stop c1 n", "stop d1 n"]
