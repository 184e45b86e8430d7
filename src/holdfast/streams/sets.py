"""Worker sets: the workers of one model in one namespace with one card checksum.

Always true: a request stays with its set; two checksums never share a set (facts 19), so a stream is never
replayed onto other weights without being flagged.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.discovery.card import ModelCard
from holdfast.routing.pace import Pace
from holdfast.routing.table import RouteTable, Standing
from holdfast.streams.flight import Flight
from holdfast.streams.holds import HoldQueue

if TYPE_CHECKING:
    from holdfast.streams.link import WorkerLink


class WorkerSet:
    """One set, with its routes and its held streams."""

    def __init__(self, namespace: str, card: ModelCard, rng: random.Random, fresh_holds_max: int) -> None:
        self.namespace = namespace
        self.card = card
        self.checksum = card.checksum()
        self.table = RouteTable(rng)
        self.holds: HoldQueue[Flight] = HoldQueue(fresh_holds_max)
        self.links: dict[int, WorkerLink] = {}  # by instance
        self._inexact = 0  # workers among them whose answers differ from one time to the next
        self.sessions = 0  # data connections to its workers, with those that are not ready for work yet
        self.text_lock = asyncio.Lock()  # whoever makes the text side; others wait for it
        self.text: object | None = None  # what the frontend made of the card's tokenizer and template
        self.empty_since_s = 0.0  # when the last routable worker went, 0 while there is one
        self.full_since_s = 0.0  # when its workers were first seen to be full, 0 while they are not
        self.tried_s = 0.0  # when one of its workers was last seen to be kept for a suspect
        self.pace = Pace()  # of the places that came free for those who waited

    @property
    def weight(self) -> int:
        """How much of its model's traffic it should get: the places of its routable workers."""
        return self.table.places

    @property
    def deterministic(self) -> bool:
        """Whether every worker of it, asked again, would answer the same."""
        return self._inexact == 0

    def enter(self, link: WorkerLink) -> None:
        """A worker of it is connected."""
        self.links[link.slot.name] = link
        self._inexact += not link.deterministic

    def leave(self, link: WorkerLink) -> None:
        del self.links[link.slot.name]
        self._inexact -= not link.deterministic

    def note_routable(self, now_s: float) -> None:
        """Keep `empty_since_s` true after any change of its workers."""
        if self.table.routable_count:
            self.empty_since_s = 0.0
        elif self.empty_since_s == 0.0:
            self.empty_since_s = now_s

    def note_full(self, now_s: float) -> None:
        """Keep `full_since_s` true, looked at from time to time."""
        if not self.table.overloaded:
            self.full_since_s = 0.0
        elif self.full_since_s == 0.0:
            self.full_since_s = now_s

    def note_trial(self, now_s: float) -> None:
        """Keep `tried_s` true, looked at from time to time."""
        if self.table.trials:
            self.tried_s = now_s

    def can_stand_in_for(self, other: WorkerSet) -> bool:
        """Same model, same tokens, so a stream of `other` may go on here, though not exactly."""
        return (
            self is not other
            and self.card.name == other.card.name
            and self.card.tokenizer_sha256 == other.card.tokenizer_sha256
            and self.text is not None
        )

    def __repr__(self) -> str:
        return (
            f"<WorkerSet {self.card.name} {self.namespace}/{self.checksum[:8]} "
            f"{self.table.routable_count}/{len(self.table.slots)} workers, {len(self.holds)} held>"
        )


# Names without a worker that are remembered at once. A deployment has a handful; the oldest is dropped for a new one.
SEEN_MAX = 1024


@dataclass(frozen=True, slots=True)
class KnownSettings:
    """Which models are known though no worker of theirs is there."""

    desired: frozenset[str] = frozenset()  # known whether or not a worker ever came
    seen_s: float = 3600.0  # how long a model stays known after its last worker went


class ModelDirectory:
    """All worker sets, by (namespace, checksum) and by model name; and which models are known without any."""

    def __init__(self, rng: random.Random, fresh_holds_max: int, known: KnownSettings = KnownSettings()) -> None:  # noqa: B008 - frozen
        self._rng = rng
        self._fresh_holds_max = fresh_holds_max
        self._known = known
        self._seen: dict[str, float] = {}  # when a worker of this model was last heard of, the oldest first
        self.sets: dict[tuple[str, str], WorkerSet] = {}
        self._groups: dict[tuple[str, str], list[WorkerLink]] = {}  # connected engines, by namespace and group

    def saw(self, name: str, now_s: float) -> None:
        """A worker of this model is there, or was until now."""
        self._seen.pop(name, None)
        self._seen[name] = now_s
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def knows(self, name: str) -> bool:
        """Whether this is a model of ours, with or without a worker at the moment."""
        return name in self._known.desired or name in self._seen

    @property
    def has_seen_any(self) -> bool:
        return bool(self._seen)

    def set_for(self, namespace: str, card: ModelCard) -> WorkerSet:
        key = (namespace, card.checksum())
        found = self.sets.get(key)
        if found is None:
            found = self.sets[key] = WorkerSet(namespace, card, self._rng, self._fresh_holds_max)
        return found

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

    def stand_ins(self, workers: WorkerSet, standing: Standing) -> list[WorkerSet]:
        """Sets with a place for a stream of `workers` that nobody of their own waits for."""
        return [
            other
            for other in self.sets.values()
            if other.can_stand_in_for(workers)
            and not (standing is Standing.FRESH and other.holds.suspects)
            and other.table.has_place(standing)
        ]

    def group_of(self, link: WorkerLink) -> list[WorkerLink]:
        """The connected workers of a link's group, without itself; a worker without a group has none."""
        return [other for other in self._groups.get(_group(link), ()) if other is not link]

    def enter(self, link: WorkerLink, workers: WorkerSet) -> None:
        """A worker of the set is connected."""
        workers.enter(link)
        if link.group:
            self._groups.setdefault(_group(link), []).append(link)

    def leave(self, link: WorkerLink, workers: WorkerSet) -> None:
        workers.leave(link)
        if link.group:
            group = self._groups[_group(link)]
            group.remove(link)
            if not group:
                del self._groups[_group(link)]

    def forget_empty(self, now_s: float, linger_s: float) -> None:
        """Drop sets that have had no worker at all for `linger_s` and hold nothing, and names not seen for long."""
        for key, workers in list(self.sets.items()):
            workers.note_routable(now_s)  # also for one whose first worker never got as far as serving
            gone_s = now_s - workers.empty_since_s if workers.empty_since_s else 0.0
            if workers.sessions:
                self.saw(workers.card.name, now_s)
            elif not len(workers.holds) and gone_s > linger_s:
                del self.sets[key]
        while self._seen and now_s - self._seen[oldest := next(iter(self._seen))] > self._known.seen_s:
            del self._seen[oldest]


def _group(link: WorkerLink) -> tuple[str, str]:
    return link.instance.key.namespace, link.group
