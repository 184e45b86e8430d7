"""Worker sets: which one a request gets, and when one is forgotten."""

from __future__ import annotations

import random
from collections import Counter

from holdfast.spec.waits import HoldSettings, KnownSettings
from holdfast.streams.directory import SEEN_MAX, ModelDirectory, SetPolicy
from tests.rigs.worlds.streams import Cluster, make_card


def test_a_model_without_a_text_side_cannot_be_asked_for() -> None:
    """Until then it is not listed and not picked."""
    directory = ModelDirectory(random.Random(1), 10)
    workers = directory.set_for("d-00000000", make_card())
    assert directory.pick("m") is None
    assert directory.models() == {}
    workers.text = "ready"
    assert directory.pick("m") is workers
    assert list(directory.models()) == ["m"]
    assert directory.pick("n") is None


def test_sets_share_traffic_by_healthy_places() -> None:
    """Three times the routable places, three times the requests; a set without any gets none."""
    cluster = Cluster()
    blue, green, grey = (cluster.set(make_card(revision)) for revision in ("blue", "green", "grey"))
    cluster.worker("a", places=30, workers=blue)
    cluster.worker("b", places=10, workers=green)
    cluster.worker("c", places=90, workers=grey).route(routable=False)
    picked = Counter(workers.card.weights.revision for _ in range(4000) if (workers := cluster.directory.pick("m")))
    assert set(picked) == {"blue", "green"}
    assert 2.5 < picked["blue"] / picked["green"] < 3.5


def test_with_nobody_healthy_the_last_to_fall_is_waited_for() -> None:
    """Its workers are the likeliest to come back."""
    cluster = Cluster()
    blue, green = cluster.set(make_card("blue")), cluster.set(make_card("green"))
    first, last = cluster.worker("a", workers=blue), cluster.worker("b", workers=green)
    first.die()
    cluster.wait(1)
    last.die()
    assert cluster.directory.pick("m") is green


def test_namespaces_keep_equal_cards_apart() -> None:
    """Two generations of one deployment with the same card are two sets."""
    cluster = Cluster()
    assert cluster.set(namespace="d-00000000") is not cluster.set(namespace="d-00000001")
    assert cluster.set(namespace="d-00000000") is cluster.set(namespace="d-00000000")


def test_an_empty_set_is_forgotten_after_a_while() -> None:
    """Not while it has a worker, not while somebody waits in it; one that never had a worker is forgotten too."""
    cluster = Cluster(HoldSettings(hold_s=5))
    workers = cluster.set()
    worker = cluster.worker("a")
    workers.sessions = 1
    cluster.set(make_card("stillborn"))
    cluster.wait(6)
    assert list(cluster.directory.sets.values()) == [workers]
    client = cluster.ask("s1")
    worker.die()
    workers.sessions = 0
    cluster.wait(4.9)
    assert client.flight in workers.holds
    cluster.wait(0.3)
    assert client.failure is not None
    assert not cluster.directory.sets


def test_a_request_for_a_forgotten_set_is_held_where_it_is_found() -> None:
    """Its set was forgotten between choice and launch: it waits in the set that the next worker joins."""
    cluster = Cluster(HoldSettings(hold_s=5))
    forgotten = cluster.set()
    cluster.wait(6)
    assert not cluster.directory.sets
    cluster.ask("s1", workers=forgotten)
    cluster.ask("s2", workers=cluster.set())
    worker = cluster.worker("a")
    assert [request.request_id for request in worker.requests] == ["s1", "s2"]


def test_a_forgotten_set_does_not_displace_its_successor() -> None:
    """The same namespace and checksum came again meanwhile, without a worker yet: the request waits there."""
    cluster = Cluster(HoldSettings(hold_s=5))
    forgotten = cluster.set()
    cluster.wait(6)
    successor = cluster.set()
    client = cluster.ask("s1", workers=forgotten)
    assert client.flight.workers is successor
    assert client.flight in successor.holds


def test_a_model_is_known_while_it_is_desired_or_was_seen_lately() -> None:
    """A worker in discovery makes its model known; after its last session the name stays for the set time."""
    directory = ModelDirectory(random.Random(1), 10, KnownSettings(("wanted",), known_s=60))
    assert directory.knows("wanted")
    assert not directory.has_seen_any
    directory.note_seen("m", 0.0)
    workers = directory.set_for("d-00000000", make_card())
    workers.sessions = 1
    directory.forget_empty(1000.0, linger_s=5)
    workers.sessions = 0
    directory.forget_empty(1059.0, linger_s=5)
    assert directory.sets == {}
    assert directory.knows("m")
    directory.forget_empty(1061.0, linger_s=5)
    assert not directory.knows("m")
    assert directory.knows("wanted")


def test_a_model_that_a_rollout_took_away_for_good_is_known_no_more() -> None:
    """Once its last worker went and nobody waits for it: its name is neither listed nor held for, as if there had never
    been one. A name that another set has stays; so does one whose set may come back."""
    directory = ModelDirectory(random.Random(1), 10)
    old, same, new = (
        directory.set_for(f"d-0000000{n}", make_card(name=name)) for n, name in ((1, "old"), (2, "m"), (3, "m"))
    )
    for workers in (old, same, new):
        workers.sessions = 1
    both = frozenset({"d-00000001", "d-00000002", "d-00000003"})
    directory.apply_policy("d", SetPolicy(both, both))
    directory.forget_empty(100.0, linger_s=30)
    old.sessions = same.sessions = 0
    directory.forget_empty(102.0, linger_s=30)
    assert directory.knows("old"), "there is a way back to it"
    directory.apply_policy("d", SetPolicy(frozenset({"d-00000003"}), frozenset({"d-00000003"})))
    old.sessions = 1
    directory.forget_empty(104.0, linger_s=30)
    assert directory.knows("old"), "somebody drains there"
    old.sessions = 0
    directory.forget_empty(106.0, linger_s=30)
    assert not directory.knows("old")
    assert directory.knows("m")
    assert list(directory.sets.values()) == [new]


def test_names_that_were_seen_are_bounded() -> None:
    """The one heard of longest ago goes first."""
    directory = ModelDirectory(random.Random(1), 10)
    for place in range(SEEN_MAX + 1):
        directory.note_seen(f"m{place}", float(place))
    assert not directory.knows("m0")
    assert directory.knows("m1")
