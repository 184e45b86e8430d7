"""How much of what was promised serves, where services work in pairs."""

from __future__ import annotations

from msgspec import structs

from holdfast.rollout.machine import (
    CRASHES_MAX,
    DesiredState,
    ObservedReplica,
    ReplicaStage,
    ReplicaState,
    WorkloadReplicas,
    move_replicas,
)
from holdfast.rollout.revision import Revision
from tests.rigs.worlds.rollout import part, revision


def stock_of(target: Revision, before: Revision | None, there: list[tuple[str, str, Revision]]) -> WorkloadReplicas:
    """Replicas that all count: service, set, and the revision that brought each."""
    replicas, look = {}, {}
    for number, (service, set_id, brought) in enumerate(there, 1):
        name = f"{service}-{number}"
        replicas[name] = ReplicaState(service=service, set_id=set_id, pair=brought.pair(service), counted=True)
        look[name] = ObservedReplica(
            service=service, set_id=set_id, stage=ReplicaStage.SERVING, admitted=True, weight=1.0
        )
    return WorkloadReplicas(target, before, replicas, look, {}, 0.0, len(there))


def fleet(number: int, prefill: str, one: str, other: str) -> Revision:
    """Two kinds of decode workers that share the prefill workers of their model."""
    return revision(
        number,
        prefill=part(prefill, peers=("one", "other")),
        one=part(one, peers=("prefill",)),
        other=part(other, peers=("prefill",)),
    )


def test_two_decode_services_of_one_prefill_are_counted_once_each() -> None:
    """Half of one of them is half, however many services the prefill workers work with."""
    now = fleet(1, "p*2", "d*2", "e*2")
    stock = stock_of(now, now, [("prefill", "p", now)] * 2 + [("one", "d", now)] * 2 + [("other", "e", now)] * 2)
    assert not any(map(stock.is_enough, stock.replicas)), "nobody is too many"


def test_two_sets_of_mates_make_no_two_of_one() -> None:
    """A decode worker that can work with the prefill workers of two sets is one decode worker all the same."""
    first, second, third = (
        revision(number, prefill=part(prefill, peers=("decode",)), decode=part(decode, peers=("prefill",)))
        for number, (prefill, decode) in enumerate((("p*2", "d*2"), ("q*2", "d*2"), ("q*2", "e*2")), 1)
    )
    there = [("prefill", "p", first), ("prefill", "q", second), ("decode", "d", first), ("decode", "d", first)]
    stock = stock_of(third, first, there)
    assert not stock.is_enough("decode-3"), "one of two would be left"


def test_a_mate_of_one_of_two_services_is_no_orphan() -> None:
    """Prefill workers are of use while any of their decode services has workers that stay, and decode workers are not
    without them."""
    old, new = fleet(1, "p*1", "d*1", "e*1"), fleet(2, "q*1", "f*1", "e*1")
    there = [("prefill", "p", old), ("other", "e", old), ("prefill", "q", new), ("one", "f", new)]
    stock = stock_of(new, old, there)
    assert not stock.has_lost_peers("prefill-1")
    lone = stock_of(new, old, [("one", "d", old), ("other", "e", old), ("prefill", "q", new)])
    assert lone.has_lost_peers("one-1")
    assert not lone.has_lost_peers("other-2"), "its set is in the new revision, too"


def test_of_those_that_are_too_many_what_serves_least_leaves_first() -> None:
    """One that is dead, or at half its traffic, leaves before the newest; where nothing is held against any, the newest
    leaves."""
    before, now = revision(1, worker=part("a*3")), revision(1, worker=part("a*1"))

    def leavers(weights: tuple[float, float, float]) -> list[str]:
        stock = stock_of(now, before, [("worker", "a", before)] * 3)
        for (name, seen), weight in zip(list(stock.observed.items()), weights, strict=True):
            stage = ReplicaStage.SERVING if weight else ReplicaStage.STARTING
            stock.observed[name] = structs.replace(seen, weight=weight, stage=stage)
        move_replicas(stock)
        return [name for name, one in stock.replicas.items() if one.desired is not DesiredState.SERVE]

    assert leavers((0.0, 0.5, 1.0)) == ["worker-1", "worker-2"]
    assert leavers((1.0, 0.5, 0.0)) == ["worker-2", "worker-3"]
    assert leavers((1.0, 1.0, 1.0)) == ["worker-2", "worker-3"]


def test_the_last_of_a_set_that_dies_while_it_drains_is_waited_for() -> None:
    """Its streams can go on nowhere else. Not so one whose set others serve, one that breaks again and again or never
    counted, and one whose time is over, or whose set is undone."""
    old, new = revision(1, worker=part("a*2")), revision(2, worker=part("b*2"))

    def waited_for(change: str = "") -> bool:
        stock = stock_of(new, old, [("worker", "a", old), ("worker", "a", old), ("worker", "b", new)])
        stock.set_desired("worker-1", DesiredState.DRAIN, 10.0)
        crashes = CRASHES_MAX if change == "breaks" else 1
        stock.observed["worker-1"] = ObservedReplica(
            service="worker", set_id="a", stage=ReplicaStage.STARTING, crashes=crashes
        )
        if change != "another serves":
            del stock.replicas["worker-2"]
        if change == "never counted":
            stock.replicas["worker-1"] = structs.replace(stock.replicas["worker-1"], counted=False)
        stock.is_undo = change == "undone"
        stock.now_s = 10.0 if change == "late" else 0.0
        return not stock.has_drained("worker-1")

    assert waited_for()
    assert not any(map(waited_for, ("another serves", "breaks", "never counted", "undone", "late")))
