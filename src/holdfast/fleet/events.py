"""The events of a fleet, made of what the store said before and what it says now. Pure.

The store has the truth, and an event is what differs between two readings of it. So no process has to publish anything,
and nothing is lost that still makes a difference: a reader that was away learns what has changed since it last read. A
reading is a set of *facts*, one for each subject (a model, a replica, a queue of requests); each event is about one
subject, so a mirror that remembers which facts it sent knows what to send next.

Always true: the same two readings make the same events in the same order; what cannot be read counts as unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct, structs

from holdfast.discovery.keys import MODELS, NODES, ORDERS, REPORTS
from holdfast.fleet.actions import LEAVING, replica_name
from holdfast.fleet.observed import ReplicaPhase
from holdfast.fleet.records import DesiredModel, NodeRecord, Orders
from holdfast.health.records import ReportRecord

OUTAGE_S = 5.0  # as long as a missing node has before it is lost (`fleet.planner`)


class EventKind(StrEnum):
    """What happened; consumers of `dispatcher:events` know the first three from elsewhere."""

    DEPLOY = "deploy"  # a model is desired, or another version or other settings of it
    EVICT = "evict"  # a replica was told to leave; without one: its model was scaled to zero or removed
    KILL_REQUEST = "kill_request"  # a request was ended by another than its client
    SCALE = "scale"  # only the number of replicas changed
    QUEUE_STATE = "queue_state"  # how many requests wait for a model
    REPLICA = "replica"  # a replica came, changed its phase or level, or left
    GAP = "gap"  # events were dropped: what follows is the current state


class FleetEvent(Struct, frozen=True, kw_only=True):
    """One event, as it is sent."""

    event_type: EventKind
    deployment: str = ""
    timestamp: float = 0.0  # when it was read, unix time
    model_key: str = ""
    replica_id: str = ""
    data: Mapping[str, Any] = {}


# -- facts


class ModelFact(Struct, frozen=True, tag="model"):
    name: str
    version: str
    wanted: int
    floor: str
    replicas_max: int
    generation: int
    at_unix_s: float


class LeavingFact(Struct, frozen=True, tag="leaving"):
    model: str
    replica: str
    node: str
    turn: int
    why: str


class ReplicaFact(Struct, frozen=True, tag="replica"):
    model: str
    replica: str
    node: str
    level: str
    phase: str
    version: str


class QueueFact(Struct, frozen=True, tag="queue"):
    model: str
    waiting: int
    since_unix_s: float


class KillFact(Struct, frozen=True, tag="kill"):
    model: str
    request: str
    by: str


Fact: TypeAlias = ModelFact | LeavingFact | ReplicaFact | QueueFact | KillFact
Facts: TypeAlias = Mapping[str, Fact]  # by subject
_ORDER: tuple[type[Fact], ...] = (
    ModelFact,
    LeavingFact,
    ReplicaFact,
    QueueFact,
    KillFact,
)  # in which changes of one moment are sent
_LEASED = (ReplicaFact, QueueFact, KillFact)  # of records that vanish with the store, and come again
_LEAVES = (ReplicaPhase.DRAINING, ReplicaPhase.DEMOTING)
_KINDS: dict[str, type[DesiredModel | NodeRecord | Orders | ReportRecord]] = {
    MODELS: DesiredModel,
    ORDERS: Orders,
    NODES: NodeRecord,
    REPORTS: ReportRecord,
}


class FactReader:
    """Reads one fleet's records as facts; records that did not change are not decoded again."""

    def __init__(self, deployment: str) -> None:
        self._own = {f"{prefix}{deployment}/": kind for prefix, kind in _KINDS.items()}
        self._read: dict[str, tuple[bytes, DesiredModel | NodeRecord | Orders | ReportRecord | None]] = {}

    @property
    def prefixes(self) -> tuple[str, ...]:
        return tuple(self._own)

    def read(self, values: Mapping[str, bytes]) -> dict[str, Fact]:
        found = {}
        for prefix, kind in self._own.items():
            for key in [key for key in values if key.startswith(prefix)]:
                found[key] = self._read_one(kind, key, values[key])
        self._read = found
        records = [record for _, record in found.values()]
        return {
            **_model_facts(records),
            **_replica_facts(records),
            **_leaving_facts(records),
            **_queue_facts(records),
            **_kill_facts(records),
        }

    def _read_one(
        self, kind: type[DesiredModel | NodeRecord | Orders | ReportRecord], key: str, value: bytes
    ) -> tuple[bytes, DesiredModel | NodeRecord | Orders | ReportRecord | None]:
        before = self._read.get(key, (b"", None))
        if before[0] == value:
            return before
        try:
            return value, msgspec.json.decode(value, type=kind)
        except (ValueError, RecursionError):
            return value, before[1]


def _model_facts(records: Iterable[object]) -> dict[str, Fact]:
    desired_models = {one.model.key: one for one in records if isinstance(one, DesiredModel)}
    return {
        f"model/{key}": ModelFact(
            desired.name,
            desired.model.version,
            desired.model.hot,
            desired.model.floor.word,
            desired.model.replicas_max,
            desired.model.generation,
            desired.at_unix_s,
        )
        for key, desired in desired_models.items()
    }


def _replica_facts(records: Iterable[object]) -> dict[str, Fact]:
    replicas = [one for record in records if isinstance(record, NodeRecord) for one in record.replicas]
    return {
        f"replica/{one.name}": ReplicaFact(one.model, one.id, one.node, one.level.word, one.phase.value, one.version)
        for one in replicas
    }


def _leaving_facts(records: list[Any]) -> dict[str, Fact]:
    """Return the replicas that leave: from the order on until each is at its new level, or gone."""
    found = dict[str, Fact]()
    for replica in [one for record in records if isinstance(record, NodeRecord) for one in record.replicas]:
        if replica.phase in _LEAVES:
            name, known = f"leaving/{replica.name}", (replica.model, replica.id, replica.node, replica.turn)
            found[name] = LeavingFact(*known, why="")
    for action in [one for record in records if isinstance(record, Orders) for one in record.actions]:
        if action.verb in LEAVING:
            name = f"leaving/{replica_name(action.model, action.serial)}"
            found[name] = LeavingFact(action.model, f"r{action.serial}", action.node, action.turn, action.why)
    return found


def _queue_facts(records: list[Any]) -> dict[str, Fact]:
    """Return the queues of all frontends together. A name that no model of the fleet has is its own key."""
    keys = {one.name: one.model.key for one in records if isinstance(one, DesiredModel)}
    found = dict[str, Fact]()
    for report in [one for one in records if isinstance(one, ReportRecord)]:
        for name, demand in report.demand.items():
            key = keys.get(name, name)
            before = found.get(f"queue/{key}")
            more = (before.waiting, before.since_unix_s) if isinstance(before, QueueFact) else (0, demand.since_unix_s)
            since_s = min(more[1], demand.since_unix_s)
            found[f"queue/{key}"] = QueueFact(key, more[0] + demand.waiting, since_s)
    return found


def _kill_facts(records: list[Any]) -> dict[str, Fact]:
    """Return the killed requests; frontends report each for a minute."""
    keys = {one.name: one.model.key for one in records if isinstance(one, DesiredModel)}
    reports = [one for one in records if isinstance(one, ReportRecord)]
    return {
        f"kill/{one.id}": KillFact(keys.get(one.model, one.model), one.id, one.by)
        for report in reports
        for one in report.killed
    }


class StoreOutages:
    """After an outage of the store its leased records come again within seconds: what is missing is not gone yet."""

    def __init__(self) -> None:
        self._seen, self._until_s = 0, 0.0

    def left_s(self, outages: int, now_s: float) -> float:
        """Return for how long missing records do not count; `outages`: how often the store was away."""
        if outages != self._seen:
            self._seen, self._until_s = outages, now_s + OUTAGE_S
        return max(0.0, self._until_s - now_s)


def keep_leased(before: Facts, now: Facts) -> dict[str, Fact]:
    """Return the facts of now, with those of before whose records vanish with the store: they come again."""
    return {**{subject: fact for subject, fact in before.items() if isinstance(fact, _LEASED)}, **now}


# -- from one reading to the next


class FactChange(Struct, frozen=True):
    """A subject that changed, and its event, if it is one."""

    subject: str
    before: Fact | None
    now: Fact | None
    event: FleetEvent | None

    def id(self, number: int) -> str:
        """Return the id of its event, which has that number. It is the same if the event is sent again, and another if
        something else has the number then."""
        text = msgspec.json.encode((self.subject, self.before, self.now))
        return f"{number}-{hashlib.sha256(text).hexdigest()[:8]}"


def changes(before: Facts, now: Facts, deployment: str = "", at_unix_s: float = 0.0) -> list[FactChange]:
    """Return the changes from one reading to the next; from none to the first, everything there is."""
    moved = [subject for subject in {**before, **now} if before.get(subject) != now.get(subject)]
    found = []
    for subject in sorted(moved, key=lambda one: (_ORDER.index(type(now.get(one) or before[one])), one)):
        old, new = before.get(subject), now.get(subject)
        event = _event(old, new, subject)
        if event is not None:
            event = structs.replace(event, deployment=deployment, timestamp=at_unix_s)
        found.append(FactChange(subject, old, new, event))
    return found


def gap(dropped: int, deployment: str, at_unix_s: float) -> FactChange:
    """Return the event that says how many events were dropped."""
    event = FleetEvent(event_type=EventKind.GAP, deployment=deployment, timestamp=at_unix_s, data={"dropped": dropped})
    return FactChange("gap", None, None, event)


def _event(before: Fact | None, now: Fact | None, subject: str) -> FleetEvent | None:
    match now or before:
        case ModelFact():
            return _model_event(before, now, subject.removeprefix("model/"))
        case LeavingFact(model, replica, node, turn, why):
            if now is None or (isinstance(before, LeavingFact) and before.turn == turn):
                return None
            data: dict[str, Any] = {"node": node, "why": why}
            return FleetEvent(event_type=EventKind.EVICT, model_key=model, replica_id=replica, data=data)
        case ReplicaFact(model, replica, node, level, phase, version):
            data = {
                "node": node,
                "level": level,
                "phase": phase if now else ReplicaPhase.GONE.value,
                "version": version,
            }
            return FleetEvent(event_type=EventKind.REPLICA, model_key=model, replica_id=replica, data=data)
        case QueueFact(model, waiting, since_s):
            data = {"waiting": waiting, "since_unix_s": since_s} if now else {"waiting": 0}
            return FleetEvent(event_type=EventKind.QUEUE_STATE, model_key=model, data=data)
        case KillFact(model, request, by):
            data = {"request": request, "by": by}
            return FleetEvent(event_type=EventKind.KILL_REQUEST, model_key=model, data=data) if now else None
    raise AssertionError(subject)


def _model_event(before: Fact | None, now: Fact | None, key: str) -> FleetEvent:
    if not isinstance(now, ModelFact):
        return FleetEvent(event_type=EventKind.EVICT, model_key=key, data={"forgotten": True})
    data = {
        "name": now.name,
        "version": now.version,
        "wanted": now.wanted,
        "replicas_max": now.replicas_max,
        "generation": now.generation,
    }
    if not isinstance(before, ModelFact):
        return FleetEvent(event_type=EventKind.DEPLOY, model_key=key, data=data)
    kind = EventKind.DEPLOY
    numbered = structs.replace(before, wanted=now.wanted, generation=now.generation)
    if numbered == now:
        kind = EventKind.SCALE
    elif structs.replace(numbered, floor=now.floor) == now and not now.wanted:
        kind = EventKind.EVICT
    return FleetEvent(event_type=kind, model_key=key, data={**data, "before": before.wanted})
