"""What happens in a fleet, as events: made of what the store said before and what it says now. Pure.

Theory. The store has the truth, and an event is what differs between two readings of it. So nobody has to publish
anything, and nothing is lost that still makes a difference: who was away for a while hears what is other than it was
when it last heard. What a reading says is a set of *facts*, one for each subject (a model, a replica, a line of
requests); each event is about one subject, so whoever remembers which facts were told knows what to tell next.

Always true: the same two readings make the same events in the same order; what cannot be read is taken for unchanged.
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
from holdfast.fleet.observed import Phase
from holdfast.fleet.records import NodeRecord, Orders, Wish
from holdfast.health.records import ReportRecord

OUTAGE_S = 5.0  # as long as a node that is missing has before it is lost (`fleet.controller`)


class Kind(StrEnum):
    """What happened; the first three as consumers of `dispatcher:events` call them elsewhere, too."""

    DEPLOY = "deploy"  # a model is wanted, or another of it than before
    EVICT = "evict"  # a replica was told to leave; without one: none of its model is kept any more
    KILL_REQUEST = "kill_request"  # a request was ended by somebody else than its client
    SCALE = "scale"  # another number is wanted, and nothing else
    QUEUE_STATE = "queue_state"  # so many requests wait for a model
    REPLICA = "replica"  # one came, moved on or went
    GAP = "gap"  # more happened than could be kept: what follows is how things are now


class Event(Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    event_type: Kind
    deployment: str = ""
    timestamp: float = 0.0  # when it was read, unix time
    model_key: str = ""
    replica_id: str = ""
    data: Mapping[str, Any] = {}


# -- facts


class Wanted(Struct, frozen=True, tag="model"):
    name: str
    version: str
    wanted: int
    floor: str
    replicas_max: int
    generation: int
    at_unix_s: float


class Leaving(Struct, frozen=True, tag="leaving"):
    model: str
    replica: str
    node: str
    turn: int
    why: str


class There(Struct, frozen=True, tag="replica"):
    model: str
    replica: str
    node: str
    level: str
    phase: str
    version: str


class Line(Struct, frozen=True, tag="queue"):
    model: str
    waiting: int
    since_unix_s: float


class Killed(Struct, frozen=True, tag="kill"):
    model: str
    request: str
    by: str


Fact: TypeAlias = Wanted | Leaving | There | Line | Killed
Facts: TypeAlias = Mapping[str, Fact]  # by subject
_ORDER: tuple[type[Fact], ...] = (Wanted, Leaving, There, Line, Killed)  # in which changes of one moment are told
_LEASED = (There, Line, Killed)  # of records that go with the store's outage, and come again
_LEAVES = (Phase.DRAINING, Phase.DEMOTING)
_KINDS: dict[str, type[Wish | NodeRecord | Orders | ReportRecord]] = {
    MODELS: Wish,
    ORDERS: Orders,
    NODES: NodeRecord,
    REPORTS: ReportRecord,
}


class Reader:
    """What the store says of one fleet, as facts; what did not change is not read again."""

    def __init__(self, deployment: str) -> None:
        self._own = {f"{prefix}{deployment}/": kind for prefix, kind in _KINDS.items()}
        self._read: dict[str, tuple[bytes, Wish | NodeRecord | Orders | ReportRecord | None]] = {}

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
        return {**_wanted(records), **_there(records), **_leaving(records), **_lines(records), **_killed(records)}

    def _read_one(
        self, kind: type[Wish | NodeRecord | Orders | ReportRecord], key: str, value: bytes
    ) -> tuple[bytes, Wish | NodeRecord | Orders | ReportRecord | None]:
        before = self._read.get(key, (b"", None))
        if before[0] == value:
            return before
        try:
            return value, msgspec.json.decode(value, type=kind)
        except (ValueError, RecursionError):
            return value, before[1]


def _wanted(records: Iterable[object]) -> dict[str, Fact]:
    wishes = {one.model.key: one for one in records if isinstance(one, Wish)}
    return {
        f"model/{key}": Wanted(
            wish.name,
            wish.model.version,
            wish.model.hot,
            wish.model.floor.word,
            wish.model.replicas_max,
            wish.model.generation,
            wish.at_unix_s,
        )
        for key, wish in wishes.items()
    }


def _there(records: Iterable[object]) -> dict[str, Fact]:
    replicas = [one for record in records if isinstance(record, NodeRecord) for one in record.replicas]
    return {
        f"replica/{one.name}": There(one.model, one.id, one.node, one.level.word, one.phase.value, one.version)
        for one in replicas
    }


def _leaving(records: list[Any]) -> dict[str, Fact]:
    """From the order on until it is at its new level, or gone."""
    found = dict[str, Fact]()
    for replica in [one for record in records if isinstance(record, NodeRecord) for one in record.replicas]:
        if replica.phase in _LEAVES:
            name, known = f"leaving/{replica.name}", (replica.model, replica.id, replica.node, replica.turn)
            found[name] = Leaving(*known, why="")
    for action in [one for record in records if isinstance(record, Orders) for one in record.actions]:
        if action.verb in LEAVING:
            name = f"leaving/{replica_name(action.model, action.serial)}"
            found[name] = Leaving(action.model, f"r{action.serial}", action.node, action.turn, action.why)
    return found


def _lines(records: list[Any]) -> dict[str, Fact]:
    """Of all frontends together. Clients ask by a name, and one that no model of the fleet has is its own key."""
    keys = {one.name: one.model.key for one in records if isinstance(one, Wish)}
    found = dict[str, Fact]()
    for report in [one for one in records if isinstance(one, ReportRecord)]:
        for name, demand in report.demand.items():
            key = keys.get(name, name)
            before = found.get(f"queue/{key}")
            more = (before.waiting, before.since_unix_s) if isinstance(before, Line) else (0, demand.since_unix_s)
            since_s = min(more[1], demand.since_unix_s)
            found[f"queue/{key}"] = Line(key, more[0] + demand.waiting, since_s)
    return found


def _killed(records: list[Any]) -> dict[str, Fact]:
    """Frontends tell of each for a minute."""
    keys = {one.name: one.model.key for one in records if isinstance(one, Wish)}
    reports = [one for one in records if isinstance(one, ReportRecord)]
    return {
        f"kill/{one.id}": Killed(keys.get(one.model, one.model), one.id, one.by)
        for report in reports
        for one in report.killed
    }


class Outages:
    """After the store was away its leased records come again within some seconds: who is missing is not gone yet."""

    def __init__(self) -> None:
        self._seen, self._until_s = 0, 0.0

    def left_s(self, outages: int, now_s: float) -> float:
        """How long nobody is missed, of a store that was away so often."""
        if outages != self._seen:
            self._seen, self._until_s = outages, now_s + OUTAGE_S
        return max(0.0, self._until_s - now_s)


def outlasting(before: Facts, now: Facts) -> dict[str, Fact]:
    """What is so now, and what was so before of those whose records go with the store's outage: they come again."""
    return {**{subject: fact for subject, fact in before.items() if isinstance(fact, _LEASED)}, **now}


# -- from one reading to the next


class Change(Struct, frozen=True):
    """One subject is other than it was; whether that is an event."""

    subject: str
    before: Fact | None
    now: Fact | None
    event: Event | None

    def id(self, number: int) -> str:
        """Of its event, which is the one with that number. It is the same if whoever was told has lost it and is told
        again, and another if something else has the number then."""
        said = msgspec.json.encode((self.subject, self.before, self.now))
        return f"{number}-{hashlib.sha256(said).hexdigest()[:8]}"


def changes(before: Facts, now: Facts, deployment: str = "", at_unix_s: float = 0.0) -> list[Change]:
    """From one reading to the next, which is of this moment. Who knows of nothing yet hears of all that there is."""
    moved = [subject for subject in {**before, **now} if before.get(subject) != now.get(subject)]
    found = []
    for subject in sorted(moved, key=lambda one: (_ORDER.index(type(now.get(one) or before[one])), one)):
        old, new = before.get(subject), now.get(subject)
        event = _event(old, new, subject)
        if event is not None:
            event = structs.replace(event, deployment=deployment, timestamp=at_unix_s)
        found.append(Change(subject, old, new, event))
    return found


def gap(dropped: int, deployment: str, at_unix_s: float) -> Change:
    """So many events were not told."""
    event = Event(event_type=Kind.GAP, deployment=deployment, timestamp=at_unix_s, data={"dropped": dropped})
    return Change("gap", None, None, event)


def _event(before: Fact | None, now: Fact | None, subject: str) -> Event | None:
    match now or before:
        case Wanted():
            return _of_model(before, now, subject.removeprefix("model/"))
        case Leaving(model, replica, node, turn, why):
            if now is None or (isinstance(before, Leaving) and before.turn == turn):
                return None
            data: dict[str, Any] = {"node": node, "why": why}
            return Event(event_type=Kind.EVICT, model_key=model, replica_id=replica, data=data)
        case There(model, replica, node, level, phase, version):
            data = {"node": node, "level": level, "phase": phase if now else Phase.GONE.value, "version": version}
            return Event(event_type=Kind.REPLICA, model_key=model, replica_id=replica, data=data)
        case Line(model, waiting, since_s):
            data = {"waiting": waiting, "since_unix_s": since_s} if now else {"waiting": 0}
            return Event(event_type=Kind.QUEUE_STATE, model_key=model, data=data)
        case Killed(model, request, by):
            data = {"request": request, "by": by}
            return Event(event_type=Kind.KILL_REQUEST, model_key=model, data=data) if now else None
    raise AssertionError(subject)


def _of_model(before: Fact | None, now: Fact | None, key: str) -> Event:
    if not isinstance(now, Wanted):
        return Event(event_type=Kind.EVICT, model_key=key, data={"forgotten": True})
    data = {
        "name": now.name,
        "version": now.version,
        "wanted": now.wanted,
        "replicas_max": now.replicas_max,
        "generation": now.generation,
    }
    if not isinstance(before, Wanted):
        return Event(event_type=Kind.DEPLOY, model_key=key, data=data)
    kind = Kind.DEPLOY
    numbered = structs.replace(before, wanted=now.wanted, generation=now.generation)
    if numbered == now:
        kind = Kind.SCALE
    elif structs.replace(numbered, floor=now.floor) == now and not now.wanted:
        kind = Kind.EVICT
    return Event(event_type=kind, model_key=key, data={**data, "before": before.wanted})
