"""Decision: when every worker is full a new request is refused at once, with a time to come back, and a stream under
way is held instead: it has been promised its end."""

from __future__ import annotations

from migration_rig import Cluster

from holdfast.core.errors import Code


def test_overload_holds_resumed_refuses_new() -> None:
    """One of two full workers dies: its stream waits for the other's place, before and after new requests ask."""
    cluster = Cluster()
    first, second = cluster.worker("first", places=1), cluster.worker("second", places=1)
    moved, staying = cluster.ask("moved"), cluster.ask("staying")
    first.say("moved", [10])
    first.die()
    assert moved.flight in cluster.set().holds
    for number in range(3):
        refused = cluster.ask(f"new{number}")
        assert refused.failure is not None
        assert refused.failure[0] is Code.WORKER_OVERLOADED
        assert refused.failure[2] == 1.0
    second.say("staying", [20], finish="length")
    assert [request.request_id for request in second.requests] == ["staying", "moved"]
    assert moved.failure is None
    assert staying.finish == "length"
