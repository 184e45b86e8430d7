"""Decision: every attempt has a number, and whatever an older one says is dropped. So a worker that wakes up after its
streams have moved can repeat nothing, however right its tokens are."""

from __future__ import annotations

from tests.rigs.worlds.streams import Cluster


def test_old_attempt_is_dropped() -> None:
    """A stopped worker is continued and says the very tokens the stream has by now, then its end: nothing happens."""
    cluster = Cluster()
    stopped, other = cluster.worker("stopped"), cluster.worker("other")
    client = cluster.ask("s1")
    stopped.say("s1", [10])
    stopped.judged_lost()
    other.say("s1", [11, 12])
    stopped.say("s1", [11])
    stopped.say("s1", [12, 13], finish="length")
    assert client.shown == [10, 11, 12]
    assert not client.ledger.ended
    other.say("s1", [13], finish="length")
    assert client.shown == [10, 11, 12, 13]
    assert client.ends == 1


def test_an_attempt_number_is_never_used_again() -> None:
    """On the same worker too: the stream comes back to it under a new number, and the old number stays void."""
    cluster = Cluster()
    worker = cluster.worker("only")
    client = cluster.ask("s1")
    first = worker.numbers["s1"]
    worker.say("s1", [10], fail="EngineShutdown")
    cluster.wait(1)
    second = worker.numbers["s1"]
    assert second != first
    worker.numbers["s1"] = first
    worker.say("s1", [66])
    worker.numbers["s1"] = second
    worker.say("s1", [11], finish="length")
    assert client.shown == [10, 11]
