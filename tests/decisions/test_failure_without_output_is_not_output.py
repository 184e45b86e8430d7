"""Decision: a client hears nothing before the first token, so that a refusal can still have its status. A worker that
fails a request without a token has not begun to answer it."""

from __future__ import annotations

from holdfast.spec.waits import HoldSettings
from tests.rigs.worlds.streams import Cluster


def test_failure_without_output_is_not_output() -> None:
    """The consumer is not touched by a fruitless attempt; the pause is measured to the first token that comes."""
    cluster = Cluster(HoldSettings(hold_s=5))
    worker = cluster.worker("a")
    client = cluster.ask("s1")
    worker.say("s1", [], fail="EngineShutdown")
    cluster.wait(1)
    worker.say("s1", [], fail="EngineShutdown")
    cluster.wait(2)
    assert client.flushes == 0
    assert cluster.dispatcher.stats.pauses_s == []
    worker.say("s1", [10])
    assert client.flushes == 1
    assert [round(pause_s, 1) for _, pause_s in cluster.dispatcher.stats.pauses_s] == [3.0]
