"""Decision: a stream ends once, by its finish, by a named failure or by its client's leaving, and nothing that happens
later to its worker can end it again or begin it anew."""

from __future__ import annotations

import pytest

from tests.rigs.worlds.streams import Client, Cluster, Worker


def finish(cluster: Cluster, worker: Worker) -> None:
    worker.say("s1", [10], finish="length")


def fail(cluster: Cluster, worker: Worker) -> None:
    worker.say("s1", [], fail="InvalidRequest")


def leave(cluster: Cluster, worker: Worker) -> None:
    cluster.leave("s1")


@pytest.mark.parametrize("end", [finish, fail, leave])
def test_stream_ends_exactly_once(end: object) -> None:
    """After its end: tokens, another end, a failure, a closing, a leaving client and a dead worker change nothing."""
    cluster = Cluster()
    worker = cluster.worker("a")
    client: Client = cluster.ask("s1")
    assert callable(end)
    end(cluster, worker)
    shown, ends = list(client.shown), client.ends
    worker.say("s1", [66])
    worker.say("s1", [], finish="stop")
    worker.say("s1", [], fail="EngineShutdown")
    worker.close_stream("s1")
    cluster.leave("s1")
    worker.die()
    other = cluster.worker("b")
    cluster.wait(60)
    assert (client.shown, client.ends) == (shown, ends)
    assert ends == (0 if end is leave else 1)
    assert not other.requests
    assert not len(cluster.set().holds)
