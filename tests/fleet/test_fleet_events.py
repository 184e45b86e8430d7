"""Events are what differs between two readings of the store: which, in which order, and that none is lost."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
from msgspec import structs

from holdfast.discovery.keys import REPORTS
from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.events import (
    OUTAGE_S,
    EventKind,
    Fact,
    FactChange,
    FactReader,
    FleetEvent,
    StoreOutages,
    changes,
    keep_leased,
)
from holdfast.fleet.observed import Node, Replica, ReplicaPhase
from holdfast.fleet.records import DesiredModel, NodeRecord, Orders, desired_key, node_key, orders_key
from holdfast.health.records import Demand, KilledRequest, ReportRecord

MODEL = Model(key="chat", version="v1", wanted=1, replicas_max=4, device_bytes=1, generation=1)
DESIRED = DesiredModel(name="Chat", model=MODEL, manifest="", at_unix_s=100.0)


def values(*records: object) -> dict[str, bytes]:
    found = dict[str, bytes]()
    for record in records:
        match record:
            case DesiredModel():
                key = desired_key("d", record.model.key)
            case NodeRecord():
                key = node_key("d", record.node.name)
            case Orders():
                key = orders_key("d", "n")
            case ReportRecord():
                key = f"{REPORTS}d/{record.name}"
            case _:
                raise AssertionError(record)
        found[key] = msgspec.json.encode(record)
    return found


def facts(*records: object) -> dict[str, Fact]:
    return FactReader("d").read(values(*records))


def events(before: dict[str, Fact], now: dict[str, Fact]) -> list[FleetEvent]:
    return [one.event for one in changes(before, now) if one.event is not None]


def node(*replicas: Replica) -> NodeRecord:
    return NodeRecord(node=Node(name="n"), replicas=replicas)


def replica(serial: int = 1, phase: ReplicaPhase = ReplicaPhase.READY, **said: object) -> Replica:
    return Replica(model="chat", version="v1", serial=serial, node="n", phase=phase, **said)


def changed(**said: object) -> DesiredModel:
    return structs.replace(DESIRED, model=structs.replace(MODEL, **{"generation": 2, **said}))


def test_a_request_that_was_ended_is_told_once() -> None:
    """By the key of its model; that its frontend tells of it no longer is no event."""
    killed = KilledRequest(id="chatcmpl-1", model="Chat", by="operator", at_unix_s=50.0)
    quiet = facts(DESIRED, ReportRecord(name="f", at_unix_s=50.0))
    told = facts(DESIRED, ReportRecord(name="f", at_unix_s=51.0, killed=(killed,)))
    (event,) = events(quiet, told)
    assert (event.event_type, event.model_key) == (EventKind.KILL_REQUEST, "chat")
    assert event.data == {"request": "chatcmpl-1", "by": "operator"}
    assert events(told, quiet) == []


def test_each_change_of_a_desired_model_has_its_kind() -> None:
    """New, or anything but its number: deploy. Another number: scale. None kept, or forgotten: evict."""
    hot = changed(floor=Level.HOT, replicas_min=1)
    table = [
        (None, DESIRED, EventKind.DEPLOY, {"wanted": 1}),
        (DESIRED, changed(wanted=3), EventKind.SCALE, {"wanted": 3, "before": 1}),
        (DESIRED, changed(wanted=0), EventKind.SCALE, {"wanted": 0, "before": 1}),
        (hot, changed(wanted=0, replicas_min=1), EventKind.EVICT, {"wanted": 0}),
        (DESIRED, changed(version="v2"), EventKind.DEPLOY, {"version": "v2"}),
        (DESIRED, changed(wanted=2, replicas_max=9), EventKind.DEPLOY, {"wanted": 2}),
        (DESIRED, structs.replace(changed(), at_unix_s=200.0), EventKind.DEPLOY, {"generation": 2}),
        (DESIRED, None, EventKind.EVICT, {"forgotten": True}),
    ]
    for before, now, kind, data in table:
        told = events(facts(*filter(None, [before])), facts(*filter(None, [now])))
        assert [(one.event_type, one.model_key, one.replica_id) for one in told] == [(kind, "chat", "")], (before, now)
        assert data.items() <= dict(told[0].data).items()


def test_a_replica_that_is_told_to_leave_is_an_eviction_once() -> None:
    """With who and why; not again while it drains and is then stopped, nor when it is gone."""
    drain = Action(verb=Verb.DRAIN, model="chat", serial=1, node="n", why="1 wanted")
    stop = Action(verb=Verb.STOP, model="chat", serial=1, node="n")
    readings = [
        facts(node(replica())),
        facts(node(replica()), Orders(actions=(drain,))),
        facts(node(replica(phase=ReplicaPhase.DRAINING)), Orders(actions=(drain,))),
        facts(node(replica(phase=ReplicaPhase.DRAINING))),
        facts(node(replica(phase=ReplicaPhase.DRAINING)), Orders(actions=(stop,))),
        facts(node()),
    ]
    told = [event for before, now in pairwise(readings) for event in events(before, now)]
    evicted = [one for one in told if one.event_type is EventKind.EVICT]
    assert [(one.model_key, one.replica_id, one.data) for one in evicted] == [
        ("chat", "r1", {"node": "n", "why": "1 wanted"})
    ]
    phases = [one.data["phase"] for one in told if one.event_type is EventKind.REPLICA]
    assert phases == ["draining", "gone"]


def test_who_waits_is_told_by_model_over_all_frontends() -> None:
    """By the model's key, though clients ask by its name; and when nobody waits any more."""
    first = ReportRecord(name="f1", at_unix_s=1.0, demand={"Chat": Demand(waiting=2, since_unix_s=7.0)})
    second = ReportRecord(name="f2", at_unix_s=1.0, demand={"Chat": Demand(waiting=1, since_unix_s=5.0)})
    both = facts(DESIRED, first, second)
    assert [(one.model_key, one.data) for one in events(facts(DESIRED), both)] == [
        ("chat", {"waiting": 3, "since_unix_s": 5.0})
    ]
    assert [one.data for one in events(both, facts(DESIRED))] == [{"waiting": 0}]


def test_lost_events_who_was_away_hears_what_still_makes_a_difference() -> None:
    """However many readings in between are skipped: what was told adds up to what is."""
    rng = random.Random(5)
    told: dict[str, Fact] = {}
    now: dict[str, Fact] = {}
    for step in range(300):
        desired_models = [changed(wanted=rng.randrange(4), generation=step + 2)] if rng.random() < 0.8 else []
        there = [replica(serial, rng.choice(list(ReplicaPhase))) for serial in range(rng.randrange(4))]
        now = facts(*desired_models, node(*there))
        if rng.random() < 0.3:
            for change in changes(told, now):
                told = {**told, change.subject: change.now} if change.now is not None else _without(told, change)
            assert told == now
    assert not changes(told, told)


def _without(told: dict[str, Fact], change: FactChange) -> dict[str, Fact]:
    return {subject: fact for subject, fact in told.items() if subject != change.subject}


def test_what_cannot_be_read_is_unchanged() -> None:
    """A desired model that somebody spoiled is no eviction; one that never could be read is nothing."""
    reader = FactReader("d")
    before = reader.read(values(DESIRED))
    assert reader.read({desired_key("d", "chat"): b"{", desired_key("d", "other"): b"?"}) == before
    assert not FactReader("d").read(values(DESIRED) | {desired_key("dd", "x"): b""}).keys() - before.keys()


def test_nobody_is_missed_right_after_an_outage() -> None:
    """A store that comes back has lost its leased records for a moment: replicas are not told to be gone before their
    nodes had the time to come again; a desired model that is gone is."""
    outages = StoreOutages()
    assert not outages.left_s(0, 10.0)
    assert outages.left_s(1, 11.0) == OUTAGE_S
    before, now = facts(DESIRED, node(replica())), facts()
    assert [one.event_type for one in events(before, keep_leased(before, now))] == [EventKind.EVICT]
    assert not outages.left_s(1, 11.0 + OUTAGE_S)
    assert [one.event_type for one in events(before, now)] == [EventKind.EVICT, EventKind.REPLICA]


def test_the_same_change_has_the_same_id() -> None:
    """So that who hears it twice can drop it; another change under the same number has another."""
    (one,), (again,) = changes({}, facts(DESIRED), "d", 1.0), changes({}, facts(DESIRED), "d", 2.0)
    (other,) = changes({}, facts(changed()), "d", 1.0)
    assert one.id(7) == again.id(7)
    assert len({one.id(7), one.id(8), other.id(7)}) == 3
