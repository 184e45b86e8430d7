"""Decision: a stream crosses to another card only when its own set is gone for good and the manifest allows it; then
its answer says so. Until a rollout is in place its old set may come back, and is waited for."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Code
from holdfast.discovery.card import ModelCard
from holdfast.spec.waits import HoldSettings
from holdfast.streams.directory import SetPolicy
from holdfast.streams.flight import WorkerSet
from tests.rigs.worlds.streams import Client, Cluster, Worker, make_card

OLD, NEW = "d-aaaaaaaa", "d-bbbbbbbb"
BOTH = frozenset({OLD, NEW})
AWAY = SetPolicy(frozenset(), BOTH)  # the old one is stopped, the new one not proven
PROVEN = SetPolicy(frozenset({NEW}), BOTH)
UNDONE = SetPolicy(frozenset({OLD}), BOTH)
IN_PLACE = SetPolicy(frozenset({NEW}), frozenset({NEW}))
ALLOWED = SetPolicy(frozenset({NEW}), frozenset({NEW}), frozenset({NEW}))
HOLDS = HoldSettings(hold_s=3, stand_in_after_s=2, away_s=100)


class Swap:
    """One stream in the middle of its answer, one request that waits; their worker is taken away, and another comes."""

    def __init__(self, card: ModelCard) -> None:
        self.cluster = cluster = Cluster(HOLDS)
        self.old = cluster.set(make_card("old"), OLD)
        cluster.directory.apply_policy("d", UNDONE)
        worker = cluster.worker("first", workers=self.old)
        self.begun = cluster.ask("begun", workers=self.old)
        worker.say("begun", [10])
        cluster.directory.apply_policy("d", AWAY)
        worker.die()
        self.new = cluster.ask("new", workers=self.old)
        cluster.wait(10)  # longer than anybody waits for one that crashed
        assert self.waiting(self.begun), "nobody knows yet whether its workers come back"
        self.heir_set = cluster.set(card, NEW)
        self.heir = cluster.worker("heir", workers=self.heir_set)

    def waiting(self, client: Client) -> bool:
        return client.flight in self.old.holds

    def goes_on(self, ruling: SetPolicy) -> list[str]:
        """Who is taken up by the new set within a second."""
        self.cluster.directory.apply_policy("d", ruling)
        self.cluster.wait(1)
        return sorted(request.request_id for request in self.heir.requests)


def test_another_card_is_taken_only_when_all_is_decided_and_allowed() -> None:
    """While there is a way back it waits, however long; then it goes on, and is not exact."""
    swap = Swap(make_card("new"))
    assert swap.goes_on(PROVEN) == []
    swap.cluster.wait(30)
    assert swap.waiting(swap.begun)
    assert swap.goes_on(ALLOWED) == ["begun"]
    assert not swap.begun.ledger.exact


def test_what_is_not_allowed_fails_by_name() -> None:
    """As soon as its set is gone for good, and not before."""
    swap = Swap(make_card("new"))
    assert swap.goes_on(PROVEN) == []
    assert swap.begun.failure is None
    assert swap.goes_on(IN_PLACE) == []
    assert swap.begun.failure is not None
    assert swap.begun.failure[0] is Code.REPLACED


def test_an_undone_rollout_gives_it_its_own_set_back() -> None:
    """It goes on there exactly, though it waited for longer than a crash is waited for."""
    swap = Swap(make_card("new"))
    swap.cluster.directory.apply_policy("d", UNDONE)
    swap.cluster.wait(1)
    back = swap.cluster.worker("back", workers=swap.old)
    assert [request.tokens for request in back.requests] == [[1, 2, 3, 10]]
    assert swap.begun.ledger.exact


def test_an_equal_card_goes_on_with_it() -> None:
    """Whatever the manifest says: as far as a card can tell it is the same, and the answer says that it changed."""
    swap = Swap(make_card("old"))
    assert swap.goes_on(PROVEN) == ["begun"]
    assert not swap.begun.ledger.exact


def test_a_wait_for_a_rollout_is_bounded() -> None:
    """A rollout that nobody carries out decides nothing: then its streams are told that there is no worker."""
    swap = Swap(make_card("new"))
    swap.cluster.wait(HOLDS.away_s + HOLDS.hold_s)
    assert swap.begun.failure is not None
    assert swap.begun.failure[0] is Code.NO_WORKER


@pytest.mark.parametrize(("card", "goes"), [(make_card("new"), True), (make_card("new", chat_template="t"), False)])
def test_what_has_not_begun_goes_where_its_prompt_means_the_same(card: ModelCard, goes: bool) -> None:
    """At once, and exactly: nothing of it was told to anybody; but a prompt of another template stays a prompt of its
    own set's."""
    cluster = Cluster(HOLDS)
    old: WorkerSet = cluster.set(make_card("old"), OLD)
    worker: Worker = cluster.worker("first", workers=old)
    cluster.directory.apply_policy("d", AWAY)
    worker.die()
    client = cluster.ask("new", workers=old)
    cluster.wait(0.1)
    heir = cluster.worker("heir", workers=cluster.set(card, NEW))
    cluster.wait(0.3)
    assert (len(heir.requests), client.ledger.exact) == (int(goes), True)
    assert (client.flight in old.holds) is not goes


def test_a_set_that_no_rollout_spoke_of_is_one_that_crashed() -> None:
    """A worker that somebody started by hand beside a rollout has its wait, and its stand-in."""
    cluster = Cluster(HOLDS)
    cluster.directory.apply_policy("d", IN_PLACE)
    own = cluster.set(make_card("old"), "d-cccccccc")
    worker = cluster.worker("alone", workers=own)
    client = cluster.ask("s", workers=own)
    worker.say("s", [10])
    worker.die()
    cluster.wait(1)
    assert client.flight in own.holds
    heir = cluster.worker("heir", workers=cluster.set(make_card("new"), NEW))
    cluster.wait(1.5)
    assert len(heir.requests) == 1
    assert not client.ledger.exact
