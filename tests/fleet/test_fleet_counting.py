"""One model by itself, in one pass: who of it counts as what, who goes first, and when it is looked at again."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.fleet.actions import COPY_S, Action, Tries, Verb
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import LeasedMemory, Observed, Replica, ReplicaPhase
from holdfast.fleet.planner import plan
from tests.rigs.fleet.moment import (
    LINGER_S,
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


def order(verb: Verb, serial: int = 1) -> Action:
    return Action(verb=verb, model="a", serial=serial, node="n", deadline_s=NOW_S + 60)


NAME = PLACED.name
JUST = Tries(1, NOW_S)  # failed a moment ago
BEFORE = Tries(1, NOW_S - 60)  # failed, and may be tried again
COMING = replica(phase=ReplicaPhase.PROVISIONING)
DRAINS = replica(phase=ReplicaPhase.DRAINING, drain_until_s=NOW_S)
WOKEN = replica(phase=ReplicaPhase.PROVISIONING, since_s=NOW_S, turn=1)
LOWERED = replica(phase=ReplicaPhase.DEMOTING, since_s=NOW_S - COPY_S)
DRAINED = pending(order(Verb.DRAIN))
STOPPED = pending(order(Verb.STOP))
PLACED_WARM = structs.replace(PLACED, level=Level.WARM, devices=(), host_bytes=40)
HOST = node(gpus=4, host=100)
ROOMY = node(gpus=4, host=200)


def floor(level: Level = Level.WARM, least: int = 1, **fields: object) -> Model:
    return model(**{"floor": level, "replicas_min": least, "wanted": 0, **fields})


@pytest.mark.parametrize(
    ("desired", "observed", "does"),
    [
        pytest.param(model(), observe([HOST], [warm()], pending=pending(order(Verb.PROMOTE))), [], id="it is promoted"),
        pytest.param(
            model(wanted=0), observe([HOST], [warm()], pending=pending(order(Verb.PROMOTE))), [], id="it is let come up"
        ),
        pytest.param(
            model(wanted=1, floor=Level.WARM, replicas_min=1),
            observe([HOST], pending=pending(PLACED_WARM)),
            ["place a2 n"],
            id="who comes WARM is not HOT",
        ),
        pytest.param(floor(), observe([HOST], pending=pending(PLACED_WARM)), [], id="a floor's own comes"),
        pytest.param(
            floor(), observe([HOST], [replica(running=1)], pending=DRAINED), [], id="it falls to the floor"
        ),
        pytest.param(
            floor(),
            observe([HOST], [replica(phase=ReplicaPhase.DEMOTING, since_s=NOW_S - 1)]),
            [],
            id="it falls to it now",
        ),
        pytest.param(
            floor(version="y"),
            observe([HOST], [replica(running=1)], pending=DRAINED),
            ["place a2 n"],
            id="an old version does not fall to it",
        ),
        pytest.param(
            model(version="y"),
            observe([HOST], [warm(version="x")], pending=pending(order(Verb.PROMOTE))),
            ["stop a1 n", "place a2 n"],
            id="an old version that is told to come is stopped, not drained",
        ),
        pytest.param(
            floor(version="y", least=2),
            observe([ROOMY], [warm(version="x"), warm(serial=2, version="x")]),
            ["place a3 n"],
            id="old WARM ones stay until another has come",
        ),
        pytest.param(
            floor(version="y", least=2),
            observe([ROOMY], [warm(version="x"), warm(serial=2, version="x"), warm(serial=3, version="y")]),
            ["stop a1 n"],
            id="and leave one by one",
        ),
        pytest.param(
            floor(version="y", least=2),
            observe([ROOMY], [warm(version="x"), warm(serial=2, version="x"), replica(serial=3, version="y")]),
            ["drain a3 n"],
            id="nor for one that leaves its devices, before it is WARM",
        ),
        pytest.param(
            floor(version="y", least=2),
            observe([HOST], [warm(version="x"), warm(serial=2, version="x")]),
            ["stop a1 n"],
            id="without room in the host one of them goes first",
        ),
        pytest.param(
            floor(version="y", least=2),
            observe([HOST], [warm(version="x"), warm(serial=2, version="x")], pending=STOPPED),
            [],
            id="and no other meanwhile",
        ),
        pytest.param(
            floor(version="y", least=1),
            observe([node(host=50, size=30)], [warm(version="x")]),
            [],
            id="but not where no device has room to load another",
        ),
        pytest.param(
            floor(going=frozenset({1})),
            observe([node(host=50, size=30)], [warm()]),
            ["stop a1 n"],
            id="except by a person's word",
        ),
        pytest.param(
            floor(version="y", host_bytes=70),
            observe([node(host=90, gpus=4)], [warm(version="x"), warm(serial=2, version="x")]),
            ["stop a1 n"],
            id="more old ones than a floor needs do not stay",
        ),
        pytest.param(
            floor(version="y", least=2, host_bytes=70),
            observe([node(host=90, gpus=4)], [warm(version="x"), warm(serial=2, version="x")]),
            ["stop a1 n", "stop a2 n"],
            id="as many give up their places as one needs",
        ),
        pytest.param(
            floor(version="y"),
            observe([HOST], [warm(version="x", phase=ReplicaPhase.PROVISIONING, since_s=NOW_S)]),
            ["stop a1 n", "place a2 n"],
            id="who is not WARM yet does not stay",
        ),
        pytest.param(
            model(version="y", wanted=0), observe([HOST], [warm(version="x")]), ["stop a1 n"], id="nor without a floor"
        ),
        pytest.param(
            model(version="y", wanted=2, floor=Level.WARM, replicas_min=2),
            observe([HOST], [replica(version="x"), replica(serial=2, version="x")]),
            ["place a3 n"],
            id="HOT ones of an old version count for a floor of WARM",
        ),
        pytest.param(
            model(going=frozenset({1})), observe([HOST], [replica()]), ["place a2 n"], id="another comes for it"
        ),
        pytest.param(
            model(going=frozenset({1})),
            observe([HOST], [replica(), replica(serial=2)]),
            ["drain a1 n"],
            id="who is sent away leaves when enough serve without it",
        ),
        pytest.param(
            model(wanted=1, going=frozenset({2})),
            observe([HOST], [replica(), replica(serial=2, running=9)]),
            ["drain a2 n"],
            id="where one fewer is wanted it is that one, however busy",
        ),
        pytest.param(
            model(going=frozenset({1, 7})), observe([HOST], [replica(serial=2)]), [], id="and then it is as with any"
        ),
        pytest.param(
            model(),
            observe([HOST], pending=pending(PLACED) | pending(order(Verb.STOP))),
            ["place a2 n"],
            id="who is stopped before it was seen is missing",
        ),
        pytest.param(
            model(),
            observe([structs.replace(node(), alive=False), node("m")], pending=pending(PLACED)),
            ["place a2 m"],
            id="who comes on a lost node is missing",
        ),
        pytest.param(
            model(wanted=2, per_node_max=1), observe([node(gpus=4)], [replica()]), [], id="one on a node is there"
        ),
        pytest.param(
            model(wanted=2, per_node_max=1),
            observe([node(gpus=4)], pending=pending(PLACED)),
            [],
            id="one on a node comes",
        ),
    ],
)
def test_who_counts_as_what(desired: Model, observed: Observed, does: list[str]) -> None:
    """Each replica counts once, and none that will not be there."""
    assert planned_words([desired], observed) == does


@pytest.mark.parametrize(
    ("desired", "one", "rest", "does"),
    [
        pytest.param(1, COMING, {"pending": pending(PLACED, overdue=True)}, "stop a1 n", id="its order is overdue"),
        pytest.param(1, structs.replace(COMING, since_s=NOW_S - 600), {}, "stop a1 n", id="nobody's order is"),
        pytest.param(1, structs.replace(COMING, since_s=NOW_S - 599), {}, "", id="it has time yet"),
        pytest.param(0, LOWERED, {}, "stop a1 n", id="a copy takes too long"),
        pytest.param(0, DRAINS, {"tries": {f"demote/{NAME}": BEFORE}}, "stop a1 n", id="a copy failed"),
        pytest.param(0, structs.replace(DRAINS, running=1, drain_until_s=0.0), {}, "drain a1 n", id="for how long?"),
        pytest.param(0, replica(phase=ReplicaPhase.GONE), {}, "", id="nothing outlives it"),
        pytest.param(0, replica(), {"tries": {f"drain/{NAME}": JUST}}, "", id="it could not be drained just now"),
        pytest.param(1, warm(), {"tries": {f"promote/{NAME}": JUST}}, "place a2 n", id="nor promoted"),
        pytest.param(None, structs.replace(COMING, running=1, since_s=NOW_S), {}, "drain a1 n", id="it has work"),
        pytest.param(0, structs.replace(COMING, since_s=NOW_S), {}, "stop a1 n", id="it is loaded in vain"),
        pytest.param(0, WOKEN, {"pending": pending(order(Verb.PROMOTE))}, "", id="from host memory it is let come up"),
    ],
)
def test_what_is_to_be_done_about_one(desired: int | None, one: Replica, rest: dict[str, object], does: str) -> None:
    """The first thing that is said, where so many are wanted; None: its model is not."""
    models = [] if desired is None else [model(wanted=desired)]
    assert (planned_words(models, observe([HOST], [one], **rest)) or [""])[0] == does


def test_memory_that_outlives_its_process_is_freed_also_in_the_host() -> None:
    """Its lease says so."""
    there = structs.replace(node(), host=LeasedMemory(80, {NAME: 40}))
    assert planned_words([model(wanted=0)], observe([there], [replica(phase=ReplicaPhase.GONE)])) == ["stop a1 n"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"phase": ReplicaPhase.PROVISIONING, "since_s": NOW_S - 1}, {}),
        ({"idle_s": NOW_S - 1}, {"running": 2}),
        ({"idle_s": NOW_S - 300}, {"idle_s": NOW_S - 200}),
    ],
    ids=["who is not up yet, however young", "who has nothing to do", "who is idle for longer"],
)
def test_who_goes_when_fewer_are_wanted(one: dict[str, object], other: dict[str, object]) -> None:
    """Of two, whichever came first."""
    for first, second in ((one, other), (other, one)):
        observed = observe([node()], [replica(**first), replica(serial=2, **second)])
        (said,) = planned_words([model()], observed)
        assert said.split()[1] == ("a1" if first is one else "a2")


def test_the_oldest_of_those_that_nobody_needs_goes() -> None:
    """A floor keeps one of two that are WARM, the one that came last."""
    there = [warm(since_s=NOW_S - LINGER_S - 1), warm(serial=2, since_s=NOW_S - LINGER_S - 9)]
    assert planned_words([floor()], observe([HOST], there)) == ["stop a2 n"]


@pytest.mark.parametrize(
    ("desired", "one", "tries", "at_s"),
    [
        (model(wanted=0), replica(since_s=NOW_S - RESIDENT_S + 1), {}, NOW_S + 1),
        (model(wanted=0), warm(since_s=NOW_S - LINGER_S + 7), {}, NOW_S + 7),
        (model(), replica(phase=ReplicaPhase.PROVISIONING, since_s=NOW_S - 590), {}, NOW_S + 10),
        (model(wanted=0), replica(phase=ReplicaPhase.DRAINING, running=1, drain_until_s=NOW_S + 3), {}, NOW_S + 3),
        (model(wanted=0), replica(), {f"drain/{NAME}": JUST}, NOW_S + 1),
        (model(), replica(), {}, None),
    ],
    ids=["it came up just now", "it lingers", "it comes", "it drains", "it failed", "nothing is due"],
)
def test_when_to_look_again(desired: Model, one: Replica, tries: dict[str, Tries], at_s: float | None) -> None:
    """At the moment when something else would be said, though nothing was seen."""
    assert plan([desired], observe([HOST], [one], tries=tries), NOW_S).next_s == at_s
