"""A node's agent: who is started, who leaves, what is answered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.fleet import agent
from holdfast.fleet.actions import Action, Verb, replica_name
from holdfast.fleet.agent import House, Remove, Sight, Start, Turn, node_of, step
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Memory, Phase, Replica
from holdfast.fleet.records import Orders

NAME = replica_name("chat", 1)
SERVES = Sight(is_there=True, serves=True)
LOADS = Sight(is_there=True)


def order(verb: Verb, serial: int = 1, **more: object) -> Action:
    placed = {"version": "v", "devices": ("host-1",), "device_bytes": 100} if verb is Verb.PLACE else {}
    return Action(verb=verb, model="chat", serial=serial, node="n", **(placed | more))


PLACE, DRAIN, STOP = order(Verb.PLACE), order(Verb.DRAIN, until_s=60.0), order(Verb.STOP, until_s=60.0)


def asked(*actions: Action, overdue: frozenset[str] = frozenset()) -> Orders:
    return Orders(actions=actions, overdue=overdue)


def turn(before: Turn | None, orders: Orders, sight: Sight | None, now_s: float) -> Turn:
    return step(before.houses if before is not None else {}, orders, {NAME: sight} if sight is not None else {}, now_s)


def phase(one: Turn) -> Phase:
    return one.houses[NAME].replica.phase


def test_one_is_placed_and_serves() -> None:
    """An order to place is begun once; the replica is ready when it serves."""
    begun = turn(None, asked(PLACE), None, 1.0)
    assert begun.deeds == (Start(PLACE),)
    assert phase(begun) is Phase.PROVISIONING
    loading = turn(begun, asked(PLACE), LOADS, 2.0)
    assert loading.deeds == ()
    ready = turn(loading, asked(PLACE), SERVES, 5.0)
    assert (phase(ready), ready.houses[NAME].replica.since_s, ready.answers) == (Phase.READY, 5.0, {})
    landed = turn(ready, asked(), SERVES, 6.0)
    assert (phase(landed), landed.deeds) == (Phase.READY, ())


def test_asked_again_it_is_not_started_twice() -> None:
    """Neither by an agent that goes on, nor by the next one."""
    begun = turn(None, asked(PLACE), None, 1.0)
    assert turn(begun, asked(PLACE), LOADS, 2.0).deeds == ()
    # Its agent was killed before it started anything: the next one does.
    assert turn(None, asked(PLACE), None, 2.0).deeds == (Start(PLACE),)
    # It was killed after that: the next one finds the processes.
    found = Sight(is_there=True, replica=Replica(model="chat", serial=1, node="n", phase=Phase.PROVISIONING))
    assert turn(None, asked(PLACE), found, 2.0).deeds == ()


def test_whom_an_order_says_to_stop_is_not_started() -> None:
    """An order to stop that stands beside one to place wins, and is answered at once."""
    told = turn(None, asked(PLACE, STOP), None, 1.0)
    assert (told.deeds, told.houses, told.answers) == ((), {}, {STOP.id: ""})


def test_what_is_overdue_is_not_begun() -> None:
    """Nobody waits for it any more."""
    assert turn(None, asked(PLACE, overdue=frozenset({PLACE.id})), None, 1.0).deeds == ()


def test_one_that_cannot_be_is_answered_when_nothing_of_it_is_left() -> None:
    """Its memory counts until its processes are gone; only then the order has failed."""
    begun = turn(None, asked(PLACE), None, 1.0)
    broken = turn(begun, asked(PLACE), Sight(is_there=True, trouble="no such file"), 2.0)
    assert (broken.deeds, broken.answers) == ((Remove(NAME),), {})
    assert node_of("n", {"host-1": 500}, broken.houses).devices["host-1"].leases == {NAME: 100}
    over = turn(broken, asked(PLACE), None, 3.0)
    assert (over.deeds, over.answers) == ((), {PLACE.id: "no such file"})
    assert node_of("n", {"host-1": 500}, over.houses).devices["host-1"] == Memory(500)
    assert turn(over, asked(PLACE), None, 4.0).answers == {PLACE.id: "no such file"}, "until it was heard"
    assert turn(over, asked(), None, 5.0).houses == {}


def test_who_drains_stays_and_leaves_when_nothing_runs() -> None:
    """To drain is to stay; to stop waits for what runs, and is answered when nothing is left."""
    ready = turn(None, asked(), Sight(is_there=True, serves=True, replica=_found()), 1.0)
    busy = Sight(is_there=True, serves=True, running=3)
    drains = turn(ready, asked(DRAIN), busy, 2.0)
    assert (phase(drains), drains.houses[NAME].replica.drain_until_s, drains.deeds) == (Phase.DRAINING, 60.0, ())
    leaving = turn(drains, asked(STOP), busy, 3.0)
    assert (leaving.deeds, leaving.answers) == ((), {})
    empty = turn(leaving, asked(STOP), SERVES, 4.0)
    assert empty.deeds == (Remove(NAME),)
    assert node_of("n", {"host-1": 500}, empty.houses).devices["host-1"].leases == {NAME: 100}, "until it is gone"
    assert turn(empty, asked(STOP), None, 5.0).answers == {STOP.id: ""}


def test_requests_have_their_time_and_no_more() -> None:
    """Past it a replica leaves with requests running, which go on elsewhere."""
    ready = turn(None, asked(), Sight(is_there=True, serves=True, replica=_found()), 1.0)
    busy = Sight(is_there=True, serves=True, running=3)
    leaving = turn(ready, asked(STOP), busy, 2.0)
    assert leaving.deeds == ()
    later = turn(leaving, asked(order(Verb.STOP, until_s=90.0)), busy, 61.0)
    assert later.deeds == (Remove(NAME),), "who was told to drain keeps its first time"


def test_processes_that_nobody_has_written_of_are_taken_in() -> None:
    """An agent that begins finds them by their names."""
    found = turn(None, asked(), Sight(is_there=True, serves=True, replica=_found()), 7.0)
    assert (phase(found), found.deeds) == (Phase.READY, ())


def test_one_whose_processes_are_gone_is_gone() -> None:
    """It is in no record any more, so that another is placed."""
    ready = turn(None, asked(), Sight(is_there=True, serves=True, replica=_found()), 1.0)
    assert turn(ready, asked(), None, 2.0).houses == {}
    hopeless = turn(ready, asked(), Sight(is_there=True, trouble="crashed"), 2.0)
    assert hopeless.deeds == (Remove(NAME),)
    assert turn(hopeless, asked(), None, 3.0).houses == {}


def test_idle_is_since_nothing_runs() -> None:
    """As long as something runs nobody is idle."""
    ready = turn(None, asked(), Sight(is_there=True, serves=True, replica=_found()), 1.0)
    assert ready.houses[NAME].replica.idle_s == 1.0
    assert turn(ready, asked(), SERVES, 5.0).houses[NAME].replica.idle_s == 1.0
    busy = turn(ready, asked(), Sight(is_there=True, serves=True, running=1), 6.0)
    assert (busy.houses[NAME].replica.idle_s, busy.houses[NAME].replica.running) == (0.0, 1)
    assert turn(busy, asked(), SERVES, 9.0).houses[NAME].replica.idle_s == 9.0


def test_what_this_node_cannot_do_is_said() -> None:
    """Host memory keeps no weights here yet."""
    ready = turn(None, asked(), Sight(is_there=True, serves=True, replica=_found()), 1.0)
    demote = order(Verb.DEMOTE)
    assert turn(ready, asked(demote), SERVES, 2.0).answers == {demote.id: agent.NOT_HERE}
    warm = order(Verb.PLACE, serial=2, level=Level.WARM)
    assert turn(ready, asked(warm), SERVES, 2.0).answers == {warm.id: agent.NOT_HERE}


def _found() -> Replica:
    place = {"devices": ("host-1",), "device_bytes": 100}
    return Replica(model="chat", serial=1, node="n", phase=Phase.PROVISIONING, **place)


ORDERS = st.lists(st.sampled_from([PLACE, DRAIN, STOP]), unique_by=lambda one: one.id)


@given(st.lists(st.tuples(ORDERS, st.booleans(), st.booleans(), st.booleans()), max_size=30))
def test_whatever_is_asked_and_happens(moments: list[tuple[list[Action], bool, bool, bool]]) -> None:
    """Processes are there from when they are started until they are removed, or somebody kills them; agents may forget
    everything. Nobody is started who is there or is to be stopped, and what is there counts."""
    houses: dict[str, House] = {}
    there = False
    for now_s, (actions, forgets, dies, serves) in enumerate(moments, 1):
        houses = {} if forgets else houses
        there = there and not dies
        sight = {NAME: Sight(is_there=True, serves=serves, replica=_found())} if there else {}
        one = step(houses, asked(*actions), sight, float(now_s))
        houses = one.houses
        if there:
            assert node_of("n", {"host-1": 500}, houses).devices["host-1"].leases == {NAME: 100}
        for deed in one.deeds:
            match deed:
                case Start():
                    assert not there
                    assert STOP not in actions
                    assert PLACE in actions
                    there = True
                case Remove():
                    assert (there and STOP in actions) or houses[NAME].leaves
                    there = False
        if one.answers.get(STOP.id) == "":
            assert not there
            assert NAME not in houses
