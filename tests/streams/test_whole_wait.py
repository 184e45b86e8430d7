"""A new request's wait for a place is bounded as a whole: in the frontend's line and in an engine's queue together."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Code
from holdfast.core.tiers import Tier
from holdfast.spec.waits import HoldSettings
from holdfast.wire.messages import Generate
from tests.rigs.worlds.streams import Cluster, Worker

QUEUE_S = 3.0


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(HoldSettings(queue_s=QUEUE_S, hold_s=30.0))


def wait_ms(worker: Worker, name: str) -> int:
    """For how long the worker may keep it, as it was told last."""
    sent = [m for m in worker.sent if isinstance(m, Generate) and m.request.request_id == name]
    return sent[-1].wait_ms


@pytest.mark.parametrize("tier", Tier)
def test_a_request_that_comes_back_when_its_wait_is_over_is_refused(cluster: Cluster, tier: Tier) -> None:
    """With a time to come back, whatever its tier, and though another worker has a place: that is a queue's, too."""
    worker = cluster.worker("a")
    client = cluster.ask("s", tier=tier)
    assert wait_ms(worker, "s") == QUEUE_S * 1000
    cluster.worker("b")
    cluster.wait(QUEUE_S)
    worker.turn_away("s")
    assert client.failure is not None
    code, message, retry_after_s = client.failure
    assert code is Code.WORKER_OVERLOADED
    assert "within 3 s" in message
    assert retry_after_s is not None
    assert cluster.dispatcher.stats.lost == {}


def test_one_that_comes_back_sooner_goes_elsewhere_with_what_is_left(cluster: Cluster) -> None:
    """A full worker turns it away at once, and that is no end of its wait."""
    first = cluster.worker("a")
    client = cluster.ask("s")
    second = cluster.worker("b")
    cluster.wait(1.0)
    first.turn_away("s")
    assert client.failure is None
    assert wait_ms(second, "s") == (QUEUE_S - 1.0) * 1000


def test_time_in_line_counts(cluster: Cluster) -> None:
    """Two seconds before a full worker leave one for its queue."""
    worker = cluster.worker("a", places=1)
    cluster.ask("runs")
    cluster.ask("s")
    cluster.wait(2.0)
    worker.say("runs", [1], finish="length")
    assert wait_ms(worker, "s") == pytest.approx(1000, abs=200)


def test_time_without_a_worker_does_not_count(cluster: Cluster) -> None:
    """It was held for one to come."""
    cluster.worker("a").die()
    cluster.ask("s")
    cluster.wait(10.0)
    worker = cluster.worker("b")
    assert wait_ms(worker, "s") == QUEUE_S * 1000


def test_streams_that_ran_wait_without_a_bound(cluster: Cluster) -> None:
    """They were promised their end."""
    first = cluster.worker("a")
    client = cluster.ask("s")
    first.say("s", [1])
    second = cluster.worker("b")
    first.die()
    assert wait_ms(second, "s") == 0
    cluster.wait(QUEUE_S)
    assert client.failure is None
