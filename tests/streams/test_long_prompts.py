"""How long a stream may wait is about waiting: time that it ran, or in which others are tried alone, is none."""

from __future__ import annotations

from holdfast.routing.table import YOUNG_S
from holdfast.spec.waits import HoldSettings
from tests.rigs.worlds.streams import Client, Cluster, Worker

HOLD_S = 5.0
LONG_S = 8.0  # what a prompt takes to compute here


def dies_twice(cluster: Cluster, names: list[str], between_s: float) -> tuple[list[Client], Worker]:
    """Clients whose engines died twice under them, before they had a token; and the engine after those."""
    first = cluster.worker("a")
    clients = [cluster.ask(name) for name in names]
    first.die()
    cluster.wait(0.2)
    second = cluster.worker("b")
    cluster.wait(between_s)
    second.die()
    cluster.wait(0.2)
    return clients, cluster.worker("c")


def test_a_prompt_that_takes_longer_than_the_wait_outlives_two_deaths() -> None:
    """It waited for a moment and ran for long: when its second engine dies it has its whole wait before it."""
    cluster = Cluster(HoldSettings(hold_s=HOLD_S))
    (client,), third = dies_twice(cluster, ["s"], LONG_S)
    cluster.wait(YOUNG_S + 0.2)
    assert client.failure is None
    assert [request.request_id for request in third.requests] == ["s"]


def test_what_was_waited_before_it_ran_still_counts() -> None:
    """Short runs between the waits begin no new one: all of them together are bounded."""
    cluster = Cluster(HoldSettings(hold_s=HOLD_S))
    first = cluster.worker("a")
    client = cluster.ask("s")
    first.die()
    cluster.wait(HOLD_S - 1)
    second = cluster.worker("b")
    cluster.wait(0.2)
    second.die()
    cluster.wait(0.8)
    assert client.failure is None
    cluster.wait(0.4)
    assert client.failure is not None


def test_suspects_whose_trials_take_long_all_have_theirs() -> None:
    """Each is tried alone for as long as its prompt takes; who stands behind may wait longer than for a worker."""
    cluster = Cluster(HoldSettings(hold_s=HOLD_S))
    names = ["s1", "s2", "s3", "s4"]
    clients, third = dies_twice(cluster, names, 0.2)
    cluster.wait(YOUNG_S + 0.2)
    for name in names:
        assert [request.request_id for request in third.requests][-1] == name, "the next is tried, alone"
        cluster.wait(LONG_S)
        third.say(name, [7])
    assert not any(client.failure for client in clients)


def test_after_the_last_trial_a_suspect_waits_no_longer_than_others() -> None:
    """Where nobody is tried any more, because there is no worker, its wait ends."""
    cluster = Cluster(HoldSettings(hold_s=HOLD_S))
    (first, second), third = dies_twice(cluster, ["s1", "s2"], 0.2)
    cluster.wait(YOUNG_S + LONG_S)
    third.die()
    assert first.failure is not None, "convicted: it was tried alone"
    cluster.wait(HOLD_S - 0.2)
    assert second.failure is None
    cluster.wait(0.4)
    assert second.failure is not None
