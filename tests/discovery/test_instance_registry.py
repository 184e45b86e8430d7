"""From what the store says to instances that appear, are withdrawn, or must be told why they get no work."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.discovery.keys import CARDS, INSTANCES, STANDBYS, InstanceKey, InstanceRecord
from holdfast.discovery.registry import Appeared, Instance, NotAdmitted, Registry, Withdrawn

KEY = InstanceKey("d-00000000", "worker", "generate", 0x1F)
CARD = ModelCard("m", WeightsIdentity("r1"), "tt", "hi", 4096, 16, [0])
RECORD = InstanceRecord("unix:///data", "unix:///beat", CARD.checksum(), 7)
INSTANCE = Instance(KEY, RECORD, CARD)


def at(key: InstanceKey = KEY, record: InstanceRecord = RECORD, card: ModelCard = CARD) -> dict[str, bytes]:
    return {INSTANCES + key.path: msgspec.json.encode(record), CARDS + key.path: msgspec.json.encode(card)}


def other_card(**change: Any) -> ModelCard:
    return msgspec.structs.replace(CARD, **change)


def put_all(registry: Registry, items: dict[str, bytes]) -> list[object]:
    return [change for key, value in items.items() for change in registry.put(key, value)]


def test_an_instance_is_known_once_record_and_card_are_there() -> None:
    """In either order, and once."""
    for items in (at(), dict(reversed(at().items()))):
        registry = Registry("d")
        (first, one), (second, two) = items.items()
        assert registry.put(first, one) == []
        assert registry.put(second, two) == [Appeared(INSTANCE)]
        assert registry.put(second, two) == []
        assert registry.instances == {KEY: INSTANCE}


def test_a_key_gone_and_back_is_reported_so() -> None:
    """The registry says what the store says; what that means for a live worker is not its business."""
    registry = Registry("d")
    put_all(registry, at())
    assert registry.deleted(INSTANCES + KEY.path) == [Withdrawn(INSTANCE)]
    assert registry.deleted(INSTANCES + KEY.path) == []
    assert registry.put(INSTANCES + KEY.path, msgspec.json.encode(RECORD)) == [Appeared(INSTANCE)]


def test_a_snapshot_is_the_whole_truth_under_its_prefix() -> None:
    """What is missing in it is gone; what is the same is not told again; the other prefix is not touched."""
    registry = Registry("d")
    second = InstanceKey(KEY.namespace, "worker", "generate", 2)
    records = {key: value for key, value in (at() | at(second)).items() if key.startswith(INSTANCES)}
    cards = {key: value for key, value in (at() | at(second)).items() if key.startswith(CARDS)}
    assert registry.snapshot(CARDS, cards) == []
    assert len(registry.snapshot(INSTANCES, records)) == 2
    assert registry.snapshot(INSTANCES, records) == []
    assert registry.snapshot(CARDS, cards) == []
    only_first = {INSTANCES + KEY.path: records[INSTANCES + KEY.path]}
    assert registry.snapshot(INSTANCES, only_first) == [Withdrawn(Instance(second, RECORD, CARD))]
    assert registry.snapshot(INSTANCES, {}) == [Withdrawn(INSTANCE)]
    assert registry.snapshot(INSTANCES, records) != []


def test_a_changed_address_is_another_instance_under_the_old_key() -> None:
    """The old one is withdrawn before the new one appears."""
    registry = Registry("d")
    put_all(registry, at())
    moved = msgspec.structs.replace(RECORD, address="unix:///elsewhere")
    assert registry.put(INSTANCES + KEY.path, msgspec.json.encode(moved)) == [
        Withdrawn(INSTANCE),
        Appeared(Instance(KEY, moved, CARD)),
    ]


def test_a_card_that_cannot_be_admitted_is_told_once() -> None:
    """The same refusal is not repeated; another reason, or a new appearance, is."""
    registry = Registry("d")
    bad = other_card(context_tokens_max=1)
    record = msgspec.structs.replace(RECORD, checksum=bad.checksum())
    [told] = put_all(registry, at(record=record, card=bad))
    assert isinstance(told, NotAdmitted)
    assert "context_tokens_max" in told.reason
    assert told.record == record
    assert registry.instances == {}
    assert registry.put(INSTANCES + KEY.path, msgspec.json.encode(msgspec.structs.replace(record, pid=8))) == []
    registry.deleted(INSTANCES + KEY.path)
    [again] = registry.put(INSTANCES + KEY.path, msgspec.json.encode(record))
    assert isinstance(again, NotAdmitted)


def test_a_record_and_a_card_that_do_not_match_are_refused() -> None:
    """A card with another checksum than its record's is never served."""
    registry = Registry("d")
    card = other_card(block_size=32)
    [told] = put_all(registry, at(card=card))
    assert isinstance(told, NotAdmitted)
    assert card.checksum() in told.reason
    assert RECORD.checksum in told.reason


def test_a_known_instance_whose_card_goes_bad_is_withdrawn_too() -> None:
    """Its receiver must not go on reconnecting to what the store no longer describes."""
    registry = Registry("d")
    put_all(registry, at())
    changes = registry.put(CARDS + KEY.path, b"{}")
    assert changes[0] == Withdrawn(INSTANCE)
    assert isinstance(changes[1], NotAdmitted)
    assert registry.instances == {}
    assert registry.put(CARDS + KEY.path, msgspec.json.encode(CARD)) == [Appeared(INSTANCE)]


def test_bytes_that_are_no_record_are_refused_by_name() -> None:
    """Nothing a store may hold raises; without a record there is nobody to tell."""
    for value in (b"", b"\xff\xfe", b"[]", b"{}", b'{"address": 1}', b"null"):
        registry = Registry("d")
        registry.put(CARDS + KEY.path, msgspec.json.encode(CARD))
        [told] = registry.put(INSTANCES + KEY.path, value)
        assert isinstance(told, NotAdmitted)
        assert told.record is None


def test_other_deployments_are_not_even_kept() -> None:
    """A shared store may hold thousands of others' cards: they cost this frontend nothing."""
    registry = Registry("d")
    for namespace in ("d-x-00000000", "e-00000000", "d", "dd-00000000"):
        foreign = InstanceKey(namespace, "worker", "generate", 1)
        assert put_all(registry, at(foreign)) == []
        assert registry.deleted(INSTANCES + foreign.path) == []
    assert registry.put("v1/other/things", b"x") == []
    assert registry._values == {}


NAMESPACES = st.sampled_from(["d-00000000", "d-00000001", "d-x-00000000"])
KEYS = st.builds(InstanceKey, NAMESPACES, st.just("worker"), st.just("generate"), st.integers(0, 2))
VALUES = st.sampled_from(
    [
        msgspec.json.encode(RECORD),
        msgspec.json.encode(msgspec.structs.replace(RECORD, address="unix:///elsewhere")),
        msgspec.json.encode(CARD),
        msgspec.json.encode(other_card(block_size=32)),
        b"junk",
    ]
)
EVENTS = st.lists(st.tuples(st.sampled_from([INSTANCES, STANDBYS, CARDS]), KEYS, st.none() | VALUES), max_size=40)


@settings(deadline=None)
@given(EVENTS)
def test_what_is_told_adds_up_to_what_is_known(events: list[tuple[str, InstanceKey, bytes | None]]) -> None:
    """Replaying Appeared and Withdrawn gives exactly the known instances, at every step, and a snapshot of the
    same store changes nothing."""
    registry = Registry("d")
    store: dict[str, bytes] = {}
    alive: dict[InstanceKey, Instance] = {}
    for prefix, where, value in events:
        key = prefix + where.path
        changes = registry.deleted(key) if value is None else registry.put(key, value)
        store.pop(key, None)
        if value is not None:
            store[key] = value
        for change in changes:
            if isinstance(change, Withdrawn):
                assert alive.pop(change.instance.key) == change.instance
            elif isinstance(change, Appeared):
                assert change.instance.key not in alive
                alive[change.instance.key] = change.instance
        assert alive == registry.instances
    for prefix in (INSTANCES, STANDBYS, CARDS):
        under = {key: value for key, value in store.items() if key.startswith(prefix)}
        assert registry.snapshot(prefix, under) == []


STANDBY = {STANDBYS + KEY.path: msgspec.json.encode(RECORD)}
SERVING = {INSTANCES + KEY.path: msgspec.json.encode(RECORD)}


def test_a_standby_is_known_like_any_other() -> None:
    """By its own key, the same record and the same card; gone with its card."""
    registry = Registry("d")
    assert put_all(registry, STANDBY) == []
    assert registry.put(CARDS + KEY.path, msgspec.json.encode(CARD)) == [Appeared(INSTANCE)]
    assert registry.instances == {KEY: INSTANCE}
    assert registry.deleted(STANDBYS + KEY.path) + registry.deleted(CARDS + KEY.path) == [Withdrawn(INSTANCE)]
    assert registry._values == {} == registry._moving


@pytest.mark.parametrize("put_first", [True, False])
def test_a_standby_that_becomes_an_instance_has_not_changed(put_first: bool) -> None:
    """The two keys are watched apart, so the old one may be seen to go before the new one comes: nothing is told."""
    registry = Registry("d")
    put_all(registry, STANDBY | {CARDS + KEY.path: msgspec.json.encode(CARD)})
    moves = [lambda: put_all(registry, SERVING), lambda: registry.deleted(STANDBYS + KEY.path)]
    for move in moves if put_first else reversed(moves):
        assert move() == []
    assert registry.instances == {KEY: INSTANCE}
    assert registry.deleted(INSTANCES + KEY.path) == [Withdrawn(INSTANCE)]
    assert registry._moving == {}


def test_a_standby_whose_keys_all_went_in_a_stores_absence_is_gone() -> None:
    """Snapshots come per prefix, in any order: once all are in, it is withdrawn, once."""
    for order in itertools.permutations((CARDS, INSTANCES, STANDBYS)):
        registry = Registry("d")
        put_all(registry, STANDBY | {CARDS + KEY.path: msgspec.json.encode(CARD)})
        changes = [change for prefix in order for change in registry.snapshot(prefix, {})]
        assert changes == [Withdrawn(INSTANCE)]
        assert registry._moving == {}


def test_an_instance_that_stood_by_at_another_address_is_a_new_one() -> None:
    """The record among the instances counts."""
    registry = Registry("d")
    put_all(registry, STANDBY | {CARDS + KEY.path: msgspec.json.encode(CARD)})
    moved = msgspec.structs.replace(RECORD, address="unix:///elsewhere")
    assert registry.put(INSTANCES + KEY.path, msgspec.json.encode(moved)) == [
        Withdrawn(INSTANCE),
        Appeared(Instance(KEY, moved, CARD)),
    ]
    assert registry.deleted(STANDBYS + KEY.path) == []
