"""Decision: when every worker is full a new request waits a little for a place and is then refused, with a time to come
back; a stream under way is held: it has been promised its end. Being full is no failure: nobody is set aside, and no
migration is counted."""

from __future__ import annotations

from holdfast.core.errors import Code
from holdfast.routing.table import PriorityClass
from holdfast.spec.waits import HoldSettings
from tests.rigs.worlds.streams import Cluster


def test_overload_holds_resumed_refuses_new() -> None:
    """One of two full workers dies: its stream waits for the other's place, new requests are told to come back."""
    cluster = Cluster(HoldSettings(hold_s=30.0, queue_s=2.0))
    first, second = cluster.worker("first", places=1), cluster.worker("second", places=1)
    moved, staying = cluster.ask("moved"), cluster.ask("staying")
    first.say("moved", [10])
    first.die()
    assert moved.flight in cluster.set().holds
    new = [cluster.ask(f"new{number}") for number in range(3)]
    cluster.wait(1.9)
    assert [client.failure for client in new] == [None] * 3
    cluster.wait(0.2)
    for refused in new:
        assert refused.failure is not None
        assert refused.failure[0] is Code.WORKER_OVERLOADED
        assert refused.failure[2] is not None
        assert refused.failure[2] >= 1.0
    second.say("staying", [20], finish="length")
    assert [request.request_id for request in second.requests] == ["staying", "moved"]
    assert moved.failure is None
    assert staying.finish == "length"
    assert cluster.dispatcher.stats.refused == {"WorkerOverloaded": 3}
    assert cluster.dispatcher.stats.resumed == {"Disconnected": 1}
    assert cluster.dispatcher.stats.lost == {}


def test_a_request_turned_away_goes_on_as_if_it_had_never_been_there() -> None:
    """Others have the worker's places: the request waits its turn, runs when there is room, and nothing was resumed."""
    cluster = Cluster()
    worker = cluster.worker("a")
    one, two = cluster.ask("one"), cluster.ask("two")
    worker.turn_away("one")
    worker.turn_away("two")
    assert not cluster.set().table.has_place(PriorityClass.FRESH)
    worker.room(1)
    assert [request.request_id for request in worker.requests] == ["one", "two", "one"]
    worker.say("one", [7], finish="length")
    assert [request.request_id for request in worker.requests][3:] == [], "it said one, and has said nothing since"
    worker.room(3)
    assert [request.request_id for request in worker.requests][3:] == ["two"]
    worker.say("two", [8], finish="length")
    assert (one.pauses, two.pauses) == ([], [])
    assert (one.ledger.resumed, two.ledger.resumed) == (0, 0)
    assert cluster.dispatcher.stats.resumed == {}
    assert cluster.set().table.slots[1].aside_until_s == 0.0
    assert worker.passes == [2]


def test_who_passes_says_how_much_it_has_heard() -> None:
    """The worker's offer, our pass and its refusal of what was sent before cross: by that number it knows that we wait,
    and what waits is sent when it tells of room."""
    cluster = Cluster()
    worker = cluster.worker("a")
    cluster.ask("one")
    cluster.ask("two")
    worker.room(1)  # one of the two had it: the other was turned away, which we have yet to hear
    assert worker.passes == [0], "nobody waits"
    worker.turn_away("two")
    worker.room(2)
    assert [request.request_id for request in worker.requests] == ["one", "two", "two"]
    assert worker.passes == [0, 1]


def test_a_choice_of_an_answer_under_way_is_not_told_to_come_back() -> None:
    """One choice of an answer is being written, its sibling finds no place: it waits as a held stream does."""
    cluster = Cluster(HoldSettings(hold_s=10.0, queue_s=1.0))
    worker = cluster.worker("a", places=1)
    cluster.ask("first")
    sibling = cluster.ask("sibling")
    sibling.shown = [1]  # of its client's other choice
    cluster.wait(5)
    assert sibling.failure is None
    worker.say("first", [5], finish="length")
    assert worker.requests[-1].request_id == "sibling"


def test_a_request_that_waited_for_a_place_is_held_when_the_workers_are_gone() -> None:
    """It came when all were full; then they died: somebody is coming, so it waits as long as a hold does."""
    cluster = Cluster(HoldSettings(hold_s=10.0, queue_s=1.0))
    worker = cluster.worker("a", places=1)
    first, second = cluster.ask("first"), cluster.ask("second")
    worker.say("first", [5])
    worker.die()
    cluster.wait(5)
    worker.connect()
    cluster.wait(0.1)
    worker.say("first", [6], finish="length")
    worker.say("second", [7], finish="length")
    assert (first.shown, second.shown) == ([5, 6], [7])
