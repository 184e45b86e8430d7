"""Decision: a stream is replayed only where the card's checksum is the same. Other weights would go on with another
story; if they must, because its own are gone for good, the answer says so."""

from __future__ import annotations

from holdfast.spec.waits import HoldSettings
from tests.rigs.worlds.streams import Cluster, make_card


def test_replay_needs_same_checksum() -> None:
    """With a healthy worker of other weights beside it, a stream whose set is gone waits; with one of its own, it goes
    on there."""
    cluster = Cluster()
    blue, green = cluster.set(make_card("blue")), cluster.set(make_card("green"))
    first = cluster.worker("first", workers=blue)
    wrong = cluster.worker("wrong", workers=green)
    client = cluster.ask("s1", workers=blue)
    first.say("s1", [10])
    first.die()
    cluster.wait(5)
    assert client.flight in blue.holds
    assert not wrong.requests
    right = cluster.worker("right", workers=blue)
    assert [request.tokens for request in right.requests] == [[1, 2, 3, 10]]
    assert client.ledger.exact


def test_other_weights_are_flagged_and_another_tokenizer_is_never_used() -> None:
    """A set with the same tokenizer takes over after a while, inexact; one with another tokenizer never does."""
    cluster = Cluster(HoldSettings(hold_s=30, stand_in_after_s=2))
    old, new = cluster.set(make_card("old")), cluster.set(make_card("new"))
    foreign = cluster.set(make_card("old", tokenizer_sha256="t2"))
    renamed = cluster.set(make_card("old", name="n"))
    dying = cluster.worker("dying", workers=old)
    client = cluster.ask("s1", workers=old)
    dying.say("s1", [10])
    others = [cluster.worker("foreign", workers=foreign), cluster.worker("renamed", workers=renamed)]
    dying.die()
    cluster.wait(10)
    assert client.flight in old.holds
    stand_in = cluster.worker("stand-in", workers=new)
    cluster.wait(0.2)
    assert [request.tokens for request in stand_in.requests] == [[1, 2, 3, 10]]
    assert not client.ledger.exact
    assert not any(worker.requests for worker in others)
