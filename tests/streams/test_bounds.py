"""While capacity is short new requests may not have every place: what a worker that turned them away is to whom."""

from __future__ import annotations

from holdfast.core.tiers import Tier
from holdfast.health.standing import HealthStatus
from holdfast.routing.degradation import RULES
from holdfast.wire.messages import Generate
from tests.rigs.worlds.streams import Cluster, Worker


def bounds(worker: Worker) -> list[int]:
    """Told to a worker with each request."""
    return [message.places for message in worker.sent if isinstance(message, Generate)]


def test_a_probation_is_no_bound_of_other_frontends() -> None:
    """It bounds what this frontend has there; the worker counts everybody's. Told as a bound it would keep this one
    in line until the worker was all but empty, long after its probation."""
    cluster = Cluster()
    worker = cluster.worker("a", places=8)
    cluster.directory.degrade("d", RULES[1])
    worker.route(routable=True, admit_max=2)
    for name in "abc":
        cluster.ask(name)
    assert bounds(worker) == [6, 6]
    worker.route(routable=True)
    assert bounds(worker) == [6, 6, 6]


def test_who_was_turned_away_by_a_bound_that_is_no_more_asks_again() -> None:
    """The level returned while it was on its way: it does not wait for what others would leave free no longer."""
    cluster = Cluster()
    worker = cluster.worker("a", places=8)
    cluster.directory.degrade("d", RULES[3])
    cluster.ask("s")
    cluster.directory.degrade("d", RULES[0])
    worker.turn_away("s")
    assert bounds(worker) == [4, 0]
    worker.turn_away("s")
    cluster.ask("premium", tier=Tier.PREMIUM)
    assert bounds(worker) == [4, 0], "it is full for all"
    worker.room(1)
    assert bounds(worker) == [4, 0, 0]


def test_who_was_in_line_already_asks_again_too() -> None:
    """It was full for all, had room, and refused what came by a bound that is no more: it tells of no other place."""
    cluster = Cluster()
    worker = cluster.worker("a", places=8)
    cluster.ask("s")
    worker.turn_away("s")
    cluster.directory.degrade("d", RULES[3])
    worker.room(1)
    assert bounds(worker) == [0, 4]
    cluster.directory.degrade("d", RULES[0])
    worker.turn_away("s")
    assert bounds(worker) == [0, 4, 0]


def test_a_worker_that_is_full_is_so_for_all_also_when_the_level_has_changed() -> None:
    """It turned one away that might have had every place."""
    cluster = Cluster()
    worker = cluster.worker("a", places=8)
    cluster.ask("s")
    cluster.directory.degrade("d", RULES[1])
    worker.turn_away("s")
    cluster.ask("premium", tier=Tier.PREMIUM)
    assert bounds(worker) == [0]


def test_who_waits_and_may_have_every_place_asks_again_when_another_was_turned_away_by_its_bound() -> None:
    """The worker tells of room for what it refused last: not of a place that only the first may have."""
    cluster = Cluster()
    worker = cluster.worker("a", places=8)
    cluster.directory.degrade("d", RULES[3])
    cluster.ask("standard")
    cluster.ask("premium", tier=Tier.PREMIUM)
    worker.turn_away("premium")
    assert bounds(worker) == [4, 0], "it is full for all"
    worker.turn_away("standard")
    assert bounds(worker) == [4, 0, 0]
    assert worker.requests[-1].request_id == "premium"
    worker.turn_away("premium")
    cluster.wait(1.0)
    assert bounds(worker) == [4, 0, 0], "and once: now it tells of any place"


def test_who_is_to_be_tried_alone_has_the_worker_that_another_was_turned_away_from() -> None:
    """Whoever was turned away by its bound went elsewhere; that worker is full for those only who have one."""
    cluster = Cluster()
    cluster.directory.degrade("d", RULES[3])
    first = cluster.worker("first")
    cluster.ask("suspect")
    second = cluster.worker("second")
    first.die()
    worker = cluster.worker("worker")
    cluster.ask("standard")
    second.die()
    cluster.wait(2.0)
    other = cluster.worker("other")
    assert [request.request_id for request in worker.requests] == ["standard"], "nobody is tried beside another"
    worker.turn_away("standard")
    assert [request.request_id for request in other.requests] == ["standard"]
    assert [request.request_id for request in worker.requests] == ["standard", "suspect"]


def test_a_drain_goes_on_while_some_wait_who_may_not_have_every_place() -> None:
    """They wait for none of those that are left; but a premium request does."""
    cluster = Cluster()
    slow, other = cluster.worker("a", places=4), cluster.worker("b", places=4)
    cluster.directory.degrade("d", RULES[3])
    for name in "stuvw":
        cluster.ask(name)
    moving = [name for name in "stuv" if name in slow.numbers]
    assert len(moving) == 2, "two each, and one waits"
    for name in moving:
        slow.say(name, [1])
    slow.judged(HealthStatus.DRAINING)
    cluster.wait(0.2)
    assert not slow.link.streams
    assert set(moving) < other.numbers.keys()
    assert "w" not in other.numbers


def test_a_stream_that_was_handed_over_in_vain_goes_on_where_it_was() -> None:
    """Other frontends had the place: it is not lost by a plan; and it leaves when there is one, but not before it has
    made a token again."""
    cluster = Cluster()
    a, b = cluster.worker("a", places=4), cluster.worker("b", places=4)
    client = cluster.ask("s")
    slow, other = (a, b) if "s" in a.numbers else (b, a)
    slow.say("s", [1, 2])
    slow.judged(HealthStatus.DRAINING)
    cluster.wait(0.1)
    other.turn_away("s")
    assert len(slow.link.streams) == 1
    other.room(1)
    cluster.wait(31.0)
    assert len(slow.link.streams) == 1
    slow.say("s", [3])
    cluster.wait(0.1)
    assert not slow.link.streams
    other.say("s", [4], finish="length")
    assert client.flight.ledger.made == [1, 2, 3, 4]
    assert cluster.dispatcher.stats.lost == {}


def test_one_that_fell_meanwhile_gets_nothing_back() -> None:
    """Nor one that left."""
    for gone in (True, False):
        cluster = Cluster()
        a, b = cluster.worker("a", places=4), cluster.worker("b", places=4)
        cluster.ask("s")
        slow, other = (a, b) if "s" in a.numbers else (b, a)
        slow.say("s", [1, 2])
        slow.judged(HealthStatus.DRAINING)
        cluster.wait(0.1)
        if gone:
            slow.die()
        else:
            slow.judged(HealthStatus.UNHEALTHY, fall=1)
        other.turn_away("s")
        assert not slow.link.streams
        assert len(cluster.set().holds) == 1
        other.room(1)
        assert len(other.link.streams) == 1
