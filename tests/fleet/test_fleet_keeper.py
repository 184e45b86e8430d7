"""The controller by itself: what it writes before what, whom it believes, and whom it leaves alone."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from bench.fleet.agent import Machine
from holdfast.fleet.actions import Tries, Verb
from holdfast.fleet.controller import WAITED_FOR, Controller
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.hearing import GRACE_S
from holdfast.fleet.records import Book, Orders
from holdfast.fleet.room import HOST
from holdfast.fleet.scaling import Scaling
from holdfast.health.records import Demand
from keeper_rig import BOOK, NODES, ORDERS, Keeper, Overtaken, Place, wish


def model(key: str = "m", wanted: int = 1, **said: object) -> Model:
    sizes = {"device_bytes": 40, "host_bytes": 40, "replicas_max": 4, "version": "v1", "drain_s": 5.0}
    return Model(key=key, wanted=wanted, **{**sizes, **said})


def place(nodes: int = 1, **said: object) -> Place:
    made = Place()
    for number in range(nodes):
        made.add(Machine(f"n{number}", {"gpu0": 80, HOST: 100}, **said))
    return made


def book(made: Place) -> Book:
    return made.shelf.read(BOOK, Book) or Book()


def orders(made: Place, node: str = "n0") -> tuple[str, ...]:
    found = made.shelf.read(ORDERS + node, Orders) or Orders()
    return tuple(action.verb for action in found.actions)


def told(keeper: Keeper) -> list[str]:
    return [one.what for one in keeper.controller.take_told()]


# -- what is written, and in which order


def test_nothing_is_written_where_nothing_is_wished_for() -> None:
    """With no wish, nodes or none: the store stays as it is."""
    for nodes in (0, 2):
        made = place(nodes)
        before = dict(made.shelf.values)
        keeper = made.keeper()
        assert not keeper.controller.step(made.now_s)
        assert made.shelf.values == before
        assert keeper.controller.is_idle is (nodes == 0)


def test_book_and_orders_are_claimed_before_the_first_decision() -> None:
    """The first that it writes asks for nothing new; then comes the book, and then the orders."""
    made = place(2)
    made.want(model())
    keeper = made.keeper()
    claim = keeper.controller.step(made.now_s)
    assert claim.book == Book(by="k1")
    assert claim.orders == {"n0": Orders(by="k1"), "n1": Orders(by="k1")}
    keeper.controller.written(made.now_s)
    first = keeper.controller.step(made.now_s)
    assert first.book is not None
    assert first.book.serials == {"m": 1}
    assert [action.id for one in first.orders.values() for action in one.actions] == ["place/ModelActor:m:r1/0.1"]


def test_an_answer_before_the_last_write_is_known_counts() -> None:
    """An agent is done before the controller knows that its order stands: nothing flies for ever."""
    made = place()
    made.want(model())
    keeper = made.keeper()
    while Verb.PLACE not in orders(made):
        keeper.advance(made.now_s)
    assert keeper.left == []
    agent = made.agents["n0"]
    made.work(agent)
    made.now_s += 10.0
    made.work(agent)  # it serves
    made.settle()
    assert made.hot("m") == 1
    assert orders(made) == ()
    assert told(keeper) == ["place"]


def test_who_leaves_is_idle_before_it_is_told() -> None:
    """Frontends know it by its process's name; one that is HOT again is not idle any more."""
    made = place()
    made.want(model())
    made.keeper()
    made.run(30)
    assert made.hot("m") == 1
    made.want(model(wanted=0))
    seen = []
    while Verb.DRAIN not in orders(made):
        seen = [*seen, book(made).idle]
        made.keepers[0].advance(made.now_s)
    assert seen[-1] == ("d-m-v1-1",)
    made.run(10)
    assert book(made).idle == ()  # WARM
    made.want(model(wanted=1))
    made.run(10)
    assert (made.hot("m"), book(made).idle) == (1, ())


# -- whom it believes


def test_a_failure_counts_once_and_is_told() -> None:
    """An agent that cannot start somebody says so: tried again after a while, under another name."""
    made = place()
    made.want(model())
    keeper = made.keeper()
    while keeper.advance(made.now_s):
        pass
    made.work(made.agents["n0"], fails=lambda: True)
    keeper.advance(made.now_s)
    assert keeper.left is not None
    made.settle()
    assert book(made).tries["place/m"].failed == 1
    assert orders(made) == ()
    assert told(keeper) == ["place", "failed"]
    made.run(20)
    assert made.hot("m") == 1
    assert book(made).serials == {"m": 2}
    assert book(made).tries == {}


def test_one_that_was_seen_and_never_came_up_failed_once() -> None:
    """Its node says why, and has it no more: the reason is told, and nothing of a crash."""
    made = place()
    made.want(model())
    keeper = made.keeper()
    while keeper.advance(made.now_s):
        pass
    agent = made.agents["n0"]
    made.work(agent)
    made.settle()
    agent.machine.crash("ModelActor:m:r1")
    agent.answers["place/ModelActor:m:r1/0.1"] = "it crashed 3 times"
    made.tell(agent)
    keeper.advance(made.now_s)
    said = keeper.controller.take_told()
    assert [one.what for one in said] == ["place", "failed"]
    assert said[-1].text.endswith("it failed: it crashed 3 times")
    made.settle()
    assert book(made).tries["place/m"].failed == 1


def test_one_that_ends_unasked_has_crashed() -> None:
    """It is told once, and somebody comes in its place."""
    made = place()
    made.want(model())
    keeper = made.keeper()
    made.run(15)
    made.agents["n0"].machine.crash("ModelActor:m:r1")
    made.run(15)
    assert told(keeper) == ["place", "crashed", "place"]
    assert made.hot("m") == 1


def test_a_node_is_lost_after_its_grace_and_not_before() -> None:
    """Its record is gone: for so long nothing follows; then its replica is started elsewhere; it may come back."""
    made = place(2)
    made.want(model())
    keeper = made.keeper()
    made.run(30)
    (where,) = [name for name, agent in made.agents.items() if agent.machine.bodies]
    made.agents[where].machine.near = False
    told(keeper)
    made.settle()
    made.now_s += GRACE_S - 0.1
    made.settle()
    assert told(keeper) == []
    made.now_s += 0.1
    made.settle()
    assert told(keeper) == ["lost", "place"]
    made.run(20)
    made.agents[where].machine.near = True
    made.run(60)
    assert "back" in told(keeper)
    assert made.hot("m") == 1


def test_a_node_whose_agent_is_stopped_is_lost_and_not_by_one_who_was_stopped_itself() -> None:
    """Its record stands, and is not told again: three times that long. A controller that comes late listens anew."""
    told_again = structs.replace(place(1).agents["n0"].record(), again_s=5.0)
    controller = Controller("d", "c")
    controller.begin(Book(), {}, {}, {"n0": told_again}, 100.0)
    assert controller.next_deadline_s() == 115.0

    def lost(now_s: float) -> list[str]:
        if controller.step(now_s):  # the book says which nodes are lost
            controller.written(now_s)
        return [one.what for one in controller.take_told()]

    assert lost(114.0) == []
    controller.node("n0", told_again, 114.0)
    assert lost(128.9) == []
    assert lost(129.0) == ["lost"]
    controller.node("n0", told_again, 130.0)
    assert lost(130.0) == ["back"]
    assert lost(200.0) == [], "nobody knows who was stopped"
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
    keeper.hear(made.now_s)
    made.now_s += GRACE_S - 1.0
    assert not keeper.controller.step(made.now_s)
    made.now_s += 20.0
    keeper.controller.away(made.now_s)
    assert not keeper.controller.step(made.now_s)
    made.now_s += GRACE_S - 1.0
    assert not keeper.controller.step(made.now_s)
    made.shelf.values.update(kept)
    keeper.hear(made.now_s)
    assert not keeper.controller.step(made.now_s)
    assert told(keeper) == ["place"]


def test_who_begins_waits_for_nodes_that_were_asked() -> None:
    """A controller that starts together with its store finds orders and no records: it starts nobody twice."""
    made = place(2)
    made.want(model())
    made.keeper()
    made.run(30)
    for name in made.agents:
        made.shelf.values.pop(NODES + name)
    made.keepers.clear()
    keeper = made.keeper()
    assert not keeper.advance(made.now_s)
    assert keeper.controller.next_deadline_s() == made.now_s + GRACE_S
    made.now_s += 2.0
    made.run(10)
    assert (made.hot("m"), book(made).serials) == (1, {"m": 1})


def test_what_came_up_while_nobody_led_is_not_overdue() -> None:
    """The next controller finds the order and its effect: it is done."""
    made = place()
    made.want(model(load_s=20.0))
    keeper = made.keeper()
    while keeper.advance(made.now_s):
        pass
    made.keepers.clear()
    for _ in range(60):
        made.work(made.agents["n0"])
        made.now_s += 1.0
    made.keeper()
    made.run(5)
    assert (made.hot("m"), orders(made), book(made).serials) == (1, (), {"m": 1})


def test_what_is_overdue_counts_once_whoever_leads() -> None:
    """It stands in the orders that its time is over: the next controller does not count it again."""
    made = place()
    made.want(model(load_s=20.0))
    keeper = made.keeper()
    while keeper.advance(made.now_s):
        pass
    made.now_s += 20.0
    for _ in range(3):
        while made.keepers[-1].advance(made.now_s):
            pass
        assert book(made).tries["place/m"].failed == 1
        assert orders(made) == (Verb.STOP, Verb.PLACE)
        made.keeper()
    made.keepers[:-1] = []
    made.run(30)
    assert (made.hot("m"), orders(made), book(made).serials) == (1, (), {"m": 2})


# -- whom it leaves alone


def test_a_store_that_forgot_everything_stops_nobody() -> None:
    """Replicas without a wish or a word of them in the book: another's, or of a store that was lost; they stay."""
    made = place()
    made.want(model())
    made.keeper()
    made.run(30)
    made.keepers.clear()
    made.shelf.values = {key: value for key, value in made.shelf.values.items() if key.startswith(NODES)}
    made.shelf.serials = {}
    made.keeper()
    made.run(30)
    assert (made.hot("m"), orders(made)) == (1, ())
    made.want(model(wanted=2))
    made.run(30)
    assert (made.hot("m"), book(made).serials) == (2, {"m": 2})
    made.unwant("m")
    made.run(60)
    assert made.hot("m") == 0


def test_a_wish_that_cannot_be_read_leaves_its_replicas_alone() -> None:
    """Whoever begins and finds it takes nobody for unwanted; once it is gone, they leave."""
    made = place()
    made.want(model())
    made.keeper()
    made.run(30)
    made.keepers.clear()
    made.unwant("m")
    keeper = made.keeper()
    keeper.controller.wish_unread("m")
    made.run(30)
    assert made.hot("m") == 1
    keeper.controller.wish("m", None)
    made.run(30)
    assert made.hot("m") == 0


# -- two of them


def test_of_two_the_one_that_wrote_last_is_obeyed() -> None:
    """The earlier one stands between its book and its orders when the later one claims both: what it decided is
    refused, and nobody is started twice."""
    made = place()
    made.want(model())
    first = made.keeper()
    while not book(made).serials:
        first.advance(made.now_s)
    made.keepers.clear()
    made.keeper()
    made.run(20)
    with pytest.raises(Overtaken):
        first.advance(made.now_s)
    assert (made.hot("m"), book(made).serials) == (1, {"m": 2})


def test_what_an_earlier_one_decided_is_refused_on_every_node() -> None:
    """Also where the later one asks for nothing: it would have placed elsewhere, and both would have come."""
    made = place(2)
    made.want(model())
    first = made.keeper()
    while not book(made).serials:
        first.advance(made.now_s)
    assert [key for key, _ in first.left or ()] == [f"{ORDERS}n0"]
    made.agents["n1"].machine.on_disk.add("m")
    made.tell(made.agents["n1"])
    made.keepers.clear()
    made.keeper()
    made.run(20)
    with pytest.raises(Overtaken):
        first.advance(made.now_s)
    assert (orders(made), list(made.agents["n1"].machine.bodies)) == ((), ["ModelActor:m:r2"])


# -- how many


def test_the_number_follows_from_who_waits_and_is_written_into_the_wish() -> None:
    """From none at once when a request is held; back to none when nothing is asked for; a person's word counts."""
    made = place()
    made.want(model(wanted=0), Scaling(idle_s=60.0))
    keeper = made.keeper()
    made.run(5)
    assert book(made) == Book()
    made.ask_for("m", 2)
    made.settle()
    assert (made.wished("m").wanted, made.wished("m").generation) == (1, 2)
    made.run(15)
    assert made.hot("m") == 1
    made.ask_for("m", 0)
    made.run(100)
    assert (made.wished("m").wanted, made.hot("m")) == (0, 0)
    made.want(model(wanted=2), Scaling(idle_s=60.0))
    made.run(20)
    assert (made.wished("m").wanted, made.hot("m")) == (2, 2)
    assert told(keeper).count("scaled") == 2


def test_a_number_at_its_bounds_is_looked_at_when_something_changes() -> None:
    """Nobody asks for it, and a floor keeps one: nothing is due any more, however long that lasts."""
    made = place()
    made.want(model(wanted=1, replicas_min=1, floor=Level.HOT), Scaling(idle_s=60.0))
    keeper = made.keeper()
    made.run(120)
    assert made.hot("m") == 1
    assert keeper.controller.next_deadline_s() is None


def test_failures_by_a_clock_that_was_ahead_are_not_waited_for() -> None:
    """They are taken to be of this moment."""
    made = place()
    made.want(model())
    ahead = Book(tries={"place/m": Tries(1, made.now_s + 10_000.0)})
    made.shelf.values[BOOK] = msgspec.json.encode(ahead)
    made.keeper()
    made.run(20)
    assert made.hot("m") == 1


def test_who_said_zero_is_told_that_somebody_waits() -> None:
    """Nothing is started against a person's word, and `unmet` says why."""
    made = place()
    made.want(model(wanted=0))
    made.keeper()
    made.ask_for("m", 1)
    made.run(10)
    assert (made.hot("m"), book(made).unmet, book(made).hopeless) == (0, {"m": WAITED_FOR}, ("m",))
    made.ask_for("m", 0)
    made.run(1)
    assert book(made).unmet == {}


def test_who_will_not_come_is_known_and_why() -> None:
    """Larger than any node: at once, also with that node lost. Failed three times: until it is tried again. No room,
    with others in it, or no node: it may yet come."""
    made = place()
    made.want(model("large", device_bytes=81))
    made.want(model("pinned", nodes=frozenset({"n7"})))
    made.want(model("full", device_bytes=80, dedicated=True))
    made.want(model("later", device_bytes=80))
    keeper = made.keeper()
    made.run(30)
    found = book(made)
    assert found.hopeless == ("large",)
    assert "no node has that" in found.unmet["large"]
    assert found.unmet["pinned"] == "none of the nodes that it may be on is there: n7"
    assert found.unmet["later"] == "there is no room for it"
    assert keeper.controller.unmet == found.unmet


def test_who_failed_three_times_is_not_waited_for_until_it_is_tried_again() -> None:
    """Why it last failed is told, also by the controller that comes after."""
    made = place()
    made.want(model())
    keeper, seen = made.keeper(), list[tuple[int, tuple[str, ...]]]()
    while len(seen) < 4:
        while keeper.advance(made.now_s):
            pass
        made.work(made.agents["n0"], fails=lambda: True)
        while keeper.advance(made.now_s):
            pass
        found = book(made)
        failed = found.tries["place/m"].failed
        if not seen or seen[-1][0] != failed:
            seen.append((failed, found.hopeless))
        made.now_s += 1.0
    assert seen == [(1, ()), (2, ()), (3, ("m",)), (4, ("m",))]
    assert found.unmet["m"].startswith("it failed to start 4 times: ")
    made.keepers.clear()
    made.keeper()
    made.settle()
    assert book(made).unmet == found.unmet
    made.run(60)
    assert made.hot("m") == 1
    assert (book(made).unmet, book(made).hopeless, book(made).whys) == ({}, (), {})


def test_waits_of_all_frontends_count() -> None:
    """Their sum, and the first of them; one that is gone says nothing more."""
    controller = Controller("d", "k")
    controller.wish("m", wish(model(wanted=0), Scaling()))
    controller.report("f1", {"served-m": Demand(2, 50.0)})
    controller.report("f2", {"served-m": Demand(1, 40.0), "other": Demand(9, 1.0)})
    assert controller._view.demand == {"m": Demand(3, 40.0)}
    controller.report("f2", None)
    assert controller._view.demand == {"m": Demand(2, 50.0)}
    controller.report("f1", {})
    assert controller._view.demand == {}


def test_records_survive_the_way_through_the_store() -> None:
    """What a controller writes, the next one reads as it was."""
    made = place(2)
    made.want(model(wanted=2))
    made.keeper()
    for _ in range(12):
        made.keepers[0].advance(made.now_s)
    for kind, key in ((Book, BOOK), (Orders, f"{ORDERS}n0")):
        value = made.shelf.values[key]
        assert msgspec.json.encode(msgspec.json.decode(value, type=kind)) == value
