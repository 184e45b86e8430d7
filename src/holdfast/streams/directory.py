"""All worker sets (the workers of one model in one namespace with one card checksum), and which models are known.

Always true: a model stays known for a while after its last worker went, so that its requests are held, not refused; but
for one whose sets a rollout took away for good (it was renamed, or deleted), or that was wanted and is no longer, which
nobody waits for. A model that is wanted (`discovery.models`) is known whether or not it ever had a worker.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast.discovery.card import ModelCard
from holdfast.routing.degradation import RULES, Rules
from holdfast.routing.table import Standing
from holdfast.spec.waits import KnownSettings
from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.loadings import Loading
from holdfast.streams.rulings import FOR_GOOD, Fate, Ruling, Rulings

# Names without a worker that are remembered at once. A deployment has a handful; the oldest is dropped for a new one.
SEEN_MAX = 1024
GONE_S = 1.0  # for what was on its way to a set that is gone for good, and is told so


class Missing(NamedTuple):
    """Why a model that is wanted has no worker; `hopeless`: as things are, none comes; `stands`: replicas of it are up,
    none serves, and no other comes."""

    why: str = ""
    hopeless: bool = False
    stands: bool = False


NOT_SAID = Missing()


class ModelDirectory:
    """All worker sets, by (namespace, checksum) and by model name; and which models are known without any."""

    def __init__(self, rng: random.Random, fresh_holds_max: int, known: KnownSettings = KnownSettings()) -> None:  # noqa: B008 - frozen
        self._rng = rng
        self._fresh_holds_max = fresh_holds_max
        self._known = known
        self._wanted: dict[str, frozenset[str]] = {}  # names, by deployment
        self._missing: dict[str, Mapping[str, Missing]] = {}  # by deployment and name
        self._unwanted: dict[tuple[str, str], None] = {}  # deployments and names that were wanted, the oldest first
        self._seen: dict[str, float] = {}  # when a worker of this model was last heard of, the oldest first
        self.loading: Callable[[str, str], Loading | None] = lambda namespace, checksum: None
        self.unread: set[str] = set()  # parts of the store of which nothing was heard yet
        self.store_lost = False  # workers that came since are not known here
        self.store_lost_s = 0.0  # when the store was last seen to be away
        self.sets: dict[tuple[str, str], WorkerSet] = {}
        self._rules: dict[str, Rules] = {}  # by deployment, where they are others than at level 0
        self._rulings: defaultdict[str, Rulings] = defaultdict(Rulings)  # by deployment

    def note_store(self, now_s: float) -> None:
        """Keep `store_lost_s` true, looked at from time to time."""
        if self.store_lost:
            self.store_lost_s = now_s

    def want(self, deployment: str, names: frozenset[str]) -> None:
        """The models that are wanted of a deployment, all of them; what held of the others ends with the next tick."""
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
        """Whether a worker of it is brought up when it is asked for."""
        return any(name in names for names in self._wanted.values())

    def miss(self, deployment: str, missing: Mapping[str, Missing]) -> bool:
        """Why models of a deployment have no worker, as whoever brings them up says it; whether that is news."""
        before, self._missing[deployment] = self._missing.get(deployment, {}), missing
        for workers in self.sets.values():
            workers.withheld = self.missing(workers.card.name).stands
        return before != missing

    def missing(self, name: str) -> Missing:
        """Of several deployments that want it each may yet bring one."""
        said = [self._missing.get(one, {}).get(name, NOT_SAID) for one, names in self._wanted.items() if name in names]
        return min(said, key=lambda one: one.hopeless, default=NOT_SAID)

    def wanted(self, deployment: str) -> frozenset[str]:
        return self._wanted.get(deployment, frozenset())

    @property
    def wanted_names(self) -> list[str]:
        return sorted({name for names in self._wanted.values() for name in names})

    def _has_worker(self, name: str) -> bool:
        return any(workers.sessions for workers in self.sets.values() if workers.card.name == name)

    def appeared(self, deployment: str, name: str, now_s: float) -> None:
        """There is a new worker of this model, so that somebody wants it."""
        self._unwanted.pop((deployment, name), None)
        self.saw(name, now_s)

    def saw(self, name: str, now_s: float) -> None:
        """A worker of this model is there, or was until now."""
        self._seen.pop(name, None)
        self._seen[name] = now_s
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def knows(self, name: str) -> bool:
        """Whether this is a model of ours, with or without a worker at the moment."""
        return name in self._known.models or name in self._seen or self.wants(name)

    @property
    def has_seen_any(self) -> bool:
        return bool(self._seen)

    @property
    def is_fleet(self) -> bool:
        """Whether all models that there are, are wanted or seen, and come when they are asked for."""
        return self._known.fleet and not self.unread

    def set_for(self, namespace: str, card: ModelCard) -> WorkerSet:
        key = (namespace, card.checksum())
        found = self.sets.get(key)
        if found is None:
            found = self.sets[key] = WorkerSet(namespace, card, self._rng, self._fresh_holds_max)
            found.table.degrade(self._rules.get(found.deployment, RULES[0]))
            found.withheld = self.missing(card.name).stands
        return found

    def degrade(self, deployment: str, rules: Rules) -> None:
        """What holds at its present level; requests that wait hear of more places with the next tick."""
        self._rules[deployment] = rules
        for workers in self.of_deployment(deployment):
            workers.table.degrade(rules)

    def of_deployment(self, deployment: str) -> list[WorkerSet]:
        return [workers for workers in self.sets.values() if workers.deployment == deployment]

    def rule(self, deployment: str, ruling: Ruling) -> None:
        """What a deployment's rollout says of its sets; it holds from the next tick on."""
        self._rulings[deployment].hear(ruling, {workers.namespace for workers in self.of_deployment(deployment)})

    def fate(self, workers: WorkerSet) -> Fate:
        if (workers.deployment, workers.card.name) in self._unwanted:
            return Fate.UNWANTED
        return self._rulings[workers.deployment].fate(workers.namespace)

    def current(self, workers: WorkerSet) -> WorkerSet:
        """The set as it is known now; one that was forgotten is known again."""
        return self.sets.setdefault((workers.namespace, workers.checksum), workers)

    def of_model(self, name: str) -> list[WorkerSet]:
        return [workers for workers in self.sets.values() if workers.card.name == name and workers.text is not None]

    def models(self) -> dict[str, ModelCard]:
        """Models that can be asked for, by name."""
        return {workers.card.name: workers.card for workers in self.sets.values() if workers.text is not None}

    def pick(self, name: str) -> WorkerSet | None:
        """A set for a new request, at random by healthy weight; with none healthy, any (it will hold)."""
        sets = self.of_model(name)
        if len(sets) <= 1:
            return sets[0] if sets else None
        weights = [workers.weight for workers in sets]
        if not any(weights):
            return max(sets, key=self._may_serve)
        return self._rng.choices(sets, weights)[0]

    def _may_serve(self, workers: WorkerSet) -> tuple[bool, bool, float]:
        """How soon a set without sound workers may serve: one that does as a last resort first."""
        return workers.table.routable_count > 0, self.fate(workers) is Fate.STAYS, workers.empty_since_s

    def stand_ins(self, flight: Flight) -> list[WorkerSet]:
        """Sets with a place for a stream of another that nobody of their own waits for."""
        return [
            other
            for other in self.sets.values()
            if self._may_go(flight, other)
            and not (flight.standing is Standing.FRESH and other.holds.suspects)
            and other.table.has_place(flight.standing, limited=flight.limited)
        ]

    def has_heir(self, flight: Flight) -> bool:
        """Whether some set could take it, now or when it has a place."""
        return any(self._may_go(flight, other) for other in self.sets.values())

    def _may_go(self, flight: Flight, other: WorkerSet) -> bool:
        return self._rulings[flight.workers.deployment].may_go(flight, other)

    def forget_empty(self, now_s: float, linger_s: float) -> None:
        """Drop sets that have had no worker at all for `linger_s` and hold nothing, and names not seen for long; sets
        that are gone for good sooner, and the names that only they had."""
        for key, workers in list(self.sets.items()):
            workers.note_routable(now_s)  # also for one whose first worker never got as far as serving
            gone_s = now_s - workers.empty_since_s if workers.empty_since_s else 0.0
            if workers.sessions:
                self.saw(workers.card.name, now_s)
            elif not len(workers.holds) and gone_s > linger_s:
                del self.sets[key]
            elif not len(workers.holds) and gone_s > GONE_S and self.fate(workers) in FOR_GOOD:
                del self.sets[key]
                if not any(other.card.name == workers.card.name for other in self.sets.values()):
                    self._seen.pop(workers.card.name, None)
        while self._seen and now_s - self._seen[oldest := next(iter(self._seen))] > self._known.known_s:
            del self._seen[oldest]
