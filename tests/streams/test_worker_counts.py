"""What a frontend reports of its workers: failures that are theirs, each cause once, and tokens as they came."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import Code
from holdfast.core.requests import Output
from holdfast.health.records import WorkerSeen
from holdfast.health.standing import HealthStatus
from holdfast.streams.flight import Flight
from holdfast.streams.observations import LINGER_S, AllWorkerCounts
from holdfast.wire.frames import encode
from holdfast.wire.messages import Closed, Step
from tests.rigs.worlds.streams import Cluster, Worker


def one_with(streams: int) -> tuple[Cluster, Worker]:
    """A worker with so many streams, each of which has a token."""
    cluster = Cluster()
    worker = cluster.worker("a", places=32)
    for number in range(streams):
        cluster.ask(f"s{number}")
        worker.say(f"s{number}", [1])
    return cluster, worker


@pytest.mark.parametrize(
    ("how", "kind"), [("die", "disconnected"), ("judged_lost", "stalled")], ids=["connection", "stall"]
)
def test_all_streams_of_one_broken_connection_or_stall_are_one_failure(how: str, kind: str) -> None:
    """Sixteen streams have one cause, and sixteen at once are not sixteen in a row."""
    _, worker = one_with(16)
    getattr(worker, how)()
    assert worker.link.counts.failed == {kind: 1}


def test_streams_that_are_closed_in_one_frame_are_one_failure() -> None:
    """The next frame's is another."""
    _, worker = one_with(3)
    numbers = [worker.numbers[f"s{number}"] for number in range(3)]
    worker.data.data_received(encode(Closed(numbers[:2])))
    worker.data.data_received(encode(Closed(numbers[2:])))
    assert worker.link.counts.failed == {"truncated": 2}


@pytest.mark.parametrize("code", [Code.INVALID_REQUEST, Code.RESOURCE_EXHAUSTED, Code.CANCELLED])
def test_what_is_not_its_fault_is_nothing(code: Code) -> None:
    """A client's mistake, a client that leaves, a refusal for want of room."""
    cluster, worker = one_with(2)
    worker.say("s0", [], fail=code)
    cluster.leave("s1")
    cluster.ask("late")
    worker.turn_away("late")
    assert worker.link.counts.failed == {}
    assert worker.link.counts.succeeded == 0


@pytest.mark.parametrize("how", ["drain", "handed over", "fall", "superseded"])
def test_what_was_decided_is_nothing(how: str) -> None:
    """A worker that was told to stop, is drained by plan, has lost its traffic by a verdict, or leads no more."""
    cluster, worker = one_with(3)
    cluster.worker("b", places=32)
    if how == "drain":
        worker.drain()
    elif how == "fall":
        worker.judged(HealthStatus.UNHEALTHY, fall=1)
    elif how == "handed over":
        worker.judged(HealthStatus.DRAINING)
        cluster.wait(0.1)
    else:
        cluster, worker = Cluster(), None  # type: ignore[assignment]
        worker = cluster.worker("a", group="g", epoch=1)
        standby = cluster.worker("b", group="g", active=False)
        cluster.ask("s0")
        standby.take_over(2)
    assert not worker.link.streams
    assert worker.link.counts.failed == {}
    assert all(client.failure is None for client in cluster.clients.values())


def test_errors_and_ends_are_counted_one_by_one() -> None:
    """Each in its own frame."""
    _, worker = one_with(5)
    worker.say("s0", [], fail=Code.ENGINE_SHUTDOWN)
    worker.say("s1", [], fail=Code.ENGINE_SHUTDOWN)
    worker.say("s2", [2, 0], finish="stop")
    worker.say("s3", [2], finish="length")
    assert worker.link.counts.failed == {"engine error": 2}
    assert worker.link.counts.succeeded == 2


def test_tokens_are_counted_as_they_came() -> None:
    """Several at once for a stream, none with a failure."""
    _, worker = one_with(2)
    worker.say("s0", [3, 4, 5])
    both = [Output(worker.numbers["s0"], [6]), Output(worker.numbers["s1"], [7])]
    worker.data.data_received(encode(Step(both)))
    worker.say("s1", [], fail=Code.ENGINE_SHUTDOWN)
    assert worker.link.counts.tokens == 2 + 3 + 2


EMPTY: dict[str, Any] = {"tokens": [], "finish": "stop"}
ODD: dict[str, Any] = {"tokens": [5], "finish": "abort"}


@pytest.mark.parametrize(
    ("end", "kind", "shown"),
    [(EMPTY, "zero tokens", []), (ODD, "truncated", [5])],
    ids=["empty", "unknown"],
)
def test_an_end_that_is_none_is_resumed_elsewhere(end: dict[str, Any], kind: str, shown: list[int]) -> None:
    """An answer without a token, or an end that nobody knows: its client sees the whole answer, each token once."""
    cluster = Cluster()
    bad = cluster.worker("bad")
    client = cluster.ask("s0")
    good = cluster.worker("good")
    bad.say("s0", **end)
    assert bad.link.counts.failed == {kind: 1}
    assert client.ends == 0
    good.say("s0", [6, 0], "stop")
    assert client.shown == [*shown, 6, 0]
    assert client.finish == "stop"
    assert client.ends == 1


def test_a_length_may_be_the_engines_own() -> None:
    """Whoever has no room for more says so at once, also without a token: that is an end."""
    cluster = Cluster()
    worker = cluster.worker("a")
    client = cluster.ask("s0")
    worker.say("s0", [], "length")
    assert client.finish == "length"
    assert worker.link.counts.failed == {}


def test_which_token_stops_is_the_engines_to_say() -> None:
    """An end by any token is one, also if the token came before the word."""
    ledger = Cluster().ask("s0").ledger
    assert ledger.cut_short([5], "stop") is None
    assert ledger.cut_short([], "stop") is not None
    ledger.made += [1, 0]
    assert ledger.cut_short([], "stop") is None


def test_a_report_has_whom_anything_was_sent_and_for_a_while_whom_it_lost() -> None:
    """Never used: not in it. Gone: in it for a minute, with what it did last."""
    counts = AllWorkerCounts()
    flight: Flight = Cluster().ask("s0").flight
    flight.sent_at_s, flight.last_token_at_s = 100.0, 103.0
    counts.of(1).tokens = 5
    counts.of(2)
    here = {1: ([flight], 3), 2: ((), 0)}
    assert counts.report(here, 104.5) == {"1": WorkerSeen(tokens=5, open=1, silent_s=1.5, fall=3)}
    assert counts.report({}, 104.5 + LINGER_S).keys() == {"1"}
    assert counts.report({}, 104.6 + LINGER_S) == {}
