"""What is told of requests that wait: their state, their place, and how long they may for a model that is wanted."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Code
from holdfast.core.tiers import Tier
from holdfast.spec.waits import HoldSettings
from holdfast.streams.flight import RequestState, queue_positions, state_of
from tests.rigs.worlds.streams import Client, Cluster

MODEL = "m"  # the rig's card's
WANTED = frozenset({MODEL})


def state(client: Client) -> RequestState:
    return state_of([client.flight])


def places(cluster: Cluster) -> dict[str, tuple[RequestState, int]]:
    lines = [one for workers in cluster.directory.sets.values() for one in queue_positions(workers, wanted=False)]
    return {flight.consumer.name: (waiting.state, waiting.place) for flight, waiting in lines}  # type: ignore[attr-defined]


def test_a_request_goes_through_its_states() -> None:
    """Held without a worker, in line behind another, sent, running, and in line again when its worker died."""
    cluster = Cluster()
    first = cluster.ask("first")
    assert (state(first), places(cluster)) == (RequestState.PROVISIONING, {"first": (RequestState.PROVISIONING, 1)})
    worker = cluster.worker("w1", places=1)
    second = cluster.ask("second")
    assert (state(first), state(second)) == (RequestState.DISPATCHED, RequestState.QUEUED)
    worker.say("first", [1])
    assert state(first) is RequestState.RUNNING
    worker.die()
    assert (state(first), state(second)) == (RequestState.PROVISIONING, RequestState.PROVISIONING)
    other = cluster.worker("w2", places=1)
    assert (state(first), state(second)) == (RequestState.RUNNING, RequestState.QUEUED), (
        "the first goes on where it was"
    )
    other.say("first", [2], "length")
    other.say("second", [1])
    assert (state(first), state(second)) == (RequestState.RUNNING, RequestState.RUNNING), (
        "its client has yet to read the end"
    )


def test_a_dispatch_counts_from_the_worker_that_took_it() -> None:
    """Every attempt is counted and told to the consumer; a full worker took nothing, and a later failure changes
    nothing of when it was first taken."""
    cluster = Cluster()
    full, client = cluster.worker("full", places=1), cluster.ask("s")
    assert (client.flight.dispatched_at_s, client.workers) == (cluster.now_s, ["worker 1"])
    full.turn_away("s")
    assert (state(client), client.flight.dispatched_at_s) == (RequestState.QUEUED, 0.0)
    cluster.wait(2.0)
    taken_s = cluster.now_s
    worker = cluster.worker("w", places=1)
    assert (client.flight.dispatched_at_s, client.workers) == (taken_s, ["worker 1", "worker 2"])
    worker.say("s", [1])
    cluster.wait(1.0)
    cluster.worker("next")
    worker.die()
    assert (client.flight.dispatched_at_s, client.workers) == (taken_s, ["worker 1", "worker 2", "worker 3"])
    assert cluster.dispatcher.stats.dispatched == {MODEL: 3}


def test_places_are_as_places_will_be_given() -> None:
    """Streams that ran before stand first, then higher tiers; who leaves moves the others up."""
    cluster = Cluster()
    worker = cluster.worker("w1", places=1)
    cluster.ask("runs")
    worker.say("runs", [1])
    for name, tier in (("low", Tier.BEST_EFFORT), ("usual", Tier.STANDARD), ("high", Tier.PREMIUM)):
        cluster.ask(name, tier=tier)
    assert places(cluster) == {
        "high": (RequestState.QUEUED, 1),
        "usual": (RequestState.QUEUED, 2),
        "low": (RequestState.QUEUED, 3),
    }
    cluster.leave("usual")
    assert places(cluster)["low"] == (RequestState.QUEUED, 2)
    worker.die()
    assert list(places(cluster)) == ["runs", "high", "low"]


def test_streams_of_one_request_are_one_in_line() -> None:
    """Whoever stands behind a request with many choices stands behind one."""

    class Part(Client):
        @property
        def request(self) -> Client:
            return cluster.clients["first"]

    cluster = Cluster()
    cluster.ask("first")
    second, third = cluster.ask("second"), cluster.ask("third")
    second.__class__ = Part
    cluster.dispatcher.remind_waiting()
    told = [client.waiting.place for client in (cluster.clients["first"], second, third) if client.waiting]
    assert told == [1, 1, 2]


HOLDS = HoldSettings(hold_s=3.0, queue_s=1.0, provision_s=20.0)


@pytest.mark.parametrize(("wanted", "waits_s"), [(frozenset[str](), 3.0), (WANTED, 20.0)], ids=["known", "wanted"])
def test_a_wanted_model_is_waited_for_longer(wanted: frozenset[str], waits_s: float) -> None:
    """New requests, and streams whose worker died."""
    cluster = Cluster(HOLDS)
    cluster.directory.set_wanted("d", wanted)
    worker = cluster.worker("w1")
    ran = cluster.ask("ran")
    worker.say("ran", [1])
    worker.die()
    fresh = cluster.ask("fresh")
    cluster.wait(waits_s - 0.5)
    assert (ran.failure, fresh.failure) == (None, None)
    cluster.wait(1.0)
    for client in (ran, fresh):
        assert client.failure is not None
        assert client.failure[:2] == (Code.NO_WORKER, f"no worker could take it within {waits_s:g} s")


def test_who_waited_for_a_wanted_models_worker_is_not_refused_when_that_is_full() -> None:
    """They were to wait, all of them; who comes later finds a worker, and waits for a place as ever."""
    cluster = Cluster(HOLDS)
    cluster.directory.set_wanted("d", WANTED)
    early = [cluster.ask(f"early {number}") for number in range(3)]
    cluster.wait(5.0)
    worker = cluster.worker("w1", places=1)
    late = cluster.ask("late")
    cluster.wait(3.0)
    assert [client.failure for client in early] == [None] * 3
    assert late.failure is not None
    assert late.failure[0] is Code.WORKER_OVERLOADED
    worker.say("early 0", [1], "length")
    worker.say("early 1", [1], "length")
    assert state(early[2]) is RequestState.DISPATCHED


def test_a_model_that_is_no_longer_wanted_is_not_waited_for() -> None:
    """Who waits is told at the next tick, and the name is unknown; while a worker is left it serves."""
    cluster = Cluster(HOLDS)
    cluster.directory.set_wanted("d", WANTED)
    worker = cluster.worker("w1", places=1)
    runs = cluster.ask("runs")
    worker.say("runs", [1])
    cluster.directory.set_wanted("d", frozenset())
    cluster.wait(0.2)
    assert runs.failure is None
    worker.say("runs", [2])
    assert runs.shown == [1, 2]
    cluster.directory.set_wanted("d", WANTED)
    worker.die()
    fresh = cluster.ask("fresh")
    cluster.wait(1.0)
    assert (runs.failure, fresh.failure) == (None, None)
    cluster.directory.set_wanted("d", frozenset())
    cluster.wait(0.1)
    for client in (runs, fresh):
        assert client.failure is not None
        assert client.failure[0] is Code.MODEL_UNAVAILABLE
        assert MODEL in client.failure[1]
    cluster.wait(2.0)
    assert (cluster.directory.knows(MODEL), cluster.directory.sets) == (False, {})


def test_what_is_wanted_again_is_waited_for_again() -> None:
    """And a worker that appears says that somebody wants it, whatever became of the record."""
    cluster = Cluster(HOLDS)
    cluster.directory.set_wanted("d", WANTED)
    cluster.directory.set_wanted("d", frozenset())
    cluster.directory.set_wanted("d", WANTED)
    client = cluster.ask("asks")
    cluster.wait(10.0)
    assert client.failure is None
    cluster.directory.set_wanted("d", frozenset())
    cluster.directory.appeared("d", MODEL, cluster.now_s)  # a manifest's worker of that name
    cluster.wait(0.5)
    assert client.failure is not None, "it waited for longer than others may"
    assert client.failure[0] is Code.NO_WORKER


def test_another_deployments_wish_is_its_own() -> None:
    """A model that two want is wanted while one does; what one no longer wants is gone there alone."""
    cluster = Cluster(HOLDS)
    for deployment in ("d", "e"):
        cluster.directory.set_wanted(deployment, WANTED)
    here, there = cluster.ask("here"), cluster.ask("there", workers=cluster.set(namespace="e-00000000"))
    cluster.directory.set_wanted("d", frozenset())
    cluster.wait(0.5)
    assert here.failure is not None
    assert here.failure[0] is Code.MODEL_UNAVAILABLE
    assert (there.failure, cluster.directory.knows(MODEL)) == (None, True)
