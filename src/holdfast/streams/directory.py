"""All worker sets (the workers of one model in one namespace with one card checksum), and which models are known.

Always true: a model stays known for a while after its last worker went, so that its requests are held, not refused.
"""

from __future__ import annotations

import random

from holdfast.discovery.card import ModelCard
from holdfast.routing.degradation import RULES, Rules
from holdfast.routing.table import Standing
from holdfast.spec.waits import KnownSettings
from holdfast.streams.flight import Flight, WorkerSet

# Names without a worker that are remembered at once. A deployment has a handful; the oldest is dropped for a new one.
SEEN_MAX = 1024


class ModelDirectory:
    """All worker sets, by (namespace, checksum) and by model name; and which models are known without any."""

    def __init__(self, rng: random.Random, fresh_holds_max: int, known: KnownSettings = KnownSettings()) -> None:  # noqa: B008 - frozen
        self._rng = rng
        self._fresh_holds_max = fresh_holds_max
        self._known = known
        self._seen: dict[str, float] = {}  # when a worker of this model was last heard of, the oldest first
        self.sets: dict[tuple[str, str], WorkerSet] = {}
        self.rules = RULES[0]

    def saw(self, name: str, now_s: float) -> None:
        """A worker of this model is there, or was until now."""
        self._seen.pop(name, None)
        self._seen[name] = now_s
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def knows(self, name: str) -> bool:
        """Whether this is a model of ours, with or without a worker at the moment."""
        return name in self._known.models or name in self._seen

    @property
    def has_seen_any(self) -> bool:
        return bool(self._seen)

    def set_for(self, namespace: str, card: ModelCard) -> WorkerSet:
        key = (namespace, card.checksum())
        found = self.sets.get(key)
        if found is None:
            found = self.sets[key] = WorkerSet(namespace, card, self._rng, self._fresh_holds_max)
            found.table.degrade(self.rules)
        return found

    def degrade(self, rules: Rules) -> None:
        """What holds at the present level; requests that wait hear of more places with the next tick."""
        self.rules = rules
        for workers in self.sets.values():
            workers.table.degrade(rules)

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
            return max(sets, key=lambda workers: workers.empty_since_s)
        return self._rng.choices(sets, weights)[0]

    def stand_ins(self, flight: Flight) -> list[WorkerSet]:
        """Sets with a place for a stream of another that nobody of their own waits for."""
        return [
            other
            for other in self.sets.values()
            if other.can_stand_in_for(flight.workers)
            and not (flight.standing is Standing.FRESH and other.holds.suspects)
            and other.table.has_place(flight.standing, limited=flight.limited)
        ]

    def forget_empty(self, now_s: float, linger_s: float) -> None:
        """Drop sets that have had no worker at all for `linger_s` and hold nothing, and names not seen for long."""
        for key, workers in list(self.sets.items()):
            workers.note_routable(now_s)  # also for one whose first worker never got as far as serving
            gone_s = now_s - workers.empty_since_s if workers.empty_since_s else 0.0
            if workers.sessions:
                self.saw(workers.card.name, now_s)
            elif not len(workers.holds) and gone_s > linger_s:
                del self.sets[key]
        while self._seen and now_s - self._seen[oldest := next(iter(self._seen))] > self._known.known_s:
            del self._seen[oldest]
