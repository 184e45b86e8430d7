"""One pass of the planner at a time: what is counted, who is placed, who gives way, and what never happens."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from holdfast.fleet.actions import Tries, Verb
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import LeasedMemory, Node, Observed, ReplicaPhase
from holdfast.fleet.placement import NO_DEVICE
from holdfast.fleet.planner import Planner, plan
from holdfast.health.records import Demand
from tests.rigs.fleet.moment import (
    ASKED,
    COOLDOWN_S,
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

# -- counting once


@pytest.mark.parametrize(
    ("observed", "left"),
    [
        pytest.param(observe([node()]), 2, id="nobody"),
        pytest.param(observe([node()], pending=pending(PLACED)), 1, id="asked for"),
        pytest.param(observe([node(a1=40)], pending=pending(PLACED)), 1, id="asked for and granted"),
        pytest.param(
            observe([node(a1=40)], [replica(phase=ReplicaPhase.PROVISIONING)], pending=pending(PLACED)),
            1,
            id="asked for and granted and seen",
        ),
        pytest.param(observe([node()], [replica()]), 1, id="seen and not granted yet"),
        pytest.param(observe([node(a1=40)], [replica()]), 1, id="seen and granted"),
        pytest.param(observe([node(a1=50)], [replica()]), 0, id="granted more than was promised"),
        pytest.param(observe([node(a1=40)], [replica(phase=ReplicaPhase.GONE)]), 1, id="gone, and its memory is not"),
        pytest.param(observe([node(x1=60)]), 0, id="a stranger's"),
    ],
)
def test_an_owner_counts_once(observed: Observed, left: int) -> None:
    """On a device of 80, with one of 40 in any stage of its coming, there is room for `left` others of 40."""
    placed = [one for one in planned_words([model("b"), model("c")], observed) if one.startswith("place")]
    assert len(placed) == left


def test_what_is_asked_for_is_not_asked_for_again() -> None:
    """One that flies is neither placed twice nor missed, whether it is seen or not."""
    assert planned_words([model()], observe([node(gpus=4)], pending=pending(PLACED))) == []
    there = replica(phase=ReplicaPhase.PROVISIONING)
    assert planned_words([model()], observe([node(gpus=4, a1=40)], [there], pending=pending(PLACED))) == []


def test_the_same_is_planned_twice() -> None:
    """Asked again of the same, the same ids are said: who carries them out can tell that it did."""
    observed, models = observe([node(gpus=2), node("m")]), [model(wanted=3), model("b", 70)]
    first, again = plan(models, observed, NOW_S), plan(models, observed, NOW_S + 1)
    assert [one.id for one in first.actions] == [one.id for one in again.actions]
    assert len({one.id for one in first.actions}) == 4


def test_a_serial_is_never_used_again() -> None:
    """Not that of a replica that was, as far as the records say."""
    assert planned_words([model()], observe([node()], serials={"a": 7})) == ["place a8 n"]


# -- fact 20, and the other named defects


def test_a_restarted_controller_adopts_what_is_there() -> None:
    """Whatever is seen and wanted is kept, also what nobody remembers to have asked for."""
    there = [replica(), replica(serial=2, phase=ReplicaPhase.PROVISIONING, since_s=NOW_S - 5)]
    assert planned_words([model(wanted=2)], observe([node(a1=40, a2=40)], there)) == []


def test_a_crashed_warm_replica_does_not_come_back_hot_on_a_full_device() -> None:
    """The device is another's: its floor gets another one WARM by way of a device that has room, and else waits."""
    wanted = [model(wanted=0, floor=Level.WARM, replicas_min=1), model("b", 60, dedicated=True)]
    owner = replica("b", size=60)
    full = plan(wanted, observe([node(host=100, b1=60)], [owner]), NOW_S)
    assert (full.actions, full.unmet) == ((), {"a": NO_DEVICE})
    planned = plan(wanted, observe([node(gpus=2, host=100, b1=60)], [owner]), NOW_S)
    assert [(one.verb, one.level, one.devices) for one in planned.actions] == [(Verb.PLACE, Level.WARM, ("gpu1",))]


def test_one_that_is_warm_comes_back_to_its_own_devices() -> None:
    """Its vaults are of those: with room on others only, another is started there."""
    nodes = [node(gpus=2, host=100, b1=60)]
    for mine, planned in (("gpu1", ["promote a1 n"]), ("gpu0", ["place a2 n"])):
        assert (
            planned_words([model(), model("b", 60)], observe(nodes, [warm(devices=(mine,)), replica("b", size=60)]))
            == planned
        )


def test_a_memory_ledger_does_not_drift() -> None:
    """Leases decide, whatever was promised and whoever has gone: after 1,000 comings and goings all is free again."""
    planner = Planner()
    planner.view.observe_node(node(), (), NOW_S)
    for turn in range(1_000):
        now_s = NOW_S + 100.0 * turn
        planner.view.set_model(model(size=80))
        (placed,) = planner.plan(now_s).actions
        planner.view.add_action(placed)
        one = structs.replace(replica(size=80), serial=placed.serial, since_s=now_s)
        full = Node(name="n", devices={"gpu0": LeasedMemory(80, {one.name: 80})})
        planner.view.observe_node(full, (one,), now_s)
        planner.view.remove_model("a")
        (drain,) = planner.plan(now_s + 50).actions
        assert drain.verb is Verb.DRAIN
        planner.view.add_action(drain)
        planner.view.observe_node(node(), (), now_s + 60)
    assert not planner.view.pending


def test_lost_events_are_made_up_for_by_the_next_snapshot() -> None:
    """A replica whose end nobody told is missing from its node's snapshot, and that is enough."""
    planner = Planner()
    planner.view.set_model(model())
    planner.view.observe_node(node(a1=40), (replica(),), NOW_S)
    assert planner.plan(NOW_S).actions == ()
    planner.view.observe_node(node(), (), NOW_S + 1)
    assert planner.plan(NOW_S + 1).actions == ()  # it crashed, and is not started again at once
    assert [one.id for one in planner.plan(NOW_S + 3).actions] == ["place/ModelActor:a:r2/0.1"]


def test_a_crash_counts_once() -> None:
    """When its process is seen to be gone, and not again when its memory is; nor if it had been told to drain."""
    planner = Planner()
    planner.view.observe_node(node(a1=40), (replica(),), NOW_S)
    planner.view.observe_node(node(a1=40), (replica(phase=ReplicaPhase.GONE),), NOW_S + 1)
    planner.view.observe_node(node(), (), NOW_S + 2)
    assert planner.view.tries == {"place/a": Tries(1, NOW_S + 1)}
    planner.view.observe_node(node(b1=40), (replica("b", phase=ReplicaPhase.DRAINING),), NOW_S)
    planner.view.observe_node(node(b1=40), (replica("b", phase=ReplicaPhase.GONE),), NOW_S + 1)
    assert "place/b" not in planner.view.tries


def test_one_that_dies_as_it_comes_up_counts_though_nobody_saw_it_live() -> None:
    """Else it would be started again and again without a pause."""
    planner = Planner()
    planner.view.add_action(PLACED)
    planner.view.observe_node(node(a1=40), (replica(phase=ReplicaPhase.GONE),), NOW_S)
    assert planner.view.tries == {"place/a": Tries(1, NOW_S)}
    assert not planner.view.pending


def test_a_replica_that_was_perhaps_started_holds_its_memory_until_it_was_stopped() -> None:
    """The order's time is over and nobody knows: it is stopped by name, and nothing is placed there before that."""
    observed = observe([node()], pending=pending(PLACED, overdue=True), tries={"place/a": Tries(1, NOW_S - 60)})
    assert planned_words([model(size=80)], observed) == ["stop a1 n"]


# -- who gives way


@pytest.mark.parametrize(
    ("fields", "gives_way"),
    [
        ({}, True),
        ({"since_s": NOW_S - RESIDENT_S + 1}, False),
        ({"running": 1, "idle_s": 0.0, "since_s": NOW_S - COOLDOWN_S + 1}, False),
        ({"running": 1, "idle_s": 0.0, "since_s": NOW_S - COOLDOWN_S}, True),
    ],
    ids=["idle", "just came up", "busy, and its turn is not over", "busy, and its turn is over"],
)
def test_who_is_evictable_gives_way_after_its_time(fields: dict[str, object], gives_way: bool) -> None:
    """A request for another takes its place: at once if it is idle, after its turn if it is not; never before it has
    been there for a while."""
    observed = observe([node(a1=60)], [replica(size=60, **fields)], **ASKED)
    assert planned_words([model(size=60), model("b", 60)], observed) == (["drain a1 n"] if gives_way else [])


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"dedicated": True}, ASKED),
        ({"floor": Level.HOT, "replicas_min": 1}, ASKED),
        ({}, {}),
    ],
    ids=["it is dedicated", "its floor is HOT", "nobody asks for the newcomer"],
)
def test_who_does_not_give_way(fields: dict[str, object], asked: dict[str, dict[str, Demand]]) -> None:
    """Who is kept never does; and what is merely wanted takes nobody's place."""
    observed = observe([node(a1=60)], [replica(size=60)], **asked)
    assert planned_words([model(size=60, **fields), model("b", 60)], observed) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"idle_s": NOW_S - 500}, {"idle_s": NOW_S - 100}),
        ({"idle_s": NOW_S - 100}, {"running": 1}),
    ],
    ids=["idle for longer", "the other has work"],
)
def test_the_first_to_give_way(one: dict[str, object], other: dict[str, object]) -> None:
    """Of two alike the one goes first, wherever it stands."""
    models = [model(size=60), model("c", 60), model("b", 60)]
    for first, second in ((one, other), (other, one)):
        there = [replica(size=60, **first), replica("c", size=60, node="m", **second)]
        expected = "drain a1 n" if first is one else "drain c1 m"
        assert planned_words(models, observe([node(a1=60), node("m", c1=60)], there, **ASKED)) == [expected]


@pytest.mark.parametrize("field", ["size", "reload_s"])
def test_of_those_idle_for_as_long_the_cheapest_goes(field: str) -> None:
    """The smaller one; of the same size the one that is loaded again soonest."""
    sizes = (50, 60) if field == "size" else (60, 60)
    times = (9.0, 9.0) if field == "size" else (3.0, 9.0)
    for order in (1, -1):
        (own, loads), (others, other_loads) = list(zip(sizes, times, strict=True))[::order]
        models = [model(size=own, reload_s=loads), model("c", others, reload_s=other_loads), model("b", 70)]
        there = [replica(size=own), replica("c", size=others, node="m")]
        expected = "drain a1 n" if order == 1 else "drain c1 m"
        assert planned_words(models, observe([node(a1=own), node("m", c1=others)], there, **ASKED)) == [expected]


def test_no_more_give_way_than_must() -> None:
    """Two small ones are idle for longest, and one large one is enough: the small ones on the same device stay."""
    small = [replica("c", size=10, idle_s=NOW_S - 900), replica("d", size=10, idle_s=NOW_S - 800)]
    there = [*small, replica("a", size=60, idle_s=NOW_S - 100)]
    models = [model("a", 60), model("c", 10), model("d", 10), model("b", 60)]
    assert planned_words(models, observe([node(a1=60, c1=10, d1=10)], there, **ASKED)) == ["drain a1 n"]


def test_room_that_is_being_made_is_waited_for() -> None:
    """Somebody is leaving already, and its room is enough: nobody else must go."""
    leaver = replica(size=60, phase=ReplicaPhase.DRAINING, running=1, drain_until_s=NOW_S + 9)
    there = [leaver, replica("c", node="m", size=60)]
    models = [model(size=60, wanted=0), model("c", 60), model("b", 60)]
    assert planned_words(models, observe([node(a1=60), node("m", c1=60)], there, **ASKED)) == []


def test_room_that_another_waits_for_is_not_taken() -> None:
    """A small newcomer that nobody asks for does not slip in before the large one that room is made for."""
    there = [replica(size=60, phase=ReplicaPhase.DRAINING, running=1, drain_until_s=NOW_S + 9)]
    observed = observe([node(a1=60)], there, **ASKED)
    assert planned_words([model(size=60, wanted=0), model("b", 70), model("c", 20)], observed) == []
    assert planned_words([model(size=60, wanted=0), model("b", 60), model("c", 20)], observed) == ["place c1 n"]


# -- up and down


@pytest.mark.parametrize(
    ("running", "until_s", "does"),
    [(1, NOW_S + 1, []), (1, NOW_S, ["demote a1 n"]), (0, NOW_S + 1, ["demote a1 n"])],
    ids=["its requests have time", "their time is over", "they have ended"],
)
def test_work_has_its_time(running: int, until_s: float, does: list[str]) -> None:
    """Who drains leaves its devices when nothing runs, or when its requests have had their time, and not before."""
    one = replica(phase=ReplicaPhase.DRAINING, running=running, drain_until_s=until_s)
    assert planned_words([model(wanted=0)], observe([node(host=100, a1=40)], [one])) == does


@pytest.mark.parametrize(
    ("host", "does"), [(40, "demote a1 n"), (39, "stop a1 n")], ids=["there is memory", "there is not"]
)
def test_down_to_host_memory_or_to_disk(host: int, does: str) -> None:
    """WARM if the host's leases leave enough, else COLD."""
    one = replica(phase=ReplicaPhase.DRAINING, drain_until_s=NOW_S)
    assert planned_words([model(wanted=0)], observe([node(host=host, a1=40)], [one])) == [does]


def test_a_warm_one_is_promoted_where_it_is() -> None:
    """Rather than another started elsewhere."""
    assert planned_words([model()], observe([node(host=100), node("m", gpus=8)], [warm()])) == ["promote a1 n"]


def test_a_warm_one_that_nobody_wants_lingers() -> None:
    """And goes after a while; one that a floor needs stays."""
    observed = observe([node(host=100)], [warm(since_s=NOW_S - LINGER_S + 1)])
    assert planned_words([model(wanted=0)], observed) == []
    assert planned_words([model(wanted=0)], observed, NOW_S + 1) == ["stop a1 n"]
    assert planned_words([model(wanted=0, floor=Level.WARM, replicas_min=1)], observed, NOW_S + 1) == []


def test_replicas_are_spread_and_kept_to_their_nodes() -> None:
    """One a node first; where only so many may be, and on which nodes, is kept to, though there is room."""
    nodes = [node("m", gpus=4), node("n", gpus=4), node("o", gpus=4)]
    assert {one.node for one in plan([model(wanted=3)], observe(nodes), NOW_S).actions} == {"m", "n", "o"}
    bound = model(wanted=3, nodes=frozenset({"n", "o"}), per_node_max=1)
    planned = plan([bound], observe(nodes), NOW_S)
    assert {one.node for one in planned.actions} == {"n", "o"}
    assert planned.unmet == {"a": "there is no room for it"}


def test_one_is_placed_where_its_files_are() -> None:
    """A load from disk is sooner than a download."""
    nodes = [node("m"), structs.replace(node("n"), on_disk=frozenset({"a"})), node("o")]
    assert planned_words([model()], observe(nodes)) == ["place a1 n"]


def test_a_node_that_fails_is_left_alone_for_a_while() -> None:
    """Others are tried; when its back-off is over it is one of them again."""
    tries = {"node/n": Tries(3, NOW_S - 1)}
    nodes = [node("n"), node("o")]
    assert planned_words([model()], observe(nodes, tries=tries)) == ["place a1 o"]
    assert planned_words([model()], observe(nodes[:1], tries=tries)) == []
    assert planned_words([model()], observe(nodes, tries=tries), NOW_S + 3) == ["place a1 n"]


@pytest.mark.parametrize(("failed", "again_s"), [(1, 1), (2, 2), (5, 16), (9, 256), (10, 300), (99, 300)])
def test_back_off_doubles_up_to_a_bound(failed: int, again_s: float) -> None:
    """What failed is tried again after a second, two, four, and never later than five minutes."""
    assert Tries(failed, 7.0).retry_at_s == 7.0 + again_s


def test_everything_that_is_written_down_can_be_read() -> None:
    """What is in flight is in the store before it is carried out, and another controller goes on from it."""
    observed = observe([node(a1=40)], [replica()], pending=pending(PLACED), tries={"x": Tries(1, 2.0)}, **ASKED)
    assert msgspec.json.decode(msgspec.json.encode(observed), type=Observed) == observed


def test_who_is_on_its_way_to_host_memory_does_not_leave_it() -> None:
    """One is being copied there and takes all of it: the next finds none, now or later, and does not wait."""
    coming = replica(phase=ReplicaPhase.DEMOTING, since_s=NOW_S - 1)
    drained = replica("b", phase=ReplicaPhase.DRAINING, drain_until_s=NOW_S + 20)
    observed = observe([node(host=50, a1=40, b1=40)], [coming, drained])
    assert planned_words([model(wanted=0), model("b", wanted=0)], observed) == ["stop b1 n"]


def test_the_next_version_comes_one_by_one() -> None:
    """However much room there is, one more than wanted is started, and none leaves before it serves."""
    old = [replica(serial=serial, version="x") for serial in (1, 2, 3)]
    observed = observe([node(gpus=8)], old)
    assert planned_words([model(wanted=3, version="y")], observed) == ["place a4 n"]
    coming = replica(serial=4, version="y", phase=ReplicaPhase.PROVISIONING, since_s=NOW_S)
    assert planned_words([model(wanted=3, version="y")], observe([node(gpus=8)], [*old, coming])) == []
    ready = structs.replace(coming, phase=ReplicaPhase.READY)
    assert planned_words([model(wanted=3, version="y")], observe([node(gpus=8)], [*old, ready])) == ["drain a1 n"]


def test_who_just_came_up_is_not_scaled_away() -> None:
    """A number that falls at once takes nobody away who was there for a moment only."""
    observed = observe([node(a1=40)], [replica(since_s=NOW_S - RESIDENT_S + 1)])
    assert planned_words([model(wanted=0)], observed) == []
    assert planned_words([model(wanted=0)], observed, NOW_S + 1) == ["drain a1 n"]
