"""Decision: a stream waits for a worker for a bounded time, and being tried does not start that time anew; only a new
token does. Else a worker that takes and drops it would keep its client waiting for ever."""

from __future__ import annotations

from holdfast.core.errors import Code
from holdfast.spec.waits import HoldSettings
from tests.rigs.worlds.streams import Cluster


def test_time_without_progress_is_bounded() -> None:
    """A worker has room and turns it away all the same, again and again: it is refused when its time is over."""
    cluster = Cluster(HoldSettings(hold_s=60, queue_s=6))
    worker = cluster.worker("a")
    client = cluster.ask("s1")
    began_s = cluster.now_s
    while client.failure is None and cluster.now_s - began_s < 60:
        worker.room(1)
        if client.flight.slot is not None:
            worker.turn_away("s1")
        cluster.wait(0.1)
    assert client.failure is not None
    assert client.failure[0] is Code.WORKER_OVERLOADED
    assert cluster.now_s - began_s <= 6.2
    assert len(worker.requests) > 50


def test_a_token_starts_the_time_anew() -> None:
    """A stream that makes progress between two losses has the whole hold again."""
    cluster = Cluster(HoldSettings(hold_s=6))
    worker = cluster.worker("a")
    client = cluster.ask("s1")
    worker.say("s1", [10])
    worker.die()
    cluster.wait(5)
    worker.connect()
    cluster.wait(0.1)
    worker.say("s1", [11])
    worker.die()
    cluster.wait(5)
    assert client.failure is None
    cluster.wait(1.1)
    assert client.failure is not None
