"""What is known of a fleet, told change by change: what is done, what has failed and how often, what is forgotten."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.fleet.actions import Action, Tries, Verb
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Replica, ReplicaPhase
from holdfast.fleet.planner import Planner
from holdfast.fleet.view import FleetView
from holdfast.health.records import Demand
from tests.rigs.fleet.moment import NOW_S, PLACED, model, node, observe, pending, replica, warm

NAME = PLACED.name


def order(verb: Verb) -> Action:
    return Action(verb=verb, model="a", serial=1, node="n", deadline_s=NOW_S + 60)


@pytest.mark.parametrize(
    ("verb", "one", "done"),
    [
        (Verb.PLACE, replica(phase=ReplicaPhase.PROVISIONING), False),
        (Verb.PLACE, replica(), True),
        (Verb.PROMOTE, warm(), False),
        (Verb.PROMOTE, replica(phase=ReplicaPhase.PROVISIONING), False),
        (Verb.PROMOTE, replica(), True),
        (Verb.DRAIN, replica(), False),
        (Verb.DRAIN, replica(phase=ReplicaPhase.DRAINING), True),
        (Verb.DRAIN, warm(), True),
        (Verb.DEMOTE, replica(phase=ReplicaPhase.DEMOTING), False),
        (Verb.DEMOTE, warm(), True),
        (Verb.STOP, replica(phase=ReplicaPhase.DRAINING), False),
        (Verb.STOP, replica(phase=ReplicaPhase.GONE), True),
    ],
    ids=lambda value: f"{value.level.word} {value.phase}" if isinstance(value, Replica) else str(value),
)
def test_an_order_flies_until_its_effect_is_seen(verb: Verb, one: Replica, done: bool) -> None:
    """And not only that it was begun; also where what lay between was never seen."""
    view = FleetView()
    view.add_action(order(verb))
    view.observe_node(node(), (one,), NOW_S)
    assert bool(view.pending) is not done


@pytest.mark.parametrize(
    ("verb", "one", "left"),
    [
        (Verb.PLACE, replica(), set()),
        (Verb.PROMOTE, replica(), set()),
        (Verb.PLACE, replica(phase=ReplicaPhase.DRAINING), {"place/a", f"promote/{NAME}", "node/n"}),
    ],
    ids=["it came up", "it was promoted", "it came, and goes already"],
)
def test_failures_are_forgotten_when_one_serves(verb: Verb, one: Replica, left: set[str]) -> None:
    """The model's, the node's, and its own; a model that crashed is well again also if its WARM one was promoted."""
    view = FleetView()
    view.tries.update({"place/a": Tries(3, 1.0), "node/n": Tries(2, 1.0)})
    if verb is Verb.PROMOTE or left:
        view.tries[f"promote/{NAME}"] = Tries(1, 1.0)
    view.add_action(order(verb))
    view.observe_node(node(), (one,), NOW_S)
    assert set(view.tries) == left


def test_who_was_told_to_go_and_is_gone_did_not_crash() -> None:
    """Nobody saw it drain."""
    view = FleetView()
    view.observe_node(node(a1=40), (replica(),), NOW_S)
    view.add_action(order(Verb.DRAIN))
    view.observe_node(node(), (), NOW_S + 1)
    assert not view.tries
    assert not view.pending


def test_an_order_that_is_overdue_counts_as_failed_once() -> None:
    """At its deadline, for its model and its node; not again by another controller that reads it."""
    view = FleetView()
    view.add_action(PLACED)
    view.expire(PLACED.deadline_s)
    failed = {"place/a": Tries(1, PLACED.deadline_s), "node/n": Tries(1, PLACED.deadline_s)}
    assert view.tries == failed
    after = FleetView()
    after.load((), view.observed())
    after.expire(PLACED.deadline_s + 9)
    assert after.tries == failed
    assert after.next_deadline_s() is None


def test_to_drain_is_asked_for_again_when_its_time_is_over() -> None:
    """Under another id, after a pause: the first is done by nobody twice."""
    planner = Planner()
    planner.view.set_model(model(wanted=0))
    planner.view.observe_node(node(a1=40), (replica(),), NOW_S)
    (first,) = planner.plan(NOW_S).actions
    planner.view.add_action(first)
    assert planner.plan(first.deadline_s).actions == ()
    (again,) = planner.plan(first.deadline_s + 1).actions
    assert (first.id, again.id) == (f"drain/{NAME}/0.1", f"drain/{NAME}/0.2")


def test_nobodys_failures_are_kept() -> None:
    """Of a name that is no more, however it ended, no failure is remembered, so that they do not pile up."""
    failed, stop = Tries(1, 1.0), order(Verb.STOP)
    view = FleetView()
    view.add_action(PLACED)
    view.add_action(stop)
    view.on_failed(stop.id, NOW_S)
    assert f"stop/{NAME}" in view.tries  # it may be there
    view.on_failed(PLACED.id, NOW_S)
    assert set(view.tries) == {"place/a", "node/n"}
    view = FleetView()
    view.tries[f"stop/{NAME}"] = failed
    view.on_stopped(NAME, "a")
    assert not view.tries
    view.observe_node(node(), (replica(phase=ReplicaPhase.DRAINING),), NOW_S)
    view.tries[f"demote/{NAME}"] = failed
    view.observe_node(node(), (), NOW_S)
    assert not view.tries


def test_whoever_answers_that_it_stopped_is_believed() -> None:
    """It is there no longer, and nothing is asked of it."""
    view = FleetView()
    view.observe_node(node(a1=40), (replica(),), NOW_S)
    view.add_action(order(Verb.STOP))
    view.on_stopped(NAME, "a")
    assert not view.replicas
    assert not view.pending


def test_a_node_that_is_forgotten_leaves_nothing_behind() -> None:
    """Not its replicas, nor what was asked of it, nor its failures and files; what it had is placed elsewhere."""
    planner = Planner()
    view = planner.view
    view.set_model(model(wanted=2))
    view.observe_node(structs.replace(node(a2=40), on_disk=frozenset("a")), (replica(serial=2),), NOW_S)
    view.observe_node(node("m", gpus=2), (), NOW_S)
    view.add_action(PLACED)
    view.tries["node/n"] = Tries(1, NOW_S)
    assert planner.plan(NOW_S).actions == ()
    view.remove_node("n")
    assert (view.replicas, view.pending, view.tries, view.on_disk["a"]) == ({}, {}, {}, set())
    assert [one.node for one in planner.plan(NOW_S).actions] == ["m", "m"]


def test_what_was_asked_of_a_node_that_is_lost_is_asked_of_another() -> None:
    """It is not waited for."""
    planner = Planner()
    planner.view.set_model(model())
    for name in "mn":
        planner.view.observe_node(node(name), (), NOW_S)
    (first,) = planner.plan(NOW_S).actions
    planner.view.add_action(first)
    assert planner.plan(NOW_S).actions == ()
    planner.view.mark_lost(first.node)
    (again,) = planner.plan(NOW_S).actions
    assert {first.node, again.node} == {"m", "n"}


def test_memory_that_is_free_at_last_is_not_asked_for() -> None:
    """Of one whose process is gone: while its lease is there it is to be stopped, and no longer."""
    planner, gone = Planner(), replica(phase=ReplicaPhase.GONE)
    planner.view.set_model(model(wanted=0))
    planner.view.observe_node(node(a1=40), (gone,), NOW_S)
    assert [one.verb for one in planner.plan(NOW_S).actions] == [Verb.STOP]
    planner.view.observe_node(node(), (gone,), NOW_S)
    assert planner.plan(NOW_S).actions == ()


def test_files_that_are_gone_count_no_more() -> None:
    """A node that had them is one like the others."""
    planner = Planner()
    planner.view.set_model(model())
    planner.view.observe_node(node("m"), (), NOW_S)
    planner.view.observe_node(structs.replace(node(), on_disk=frozenset("a")), (), NOW_S)
    assert [one.node for one in planner.plan(NOW_S).actions] == ["n"]
    planner.view.observe_node(node(), (), NOW_S)
    assert [one.node for one in planner.plan(NOW_S).actions] == ["m"]


def test_a_demand_of_none_is_none() -> None:
    """Whoever says so in a number."""
    view = FleetView()
    view.set_demand("a", Demand(1, 1.0))
    view.set_demand("a", Demand(0, 1.0))
    assert not view.demand


def test_what_was_read_is_kept() -> None:
    """Another controller begins with what the first wrote down."""
    observed = observe(
        [node()], [warm("b")], pending=pending(PLACED), tries={"place/a": Tries(1, 2.0)}, serials={"a": 9}
    )
    view = FleetView()
    view.load((), observed)
    assert view.observed() == structs.replace(observed, serials={"a": 9, "b": 1})
    assert Level.WARM in {one.level for one in view.of_model["b"].values()}
