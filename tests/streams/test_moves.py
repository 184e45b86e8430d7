"""Streams that change workers are counted: from which group to which, how, and what was sent again."""

from __future__ import annotations

import pytest

from holdfast.health.standing import HealthStatus
from holdfast.streams.stats import MOVED_MAX, DispatchStats, StreamPlace
from tests.rigs.worlds.streams import Cluster, Worker


def one_stream(cluster: Cluster, *workers: Worker) -> tuple[Worker, Worker]:
    """A stream with three tokens: the worker that it is on, and the other."""
    cluster.ask("s")
    on, other = workers if "s" in workers[0].numbers else workers[::-1]
    on.say("s", [1, 2, 3])
    return on, other


def test_a_resumed_stream_is_counted_when_it_has_its_next_token() -> None:
    """By the group it left and the one it came to (a worker without a group is one of its own); not when it is sent,
    for it may be turned away; and the tokens it had are told as replayed."""
    cluster = Cluster()
    on, other = one_stream(cluster, cluster.worker("a", places=1), cluster.worker("b", places=1))
    on.die()
    stats = cluster.dispatcher.stats
    assert stats.moved == {}
    other.say("s", [4])
    assert stats.moved == {(on.link.instance.name, other.link.instance.name, "reprefill"): 1}
    assert [method for method, _ in stats.pauses_s] == ["reprefill"]
    (failure,) = stats.failures
    assert (failure.streams, failure.replayed) == (1, 3)


def test_a_standby_of_the_group_takes_over() -> None:
    """Within a group a stream was not moved to another: its memory is where it was."""
    cluster = Cluster()
    active = cluster.worker("a", group="g", epoch=1)
    standby = cluster.worker("b", group="g", active=False)
    cluster.ask("s")
    active.say("s", [1])
    active.die()
    standby.take_over(2)
    standby.say("s", [2])
    assert cluster.dispatcher.stats.moved == {("g", "g", "takeover"): 1}


def test_streams_of_a_quarantined_worker_leave_for_its_wrong_answers() -> None:
    """The metric that people alert on names them; and the seam knows by which fall they left."""
    cluster = Cluster()
    on, other = one_stream(cluster, cluster.worker("a", places=1), cluster.worker("b", places=1))
    on.judged(HealthStatus.UNHEALTHY, fall=1, why="wrong tokens", quarantined=True)
    other.say("s", [4])
    assert cluster.dispatcher.stats.moved == {(on.link.instance.name, other.link.instance.name, "token_mismatch"): 1}
    assert [failure.place.ejections for failure in cluster.dispatcher.stats.failures] == [1]


@pytest.mark.parametrize("quarantined", [True, False])
def test_what_a_quarantined_worker_showed_is_not_called_exact(quarantined: bool) -> None:
    """Its tokens stay in the answer, so the answer does not say that it is the one that would have been."""
    cluster = Cluster()
    on, other = one_stream(cluster, cluster.worker("a", places=1), cluster.worker("b", places=1))
    on.judged(HealthStatus.UNHEALTHY, fall=1, why="why", quarantined=quarantined)
    other.say("s", [4])
    assert cluster.clients["s"].flight.ledger.exact is not quarantined


def test_streams_that_leave_by_plan_are_no_failure() -> None:
    """A drain hands over: counted as such, with no gap that a failure made."""
    cluster = Cluster()
    on, other = one_stream(cluster, cluster.worker("a", places=1), cluster.worker("b", places=1))
    on.judged(HealthStatus.DRAINING, why="it crawls")
    cluster.wait(0.2)
    other.say("s", [4])
    stats = cluster.dispatcher.stats
    assert stats.moved == {(on.link.instance.name, other.link.instance.name, "handover"): 1}
    assert stats.pauses_s == []
    assert [(failure.streams, failure.replayed) for failure in stats.failures] == [(1, 3)]


def test_what_is_counted_is_bounded() -> None:
    """However many groups come and go, a bounded number of pairs is kept: those that were seen last."""
    stats = DispatchStats()
    for number in range(MOVED_MAX + 10):
        stats.count_move(StreamPlace(number, group=f"g{number}"), StreamPlace(0, group="g0"), "reprefill")
        stats.count_move(StreamPlace(1, group="busy"), StreamPlace(0, group="g0"), "reprefill")
    assert len(stats.moved) == MOVED_MAX
    assert stats.moved["busy", "g0", "reprefill"] == MOVED_MAX + 10
    assert ("g0", "g0", "reprefill") not in stats.moved
