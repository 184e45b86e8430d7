"""Decision: a stream that has shown tokens goes before a request that has not begun. Its client is watching."""

from __future__ import annotations

from tests.rigs.worlds.streams import Cluster


def test_resumed_before_new() -> None:
    """A worker with two places comes back to two resumed streams and two requests that have been in line for longer."""
    cluster = Cluster()
    first = cluster.worker("first")
    streams = [cluster.ask(name) for name in ("s1", "s2")]
    first.route(routable=False)
    waiting = [cluster.ask(name) for name in ("new1", "new2")]
    first.say("s1", [10])
    first.die()
    second = cluster.worker("second", places=2)
    assert [request.request_id for request in second.requests] == ["s1", "s2"]
    assert all(client.flight in client.flight.workers.holds for client in waiting)
    second.say("s1", [11], finish="length")
    second.say("s2", [20], finish="length")
    assert [request.request_id for request in second.requests] == ["s1", "s2", "new1", "new2"]
    assert all(client.finish == "length" for client in streams)
