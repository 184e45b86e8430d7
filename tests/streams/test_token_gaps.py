"""Every gap between two tokens is counted; a failure's gap is the one its streams saw, and their clients are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import Code
from holdfast.streams.stats import FAILURES_MAX, GAP_BOUNDS_S, TokenGaps
from tests.rigs.worlds.streams import Cluster


def gaps_of(cluster: Cluster) -> TokenGaps:
    (gaps,) = cluster.dispatcher.stats.gaps.values()
    return gaps


def bucket(gap_s: float) -> int:
    return next((place for place, bound_s in enumerate(GAP_BOUNDS_S) if gap_s <= bound_s), len(GAP_BOUNDS_S))


def test_a_stall_is_one_long_gap() -> None:
    """Ten quick tokens, a stall, ten more: the stall stands in its own bucket, and no mean hides it."""
    cluster = Cluster()
    worker = cluster.worker("w")
    cluster.ask("s")
    for place in range(20):
        cluster.now_s += 3.0 if place == 10 else 0.02
        worker.say("s", [place + 1])
    counts = gaps_of(cluster).counts
    assert counts[bucket(0.02)] == 18
    assert counts[bucket(3.0)] == 1
    assert sum(counts) == 19


@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(0, 4)), max_size=20))
def test_every_token_but_the_first_is_counted_once(steps: list[tuple[float, int]]) -> None:
    """Tokens that come in one output came together: one has the gap, the others none."""
    cluster = Cluster()
    worker = cluster.worker("w")
    cluster.ask("s")
    waited_s, tokens, sum_s = 0.0, 0, 0.0
    for pause_s, count in steps:
        cluster.now_s += pause_s
        waited_s += pause_s
        worker.say("s", [7] * count)
        if count:
            sum_s += waited_s if tokens else 0.0
            waited_s, tokens = 0.0, tokens + count
    gaps = gaps_of(cluster)
    assert sum(gaps.counts) == max(0, tokens - 1)
    assert abs(gaps.sum_s - sum_s) < 1e-6


def test_the_gap_of_a_failure_is_from_token_to_token() -> None:
    """A worker that stood still for a while before it was called lost: the whole wait counts, for the client's word
    and for the seam, which is the failed worker's."""
    cluster = Cluster()
    first, second = cluster.worker("w1", places=1), cluster.worker("w2", places=1)
    client = cluster.ask("s")
    on, other = (first, second) if "s" in first.numbers else (second, first)
    on.say("s", [1, 2])
    cluster.now_s += 1.4  # nothing comes, and nobody knows yet
    on.judged_lost()
    cluster.now_s += 0.1
    other.say("s", [3])
    assert client.pauses == [(1.5, 2)]
    (failure,) = cluster.dispatcher.stats.failures
    assert (failure.place.worker, failure.streams, failure.lost) == (on.link.slot.name, 1, 0)
    assert round(failure.worst_s, 6) == 1.5
    assert gaps_of(cluster).counts[bucket(1.5)] == 1


def test_a_stream_that_is_lost_is_told_of_the_worker_that_failed_it() -> None:
    """Held until its patience ends, it counts as lost where it failed."""
    cluster = Cluster()
    worker = cluster.worker("w")
    cluster.ask("s")
    worker.say("s", [1])
    worker.die()
    cluster.now_s += cluster.settings.hold_s + 1
    cluster.dispatcher.tick(cluster.now_s)
    (failure,) = cluster.dispatcher.stats.failures
    assert (failure.place.worker, failure.streams, failure.lost) == (worker.link.slot.name, 0, 1)


def test_a_stream_whose_engines_die_one_after_the_other_is_told_of_each() -> None:
    """None of them had no stream on it; and who is convicted is lost where it was tried, too."""
    cluster = Cluster()
    first = cluster.worker("a")
    cluster.ask("s")
    first.say("s", [1])
    cluster.ask("poison")
    first.die()
    second = cluster.worker("b")
    second.die()
    third = cluster.worker("c")
    cluster.wait(2.0)  # a suspect is tried on one that has lived for a while
    third.say("s", [2])
    third.die()
    assert cluster.clients["poison"].failure is not None
    told = [(failure.place.worker, failure.streams, failure.lost) for failure in cluster.dispatcher.stats.failures]
    names = [worker.link.slot.name for worker in (first, second, third)]
    assert told == [(names[0], 1, 1), (names[1], 1, 1), (names[2], 0, 1)]


def test_each_failure_that_a_worker_survives_is_counted_by_itself() -> None:
    """With its streams, however many fail, at once or one by one; what is remembered is bounded, the newest stay."""
    cluster = Cluster()
    worker = cluster.worker("w")
    for failure in range(FAILURES_MAX + 1):
        for name in ("s", "t"):
            cluster.ask(f"{name}{failure}")
        worker.judged_lost()
        cluster.now_s += 9.0
        worker.route(routable=True)
        cluster.wait(1.0)
        worker.say(f"s{failure}", [1], "length")
        if failure % 2:
            worker.say(f"t{failure}", [1], "length")
        cluster.leave(f"t{failure}")
    told = [(failure.survived, failure.streams) for failure in cluster.dispatcher.stats.failures]
    assert told == [(True, 1 + failure % 2) for failure in range(1, FAILURES_MAX + 1)]


def test_streams_that_fail_alone_are_no_part_of_their_workers_end() -> None:
    """The worker serves on; what it failed before it is lost is not what its loss cost."""
    cluster = Cluster()
    a = cluster.worker("a")
    for name in ("s", "t", "u"):
        cluster.ask(name)
        a.say(name, [1])
    b = cluster.worker("b")
    a.close_stream("s")
    a.close_stream("t")
    b.say("s", [2])
    b.say("t", [2])
    a.die()
    b.say("u", [2])
    told = [(failure.survived, failure.streams) for failure in cluster.dispatcher.stats.failures]
    assert told == [(True, 2), (False, 1)]


def test_told_before_the_first_token_after_a_failure() -> None:
    """Each failure is told once, with its pause, while the tokens that end it are still to be shown."""
    cluster = Cluster()
    a, b = cluster.worker("a"), cluster.worker("b")
    client = cluster.ask("s")
    first, second = (a, b) if a.requests else (b, a)
    first.say("s", [7, 8])
    assert client.pauses == []
    first.die()
    cluster.wait(0.3)
    assert client.pauses == []
    second.say("s", [9])
    second.say("s", [10])
    assert client.pauses == [(0.3, 2)]
    first.connect()
    second.die()
    cluster.wait(0.2)
    first.say("s", [11], "stop")
    assert client.pauses == [(0.3, 2), (0.2, 4)]
    assert client.shown == [7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("code", "told"), [(Code.WORKER_OVERLOADED, 0), (Code.DISCONNECTED, 1), (Code.CANNOT_CONNECT, 1)]
)
def test_a_full_worker_is_no_failure_to_speak_of(code: Code, told: int) -> None:
    """A stream that met a full worker before its first token is not said to have been resumed; a failed one is."""
    cluster = Cluster()
    a, b = cluster.worker("a"), cluster.worker("b")
    client = cluster.ask("s")
    first, second = (a, b) if a.requests else (b, a)
    first.say("s", [], fail=code)
    second.say("s", [7])
    assert len(client.pauses) == told
