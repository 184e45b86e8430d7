"""Decision: an engine's death is one stream's fault or nobody's, never its neighbours'. Who was there at two deaths is
tried alone, on an engine that has lived for a while, so that only the one under which that engine dies is failed."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Code
from tests.rigs.worlds.streams import Client, Cluster, Worker

STREAMS = 32


def step(worker: Worker) -> bool:
    """One engine step: a token for each stream, or the death of all if the poison is among them."""
    flights = list(worker.link.streams.values())
    if any(flight.ledger.request_id == "poison" for flight in flights):
        worker.die()
        return False
    for flight in flights:
        ledger = flight.ledger
        worker.say(ledger.request_id, [1000 + ledger.emitted], "length" if ledger.emitted == 9 else None)
    return True


def crash_until_over(cluster: Cluster, clients: list[Client], next_worker: list[int]) -> int:
    """Steps, and a new engine after each death; how many died."""
    deaths, active = 0, cluster.worker("w0", places=64)
    for _ in range(200):
        if all(client.ledger.ended for client in clients):
            break
        cluster.wait(0.1)
        if not step(active):
            deaths += 1
            next_worker[0] += 1
            active = cluster.worker(f"w{next_worker[0]}", places=64)
    return deaths


def test_bystanders_outlive_the_poison() -> None:
    """32 streams resumed together with it at two deaths all finish, each with exactly its tokens; three engines die."""
    cluster = Cluster()
    names = [f"s{number}" for number in range(STREAMS)]
    names.insert(STREAMS // 2, "poison")
    clients = [cluster.ask(name) for name in names]
    assert crash_until_over(cluster, clients, [0]) == 3
    for client in clients:
        if client.name == "poison":
            assert client.failure is not None
            assert client.failure[0] is Code.POISONED
            assert client.failure[2] is None, "trying again would only cost more engines"
        else:
            assert client.failure is None, client.name
            assert client.shown == [1000 + index for index in range(10)]
    assert cluster.dispatcher.stats.lost == {Code.POISONED: 1}


def test_two_poisons_cost_each_other_nothing_more() -> None:
    """Both are found, one after the other, and the others still live."""
    cluster = Cluster()
    clients = [cluster.ask(name) for name in ("s1", "poison", "s2")]
    second = [cluster.ask("poison"), cluster.ask("s3")]
    assert crash_until_over(cluster, clients + second, [0]) == 4
    assert [client.failure is None for client in clients + second] == [True, False, True, False, True]


def test_ten_deaths_with_a_token_between_each_are_nobodys_fault() -> None:
    """A stream that goes on after each death is never a suspect, however many there are."""
    cluster = Cluster()
    client = cluster.ask("s1")
    for number in range(10):
        worker = cluster.worker(f"w{number}")
        worker.say("s1", [number])
        worker.die()
        assert client.ledger.deaths == 0
    cluster.worker("last").say("s1", [10], "length")
    assert client.shown == list(range(11))
    assert client.finish == "length"


@pytest.mark.parametrize("lives_s", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("speaks", [False, True])
def test_ten_engines_killed_soon_after_they_took_over_are_nobodys_fault(lives_s: float, speaks: bool) -> None:
    """Somebody kills every new engine, before any stream made a token or when only one has: all go on when it ends."""
    cluster = Cluster()
    clients = [cluster.ask(f"s{number}") for number in range(STREAMS)]
    for number in range(10):
        worker = cluster.worker(f"w{number}", places=64)
        if speaks and number % 2 and (flights := list(worker.link.streams.values())):
            worker.say(flights[0].ledger.request_id, [1000 + flights[0].ledger.emitted])
        cluster.wait(lives_s)
        worker.die()
    assert cluster.dispatcher.stats.lost == {}
    assert crash_until_over(cluster, clients, [0]) == 0
    assert all(client.shown == [1000 + index for index in range(10)] for client in clients)


def test_a_poison_among_engines_that_are_killed_is_still_found() -> None:
    """Engines killed at once tell nothing; the first that lives for a while tells."""
    cluster = Cluster()
    clients = [cluster.ask(name) for name in ("s1", "poison", "s2")]
    for number in range(5):
        cluster.worker(f"k{number}", places=64).die()
    assert crash_until_over(cluster, clients, [0]) == 1
    assert [client.failure is None for client in clients] == [True, False, True]


def test_ten_planned_handovers_in_a_row_are_nobodys_fault() -> None:
    """A worker that is told to stop gives its streams back: no attempt of theirs has failed, however many there are."""
    cluster = Cluster()
    client = cluster.ask("s1")
    for number in range(10):
        cluster.worker(f"w{number}").drain()
        assert (client.ledger.empty_attempts, client.ledger.deaths, client.ledger.resumed) == (0, 0, number + 1)
    cluster.worker("last").say("s1", [10], "length")
    assert (client.shown, client.finish) == ([10], "length")
