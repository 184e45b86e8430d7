"""The controller where something cannot be, or cannot be read: what it tells, and for how long it waits."""

from __future__ import annotations

from bench.fleet.agent import Machine
from holdfast.fleet.controller import Controller
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.hearing import FORGET_S, GRACE_S, UNREAD_S, Hearing
from holdfast.fleet.records import Book, NodeRecord, Orders, Wish
from holdfast.fleet.room import HOST
from keeper_rig import BOOK, NODES, ORDERS, WISHES, Place


def model(key: str = "m", **said: object) -> Model:
    sizes = {"device_bytes": 40, "host_bytes": 40, "replicas_max": 4, "wanted": 1, "version": "v1"}
    return Model(key=key, **{**sizes, **said})


def place(nodes: int = 1) -> Place:
    made = Place()
    for number in range(nodes):
        made.add(Machine(f"n{number}", {"gpu0": 80, HOST: 100}))
    return made


def book(made: Place) -> Book:
    return made.shelf.read(BOOK, Book) or Book()


def test_a_floor_of_warm_that_cannot_be_is_told() -> None:
    """More than any host has, or one that fails again and again: with the reason. Who waits for a first HOT one is not
    told that none comes."""
    made = Place()
    made.add(Machine("n0", {"gpu0": 80, HOST: 30}))
    made.want(model(wanted=0, floor=Level.WARM, replicas_min=1))
    made.want(model("small", wanted=0, floor=Level.WARM, replicas_min=1, host_bytes=20))
    keeper, seen = made.keeper(), list[str]()
    for _ in range(20):
        while keeper.advance(made.now_s):
            pass
        seen.append(book(made).unmet.get("small", ""))
        made.work(made.agents["n0"], fails=lambda: True)
        made.now_s += 1.0
    assert "it failed to start 3 times: failed" in seen
    assert book(made).unmet["m"].startswith("each WARM replica needs ")
    assert "m" not in book(made).hopeless


def test_a_node_that_cannot_be_read_is_waited_for_and_stays_as_it_was() -> None:
    """By whoever begins, for longer than one that is not there; else nothing changes, however often it tells that."""
    made = place(2)
    made.want(model())
    made.keeper()
    made.run(30)
    (there,) = [name for name, agent in made.agents.items() if agent.machine.bodies]
    values, begun_s, controller = made.shelf, made.now_s, Controller("d", "k9")
    nodes = {name: one for name, one in values.under(NODES, NodeRecord).items() if name != there}
    controller.begin(book(made), values.under(ORDERS, Orders), values.under(WISHES, Wish), nodes, begun_s, [there])
    for late_s in (0.0, GRACE_S + 1, UNREAD_S - 1):
        assert not controller.step(begun_s + late_s)
        controller.node_unread(there, begun_s + late_s)
    controller.node(there, values.read(NODES + there, NodeRecord), begun_s + UNREAD_S - 1)
    assert not controller.step(begun_s + UNREAD_S - 1), "all is as it should be"
    controller.node_unread(there, begun_s + UNREAD_S)
    assert not controller.step(begun_s + 10 * UNREAD_S)
    assert controller.take_told() == []


def test_a_node_that_cannot_be_read_is_not_waited_for_for_ever() -> None:
    """What it has comes elsewhere then, and it is told."""
    made = place()
    made.want(model())
    controller = Controller("d", "k9")
    wishes, nodes = made.shelf.under(WISHES, Wish), made.shelf.under(NODES, NodeRecord)
    controller.begin(Book(), {}, wishes, nodes, 1000.0, ["n7"])
    assert not controller.step(1000.0 + UNREAD_S - 1)
    assert controller.next_deadline_s() == 1000.0 + UNREAD_S
    assert controller.step(1000.0 + UNREAD_S)
    assert [one.what for one in controller.take_told()] == ["lost"]


def orders(made: Place, node: str) -> Orders | None:
    return made.shelf.read(ORDERS + node, Orders)


def test_a_node_that_does_not_come_back_is_forgotten() -> None:
    """With what was asked of it, though that was never done; then nobody who begins waits for it."""
    made = place(2)
    made.want(model(wanted=2, per_node_max=1))
    keeper = made.keeper()
    while not (stands := orders(made, "n1")) or not stands.actions:
        keeper.advance(made.now_s)
    made.agents["n1"].machine.near = False
    made.run(FORGET_S - 5)
    assert orders(made, "n1")
    made.run(10)
    assert orders(made, "n1") is None
    assert made.hot("m") == 1
    assert [one.what for one in keeper.controller.take_told()][-2:] == ["lost", "forgotten"]
    made.keepers.clear()
    assert not made.keeper().controller._hearing.waits


def test_who_comes_back_though_forgotten_has_its_replicas() -> None:
    """They are counted as any others: who is one too many leaves, nobody is started under a name that was used, and
    what it was asked for and never heard of is not done."""
    made = place(2)
    made.want(model(wanted=2, per_node_max=1))
    made.keeper()
    made.run(20)
    made.agents["n1"].machine.near = False
    made.want(model(wanted=3))
    made.run(FORGET_S + 30)
    assert orders(made, "n1") is None
    made.agents["n1"].machine.near = True
    made.run(1)
    assert made.hot("m") == 3, "two on the other one, and its own"
    made.want(model(wanted=2))
    made.run(60)
    assert made.hot("m") == 2
    assert book(made).serials == {"m": 3}


def test_a_node_whose_record_stands_is_not_forgotten() -> None:
    """Its agent is stopped, or writes what cannot be read: it is there, and what was asked of it is."""
    hearing = Hearing()
    hearing.begin(["a", "b", "c"], ["a"], ["b"], 0.0)
    hearing.hear("a", 5.0, 0.0)
    hearing.hear_unread("c", 10.0)
    assert dict(hearing.lost(100.0)) == {"a": "its agent told nothing for 15 s; is it stopped?"}
    assert hearing.forgotten(FORGET_S * 2) == []
    hearing.miss("b", 100.0)
    assert hearing.forgotten(100.0 + FORGET_S) == ["b"]
    assert hearing.forgotten(100.0 + FORGET_S) == []
