"""A node's agent: who is started, who leaves, what is answered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from holdfast.fleet.actions import Action, Verb, replica_name
from holdfast.fleet.agent import NOT_THERE, House, Move, Remove, Sight, Start, Turn, node_of, step
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Memory, Phase, Replica
from holdfast.fleet.records import Orders
from holdfast.fleet.room import HOST

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


def _found() -> Replica:
    place = {"devices": ("host-1",), "device_bytes": 100, "host_bytes": 80}
    return Replica(model="chat", serial=1, node="n", phase=Phase.PROVISIONING, **place)


# -- levels

TOTALS = {"host-1": 500, HOST: 300}
DEMOTE = order(Verb.DEMOTE, until_s=60.0, host_bytes=80, level=Level.WARM)
PROMOTE = order(Verb.PROMOTE, turn=1, devices=("host-1",), device_bytes=100)
PLACE_WARM = order(Verb.PLACE, level=Level.WARM, host_bytes=80)
ASLEEP = Sight(is_there=True, in_host=True)
ON_DEVICE = Sight(is_there=True, in_host=False)
HOT_SERVES = Sight(is_there=True, serves=True, in_host=False)


def stands(one: Turn) -> tuple[Level, Phase, int, float]:
    replica = one.houses[NAME].replica
    return replica.level, replica.phase, replica.turn, replica.since_s


def leases(one: Turn) -> tuple[int, int]:
    node = node_of("n", TOTALS, one.houses)
    return node.devices["host-1"].leases.get(NAME, 0), node.host.leases.get(NAME, 0)


def serving(now_s: float = 1.0) -> Turn:
    return turn(None, asked(), structs.replace(HOT_SERVES, replica=_found()), now_s)


def sleeping() -> Turn:
    demoting = turn(turn(serving(), asked(DRAIN), HOT_SERVES, 2.0), asked(DEMOTE), HOT_SERVES, 3.0)
    return turn(demoting, asked(DEMOTE), ASLEEP, 5.0)


def test_one_that_has_drained_goes_to_host_memory() -> None:
    """It counts in both memories while it moves, by its vaults' word; then in the host's only."""
    drains = turn(serving(), asked(DRAIN), HOT_SERVES, 2.0)
    moving = turn(drains, asked(DEMOTE), HOT_SERVES, 3.0)
    assert stands(moving) == (Level.HOT, Phase.DEMOTING, 0, 3.0)
    assert (moving.deeds, moving.answers, leases(moving)) == ((Move(DEMOTE, Level.WARM),), {}, (100, 80))
    half = turn(moving, asked(DEMOTE), LOADS, 4.0)
    assert (half.deeds, leases(half)) == (moving.deeds, (100, 80)), "said until it is so"
    there = turn(half, asked(DEMOTE), ASLEEP, 5.0)
    assert stands(there) == (Level.WARM, Phase.READY, 1, 5.0)
    assert (there.deeds, there.answers, leases(there)) == ((), {}, (0, 80))
    assert stands(turn(there, asked(), ASLEEP, 9.0)) == (Level.WARM, Phase.READY, 1, 5.0)


def test_requests_have_their_time_before_a_move() -> None:
    """Also with an agent that has forgotten that it drained."""
    busy = structs.replace(HOT_SERVES, running=2)
    told = turn(serving(), asked(DEMOTE), busy, 2.0)
    assert (phase(told), told.deeds) == (Phase.DEMOTING, ())
    assert turn(told, asked(DEMOTE), busy, 61.0).deeds == (Move(DEMOTE, Level.WARM),)


def test_one_in_host_memory_is_woken() -> None:
    """It has its devices' memory from the beginning, and the host's until its vaults have given that back; it is ready
    when it serves."""
    coming = turn(sleeping(), asked(PROMOTE), ASLEEP, 10.0)
    assert stands(coming) == (Level.HOT, Phase.PROVISIONING, 2, 10.0)
    assert (coming.deeds, leases(coming)) == ((Move(PROMOTE, Level.HOT),), (100, 80))
    copied = turn(coming, asked(PROMOTE), ON_DEVICE, 11.0)
    assert (copied.deeds, leases(copied)) == (coming.deeds, (100, 0)), "its engines may be asleep"
    ready = turn(copied, asked(PROMOTE), HOT_SERVES, 12.0)
    assert (stands(ready), ready.deeds) == ((Level.HOT, Phase.READY, 2, 12.0), ())


def test_a_move_that_came_to_nothing_is_answered_and_all_is_as_before() -> None:
    """Until it is asked for again, under another id."""
    moving = turn(turn(serving(), asked(DRAIN), HOT_SERVES, 2.0), asked(DEMOTE), HOT_SERVES, 3.0)
    wrong = structs.replace(ON_DEVICE, wrong=(DEMOTE.id, "no memory"))
    for now_s in (4.0, 5.0):
        moving = turn(moving, asked(DEMOTE), wrong, now_s)
        assert stands(moving) == (Level.HOT, Phase.DRAINING, 0, 4.0)
        assert (moving.deeds, moving.answers, leases(moving)) == ((), {DEMOTE.id: "no memory"}, (100, 0))
    again = order(Verb.DEMOTE, attempt=2, until_s=60.0, host_bytes=80)
    assert turn(moving, asked(again), wrong, 6.0).deeds == (Move(again, Level.WARM),)
    coming = turn(sleeping(), asked(PROMOTE), ASLEEP, 10.0)
    back = turn(coming, asked(PROMOTE), structs.replace(ASLEEP, wrong=(PROMOTE.id, "over budget")), 11.0)
    assert stands(back) == (Level.WARM, Phase.READY, 3, 11.0)
    assert (back.deeds, back.answers, leases(back)) == ((), {PROMOTE.id: "over budget"}, (0, 80))


def test_what_cannot_be_is_answered() -> None:
    """Devices that its vaults are not of; somebody who is not here; one that is not WARM yet."""
    elsewhere = order(Verb.PROMOTE, turn=1, devices=("host-2",), device_bytes=100)
    told = turn(sleeping(), asked(elsewhere), ASLEEP, 10.0)
    assert (told.deeds, told.answers) == ((), {elsewhere.id: "its memory is on host-1, and on no other device"})
    assert turn(None, asked(DEMOTE), None, 1.0).answers == {DEMOTE.id: NOT_THERE}
    loading = turn(None, asked(PLACE_WARM), None, 1.0)
    assert turn(loading, asked(PLACE_WARM, PROMOTE), LOADS, 2.0).answers == {PROMOTE.id: "it is WARM and provisioning"}


def test_what_is_overdue_moves_nobody() -> None:
    """Its replica is to be stopped."""
    late = asked(PROMOTE, overdue=frozenset({PROMOTE.id}))
    assert turn(sleeping(), late, ASLEEP, 10.0).deeds == ()
    told = turn(sleeping(), asked(PROMOTE, STOP), ASLEEP, 10.0)
    assert (told.deeds, leases(told)) == ((Remove(NAME),), (0, 80))


def test_an_agent_that_begins_believes_the_vaults() -> None:
    """WARM is who is in host memory, whatever was written; a move that stands is gone on with."""
    found = structs.replace(ASLEEP, replica=_found())
    assert stands(turn(None, asked(), found, 7.0)) == (Level.WARM, Phase.READY, 1, 7.0)
    silent = turn(None, asked(), structs.replace(LOADS, replica=_found()), 7.0)
    assert leases(silent) == (100, 0), "a vault that says nothing may have it all on the device"
    assert stands(turn(silent, asked(), ASLEEP, 8.0))[:2] == (Level.WARM, Phase.READY)
    half = structs.replace(LOADS, replica=_found())
    assert turn(None, asked(DEMOTE), half, 7.0).deeds == (Move(DEMOTE, Level.WARM),)
    assert turn(None, asked(PROMOTE), half, 7.0).deeds == (Move(PROMOTE, Level.HOT),)
    assert turn(None, asked(PROMOTE), found, 7.0).deeds == (Move(PROMOTE, Level.HOT),)


def test_one_that_somebody_else_had_moved_is_where_its_vaults_say() -> None:
    """A person may ask a vault."""
    assert stands(turn(sleeping(), asked(), ON_DEVICE, 9.0)) == (Level.HOT, Phase.PROVISIONING, 2, 9.0)
    assert stands(turn(sleeping(), asked(), LOADS, 9.0))[0] is Level.WARM, "nobody says"


def test_one_whose_host_memory_is_lost_leaves() -> None:
    """It never comes back HOT by itself: its processes end, and it is in no record any more."""
    lost = Sight(is_there=True, trouble="its weights were lost from host memory")
    ends = turn(sleeping(), asked(), lost, 9.0)
    assert (ends.deeds, leases(ends)) == ((Remove(NAME),), (0, 80))
    assert turn(ends, asked(), None, 10.0).houses == {}


def test_one_is_placed_in_host_memory_by_way_of_its_devices() -> None:
    """It counts in both until it is there, and is moved as soon as it could serve."""
    begun = turn(None, asked(PLACE_WARM), None, 1.0)
    assert (begun.deeds, leases(begun)) == ((Start(PLACE_WARM),), (100, 80))
    assert turn(begun, asked(PLACE_WARM), LOADS, 2.0).deeds == ()
    loaded = turn(begun, asked(PLACE_WARM), HOT_SERVES, 3.0)
    assert (stands(loaded)[:2], loaded.deeds) == ((Level.WARM, Phase.PROVISIONING), (Move(PLACE_WARM, Level.WARM),))
    there = turn(loaded, asked(PLACE_WARM), ASLEEP, 4.0)
    assert (stands(there), leases(there), there.deeds) == ((Level.WARM, Phase.READY, 0, 4.0), (0, 80), ())
    # Another agent goes on from there.
    adopted = turn(None, asked(PLACE_WARM), structs.replace(HOT_SERVES, replica=_found()), 5.0)
    assert (stands(adopted)[:2], adopted.deeds) == ((Level.WARM, Phase.PROVISIONING), (Move(PLACE_WARM, Level.WARM),))


def test_one_that_could_not_be_placed_in_host_memory_leaves_nothing() -> None:
    """And is answered then."""
    loaded = turn(turn(None, asked(PLACE_WARM), None, 1.0), asked(PLACE_WARM), HOT_SERVES, 2.0)
    wrong = turn(loaded, asked(PLACE_WARM), structs.replace(ON_DEVICE, wrong=(PLACE_WARM.id, "no memory")), 3.0)
    assert (wrong.deeds, wrong.answers, leases(wrong)) == ((Remove(NAME),), {}, (100, 80))
    over = turn(wrong, asked(PLACE_WARM), None, 4.0)
    assert (over.answers, leases(over)) == ({PLACE_WARM.id: "no memory"}, (0, 0))


def test_one_that_is_stopped_on_its_way_to_host_memory_counts_on_its_devices() -> None:
    """Until it is gone."""
    loading = turn(turn(None, asked(PLACE_WARM), None, 1.0), asked(PLACE_WARM), LOADS, 2.0)
    leaving = turn(loading, asked(STOP), LOADS, 3.0)
    assert (leaving.deeds, leases(leaving)) == ((Remove(NAME),), (100, 0))


# -- whatever happens

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


MOVES = st.lists(st.sampled_from([DEMOTE, PROMOTE, DRAIN, STOP]), unique_by=lambda one: one.id)


@given(st.lists(st.tuples(MOVES, st.sampled_from(["", "forgets", "lost", "moves", "silent"])), max_size=30))
def test_memory_is_counted_wherever_it_is(moments: list[tuple[list[Action], str]]) -> None:
    """Whatever is asked, agents forget, vaults say nothing or lose what they had, moves are done or not: what is on a
    device or in host memory is counted there, and who has lost its weights leaves."""
    one = serving()
    where, moving = "device", False
    for now_s, (actions, happens) in enumerate(moments, 2):
        if happens == "moves" and moving:
            where = "host" if where == "device" else "device"
        lost = happens == "lost" and where == "host"
        known = None if happens == "silent" else where == "host"
        sight = Sight(is_there=True, in_host=known, trouble="lost" if lost else "", replica=_found())
        one = step({} if happens == "forgets" else one.houses, asked(*actions), {NAME: sight}, float(now_s))
        device, host = leases(one)
        assert device == 100 or (where == "host" and device == 0)
        assert host == 80 or where == "device" or known is None
        moving = any(isinstance(deed, Move) and (deed.to is Level.WARM) is (where == "device") for deed in one.deeds)
        if Remove(NAME) in one.deeds:
            assert STOP in actions or lost or one.houses[NAME].is_leaving
            return
