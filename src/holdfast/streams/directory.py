"""All worker sets (the workers of one model in one namespace with one card checksum), and which models are known.

`ModelDirectory`: a model stays known for a while after its last worker went, so that its requests are held and not
refused. It is forgotten sooner if a rollout removed its sets for good (the model was renamed or deleted) or if the
fleet no longer wants it. A wanted model (`frontend.wanted_models`) is known whether or not it ever had a worker.

`SetPolicies` (pure) says in which sets a stream may continue. A stream belongs to the set it began in.
- A set with the same card can continue it; the answer is flagged.
- With another card the text would change. So a stream moves there only if its own set is gone for good and the manifest
  of the receiving set allows it. Until that is known it waits, because an undone rollout brings its set back.
- A stream without a token may go to any set in which its prompt means the same.

Always true: a set that no rollout has named is treated as one with crashed workers; a set is gone for good only when it
is no longer in the rollout's history.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from holdfast.discovery.card import ModelCard
from holdfast.discovery.keys import LOADINGS, InstanceKey, decode_loading, parse_key
from holdfast.routing.degradation import RULES, Rules
from holdfast.routing.table import PriorityClass
from holdfast.spec.waits import KnownSettings
from holdfast.store.contract import WatchEvent, changes
from holdfast.streams.flight import Flight, WorkerSet

GRACE_S = 10.0  # from the end of a load to the first work: an election, a wake and a connection, on a busy machine
RECORDS_MAX = 4096  # more engines than one frontend has


class Loading(NamedTuple):
    """An engine that is loading."""

    name: str
    checksum: str  # of its model's card
    until_s: float  # deadline: if it is not ready by then, it never will be


class Loadings:
    """The engines that are loading, of all deployments that a frontend serves. While an engine of a set is loading, the
    set's streams wait. A record counts from when it was first read, for no longer than it says. A deleted record counts
    for `GRACE_S` more, because its engine is about to be elected and connected to."""

    def __init__(self, deployments: frozenset[str], clock: Callable[[], float]) -> None:
        self._deployments, self._clock = deployments, clock
        self._known: dict[InstanceKey, Loading] = {}

    def on_store_event(self, event: WatchEvent) -> list[Loading]:
        """Apply an event; return the engines that began to load. Unreadable records (of another version) are
        skipped."""
        put, removed = changes(event, [LOADINGS + key.path for key in self._known])
        for path in removed:
            self._delete(path)
        news: list[Loading] = []
        for path, value in put.items():
            with contextlib.suppress(ValueError):
                news += self._put(path, value)
        return news

    def _put(self, path: str, value: bytes) -> list[Loading]:
        key = parse_key(LOADINGS, path)
        if key is None or key.deployment not in self._deployments or len(self._known) >= RECORDS_MAX:
            return []
        record = decode_loading(value)
        before = self._known.get(key)
        if before is not None and before.until_s > self._clock() + GRACE_S:
            return []  # the store sent the record again; the time does not start anew
        self._known[key] = Loading(record.name, record.checksum, self._clock() + record.within_s)
        return [self._known[key]]

    def _delete(self, path: str) -> None:
        key, now_s = parse_key(LOADINGS, path), self._clock()
        if key is not None and (known := self._known.get(key)) is not None:
            self._known[key] = known._replace(until_s=min(known.until_s, now_s + GRACE_S))
        self._known = {each: one for each, one in self._known.items() if one.until_s > now_s}

    def latest(self, namespace: str, checksum: str) -> Loading | None:
        """Return the loading engine of this set with the latest deadline, if there is one."""
        now_s = self._clock()
        found = [
            one
            for key, one in self._known.items()
            if (key.namespace, one.checksum) == (namespace, checksum) and one.until_s > now_s
        ]
        return max(found, key=lambda one: one.until_s, default=None)


# Names without a worker that are remembered at the same time. A deployment has a handful; the oldest is dropped first.
SEEN_MAX = 1024
GONE_S = 1.0  # a set that is gone for good stays so long, so that late requests for it get the right error


class SetStatus(Enum):
    """A set's state according to its deployment's rollout and fleet."""

    UNKNOWN = "no rollout has named it"
    STAYS = "it has replicas that have proved themselves"
    AWAY = "it has none yet, or again, and may have some"
    GONE = "it is gone for good"
    UNWANTED = "its model is no longer wanted"


FOR_GOOD = (SetStatus.GONE, SetStatus.UNWANTED)


TAKEN_AWAY = (SetStatus.AWAY, *FOR_GOOD)


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """A rollout's current decision on the sets of a deployment, by namespace."""

    staying: frozenset[str]
    kept: frozenset[str]  # those that stay, and those that may come or come back
    open: frozenset[str] = frozenset()  # where streams of sets that are gone for good may continue


NOTHING = SetPolicy(frozenset(), frozenset())


class MissingWorkers(NamedTuple):
    """Why a wanted model has no worker. `unplaceable`: none can be placed now; `none_serves`: replicas are up, none
    serves, and no other is expected."""

    why: str = ""
    unplaceable: bool = False
    none_serves: bool = False


NOT_KNOWN = MissingWorkers()


class ModelDirectory:
    """All worker sets, by (namespace, checksum) and by model name, and the models that are known without a set."""

    def __init__(self, rng: random.Random, fresh_holds_max: int, known: KnownSettings = KnownSettings()) -> None:  # noqa: B008 - frozen
        self._rng = rng
        self._fresh_holds_max = fresh_holds_max
        self._known = known
        self._wanted: dict[str, frozenset[str]] = {}  # names, by deployment
        self._missing: dict[str, Mapping[str, MissingWorkers]] = {}  # by deployment and name
        self._unwanted: dict[tuple[str, str], None] = {}  # (deployment, name) no longer wanted, the oldest first
        self._seen: dict[str, float] = {}  # when a worker of this model was last seen, the oldest first
        self.loading: Callable[[str, str], Loading | None] = lambda namespace, checksum: None
        self.unread: set[str] = set()  # prefixes of the store whose first snapshot has not arrived yet
        self.store_lost = False  # while True, new workers are not discovered
        self.store_lost_at_s = 0.0  # when the store was last seen to be away
        self.sets: dict[tuple[str, str], WorkerSet] = {}
        self._rules: dict[str, Rules] = {}  # by deployment; a missing one is at level 0
        self._policies: defaultdict[str, SetPolicies] = defaultdict(SetPolicies)  # by deployment

    def note_store(self, now_s: float) -> None:
        """Update `store_lost_at_s`; called at every tick."""
        if self.store_lost:
            self.store_lost_at_s = now_s

    def set_wanted(self, deployment: str, names: frozenset[str]) -> None:
        """Set all wanted models of a deployment. Streams held for models that are no longer wanted end at the next
        tick."""
        before = self._wanted.get(deployment, frozenset())
        self._wanted[deployment] = names
        for name in before - names:
            self._unwanted[deployment, name] = None
            if not self.wants(name) and not self._has_worker(name):
                self._seen.pop(name, None)
        for name in names:
            self._unwanted.pop((deployment, name), None)
        while len(self._unwanted) > SEEN_MAX:
            del self._unwanted[next(iter(self._unwanted))]

    def wants(self, name: str) -> bool:
        """Return whether a worker of this model is started on request."""
        return any(name in names for names in self._wanted.values())

    def set_missing(self, deployment: str, missing: Mapping[str, MissingWorkers]) -> bool:
        """Set the fleet's reasons why models of a deployment have no worker; return True if they changed."""
        before, self._missing[deployment] = self._missing.get(deployment, {}), missing
        for workers in self.sets.values():
            workers.none_serves = self.missing(workers.card.name).none_serves
        return before != missing

    def missing(self, name: str) -> MissingWorkers:
        """Return why a model has no worker. If several deployments want it, one that can place it decides."""
        reasons = [
            self._missing.get(one, {}).get(name, NOT_KNOWN) for one, names in self._wanted.items() if name in names
        ]
        return min(reasons, key=lambda one: one.unplaceable, default=NOT_KNOWN)

    def wanted(self, deployment: str) -> frozenset[str]:
        return self._wanted.get(deployment, frozenset())

    @property
    def wanted_names(self) -> list[str]:
        return sorted({name for names in self._wanted.values() for name in names})

    def _has_worker(self, name: str) -> bool:
        return any(workers.sessions for workers in self.sets.values() if workers.card.name == name)

    def appeared(self, deployment: str, name: str, now_s: float) -> None:
        """Note a new worker of this model: it is wanted again."""
        self._unwanted.pop((deployment, name), None)
        self.note_seen(name, now_s)

    def note_seen(self, name: str, now_s: float) -> None:
        """Note that a worker of this model is connected, or was until now."""
        self._seen.pop(name, None)
        self._seen[name] = now_s
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def knows(self, name: str) -> bool:
        """Return whether the model is known, with or without a worker at the moment."""
        return name in self._known.models or name in self._seen or self.wants(name)

    @property
    def has_seen_any(self) -> bool:
        return bool(self._seen)

    @property
    def is_fleet(self) -> bool:
        """Return whether this is a fleet and its store was read, so that every existing model is known."""
        return self._known.fleet and not self.unread

    def set_for(self, namespace: str, card: ModelCard) -> WorkerSet:
        key = (namespace, card.checksum())
        found = self.sets.get(key)
        if found is None:
            found = self.sets[key] = WorkerSet(namespace, card, self._rng, self._fresh_holds_max)
            found.table.set_rules(self._rules.get(found.deployment, RULES[0]))
            found.none_serves = self.missing(card.name).none_serves
        return found

    def degrade(self, deployment: str, rules: Rules) -> None:
        """Apply the rules of a deployment's degradation level; waiting requests get new places at the next tick."""
        self._rules[deployment] = rules
        for workers in self.of_deployment(deployment):
            workers.table.set_rules(rules)

    def of_deployment(self, deployment: str) -> list[WorkerSet]:
        return [workers for workers in self.sets.values() if workers.deployment == deployment]

    def apply_policy(self, deployment: str, policy: SetPolicy) -> None:
        """Apply a rollout's decision on the sets of its deployment; it has effect from the next tick on."""
        self._policies[deployment].apply(policy, {workers.namespace for workers in self.of_deployment(deployment)})

    def status_of(self, workers: WorkerSet) -> SetStatus:
        if (workers.deployment, workers.card.name) in self._unwanted:
            return SetStatus.UNWANTED
        return self._policies[workers.deployment].status_of(workers.namespace)

    def current(self, workers: WorkerSet) -> WorkerSet:
        """Return the directory's set with the same key; if it was forgotten, enter this one again."""
        return self.sets.setdefault((workers.namespace, workers.checksum), workers)

    def of_model(self, name: str) -> list[WorkerSet]:
        return [workers for workers in self.sets.values() if workers.card.name == name and workers.text is not None]

    def models(self) -> dict[str, ModelCard]:
        """Return the cards of models that can be requested, by name."""
        return {workers.card.name: workers.card for workers in self.sets.values() if workers.text is not None}

    def pick(self, name: str) -> WorkerSet | None:
        """Pick a set for a new request, at random by weight; if no weight is above 0, the one likely to serve first."""
        sets = self.of_model(name)
        if len(sets) <= 1:
            return sets[0] if sets else None
        weights = [workers.weight for workers in sets]
        if not any(weights):
            return max(sets, key=self._may_serve)
        return self._rng.choices(sets, weights)[0]

    def _may_serve(self, workers: WorkerSet) -> tuple[bool, bool, float]:
        """Return a sort key for sets without sound workers: the larger, the sooner the set may serve."""
        return workers.table.routable_count > 0, self.status_of(workers) is SetStatus.STAYS, workers.empty_since_s

    def stand_ins(self, flight: Flight) -> list[WorkerSet]:
        """Return the other sets that may continue this stream and have a free place for it."""
        return [
            other
            for other in self.sets.values()
            if self._may_go(flight, other)
            and not (flight.priority is PriorityClass.FRESH and other.holds.suspects)
            and other.table.has_place(flight.priority, limited=flight.limited)
        ]

    def has_possible_stand_in(self, flight: Flight) -> bool:
        """Return whether some set may continue it, now or when it has a place."""
        return any(self._may_go(flight, other) for other in self.sets.values())

    def _may_go(self, flight: Flight, other: WorkerSet) -> bool:
        return self._policies[flight.workers.deployment].may_go(flight, other)

    def forget_empty(self, now_s: float, linger_s: float) -> None:
        """Drop sets that had no worker for `linger_s` and hold no stream, and names not seen for long. Drop sets that
        are gone for good, and the names that only they had, after `GONE_S`."""
        for key, workers in list(self.sets.items()):
            workers.note_routable(now_s)  # also if its first worker never served
            gone_s = now_s - workers.empty_since_s if workers.empty_since_s else 0.0
            if workers.sessions:
                self.note_seen(workers.card.name, now_s)
            elif not len(workers.holds) and gone_s > linger_s:
                del self.sets[key]
            elif not len(workers.holds) and gone_s > GONE_S and self.status_of(workers) in FOR_GOOD:
                del self.sets[key]
                if not any(other.card.name == workers.card.name for other in self.sets.values()):
                    self._seen.pop(workers.card.name, None)
        while self._seen and now_s - self._seen[oldest := next(iter(self._seen))] > self._known.known_s:
            del self._seen[oldest]


class SetPolicies:
    """The last policy of one deployment, and all namespaces that any of its policies has named."""

    def __init__(self) -> None:
        self._last = NOTHING
        self._known: frozenset[str] = frozenset()

    def apply(self, policy: SetPolicy, there: Iterable[str]) -> None:
        """Replace the policy. `there`: namespaces that still have sets."""
        self._known = policy.kept | (self._known & frozenset(there))
        self._last = policy

    def status_of(self, namespace: str) -> SetStatus:
        if namespace not in self._known:
            return SetStatus.UNKNOWN
        if namespace in self._last.staying:
            return SetStatus.STAYS
        return SetStatus.AWAY if namespace in self._last.kept else SetStatus.GONE

    def may_go(self, flight: Flight, other: WorkerSet) -> bool:
        """Return whether a stream may continue in another set, if that has a place."""
        own = flight.workers
        if not other.can_stand_in_for(own):
            return False
        status = self.status_of(own.namespace)
        if status is SetStatus.UNKNOWN or own.checksum == other.checksum or not flight.would_change_in(other):
            return True
        return status is SetStatus.GONE and other.namespace in self._last.open
