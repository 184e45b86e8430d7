"""What goes wrong with one stream on the frontend's side costs that stream, and nobody else on its worker's link."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Code
from holdfast.core.requests import Output
from holdfast.wire.frames import FRAME_BYTES_MAX, encode
from holdfast.wire.messages import Step
from tests.rigs.worlds.streams import Client, Cluster

BUGS = ["on_output", "flush", "still_waiting", "resumed", "dispatched"]


def break_in(client: Client, method: str) -> None:
    def bug(*_: object) -> bool:
        raise AssertionError("a bug of ours")

    setattr(client, method, bug)


@pytest.mark.parametrize("method", BUGS)
def test_a_bug_in_one_consumer_ends_its_stream_only(method: str) -> None:
    """Wherever it is: the others get the tokens of the same step, and go on when the engine dies."""
    cluster = Cluster()
    first = cluster.worker("w1")
    names = ["before", "broken", "after"]
    clients = {name: cluster.ask(name) for name in names}
    break_in(clients["broken"], method)
    first.data.data_received(encode(Step([Output(first.numbers[name], [1]) for name in names])))
    first.die()
    cluster.dispatcher.remind_waiting()
    second = cluster.worker("w2")
    going = [name for name in names if not clients[name].ledger.ended]
    outputs = [Output(second.numbers[name], [2]) for name in going]
    second.data.data_received(encode(Step(outputs)))
    assert [clients[name].shown for name in ("before", "after")] == [[1, 2], [1, 2]]
    assert not any(clients[name].failure for name in ("before", "after"))
    assert clients["broken"].failure is not None
    assert clients["broken"].failure[0] is Code.INTERNAL
    assert cluster.dispatcher.stats.lost == {Code.INTERNAL: 1}


def test_a_stream_whose_end_cannot_be_told_keeps_nobody_from_theirs() -> None:
    """Its consumer raises when it is told that it failed: the others of the dead worker are moved all the same."""
    cluster = Cluster()
    worker = cluster.worker("w1")
    broken, other = cluster.ask("broken"), cluster.ask("other")
    break_in(broken, "failed")
    worker.say("broken", [], fail=Code.INVALID_REQUEST)
    worker.say("other", [1])
    worker.die()
    cluster.worker("w2").say("other", [2], "length")
    assert (other.shown, other.finish) == ([1, 2], "length")


def test_a_bug_at_a_streams_last_flush_is_told_to_its_client() -> None:
    """The engine has said its end, and the client does not have it: it hears of an error instead of nothing."""
    cluster = Cluster()
    worker = cluster.worker("w1")
    client = cluster.ask("s1")
    break_in(client, "flush")
    worker.say("s1", [1], "length")
    assert client.failure is not None
    assert client.failure[0] is Code.INTERNAL
    assert worker.cancelled == []


LONG = [70_000] * (FRAME_BYTES_MAX // 5 + 1)  # five bytes each


def test_a_prompt_that_fits_no_message_is_refused_by_name() -> None:
    """As the client's own mistake, and at once, whether or not a worker is there; nobody else notices."""
    cluster = Cluster()
    held = cluster.ask("held", LONG)
    assert held.failure is None
    worker = cluster.worker("w1")
    asked, other = cluster.ask("asked", LONG), cluster.ask("other")
    for client in (held, asked):
        assert client.failure is not None
        assert client.failure[0] is Code.INVALID_REQUEST
        assert f"{len(LONG)} tokens are too long to send" in client.failure[1]
        assert client.ends == 1
    assert (worker.link.slot.inflight, len(held.flight.workers.holds)) == (1, 0)
    assert (cluster.dispatcher.stats.refused, cluster.dispatcher.stats.lost) == ({Code.INVALID_REQUEST: 2}, {})
    worker.say("other", [1], "length")
    assert other.finish == "length"


def test_a_held_stream_that_breaks_holds_up_nobody_any_more() -> None:
    """A suspect waits for a worker of its own, and a new request behind it: when the suspect's consumer breaks the
    other is sent in the same moment, not at a later tick."""
    cluster = Cluster()
    first = cluster.worker("first")
    suspect = cluster.ask("suspect")
    second = cluster.worker("second")
    first.die()
    worker = cluster.worker("worker")
    cluster.ask("busy")
    second.die()
    cluster.ask("other")
    assert [request.request_id for request in worker.requests] == ["busy"], "nobody is tried beside another"
    cluster.dispatcher.consumer_raised(suspect.flight, AssertionError("a bug of ours"))
    assert [request.request_id for request in worker.requests] == ["busy", "other"]
