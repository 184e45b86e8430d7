"""The replicas of a deployment on their way to one revision: who counts, and who may leave. Pure.

Theory. A replica *counts* when it serves, a frontend has admitted it, and control's verdict gave it its whole traffic
once (so its canaries passed, with customers too). A new set is on trial until one of it does, and has had its share of
customers' requests (`trial.py`). Somebody may leave only if without it enough of those that count are left (facts 21),
and nobody leaves for one of a set on trial. Services that work in pairs count as far as their pairs are whole, and a
pair is of sets that one revision has.

Always true: who may leave leaves as many that count as was promised, or takes nothing away. One less is enough only for
one that gives up its place because there is no room for one more, and only one at a time does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from msgspec import structs

from holdfast.rollout.replica import DESIRED_RUNNING, DesiredState, ObservedReplica, ReplicaStage, ReplicaState
from holdfast.rollout.revision import Part, Revision


def part_of(service: str, target: Revision, stable: Revision | None) -> Part:
    """A service as it should be, or was."""
    for revision in (target, stable):
        if revision is not None and service in revision.parts:
            return revision.parts[service]
    return Part(set_id="", replicas=0)


@dataclass(slots=True)
class WorkloadReplicas:
    """All replicas, by name and oldest first. `stable` was last in place; `held` are services that are paused."""

    target: Revision
    stable: Revision | None
    replicas: dict[str, ReplicaState]
    observed: dict[str, ObservedReplica]
    room: dict[str, int]
    now_s: float
    serial: int
    paused: frozenset[str] = field(default_factory=frozenset)
    is_undo: bool = False  # what leaves is bad
    tried: frozenset[str] = field(default_factory=frozenset)  # services whose new set was, by its customers

    # -- what is there

    def part(self, service: str) -> Part:
        return part_of(service, self.target, self.stable)

    def seen(self, name: str) -> ObservedReplica:
        one = self.replicas[name]
        return self.observed.get(name) or ObservedReplica(
            service=one.service, set_id=one.set_id, stage=ReplicaStage.ABSENT
        )

    def counts(self, name: str) -> bool:
        one, seen = self.replicas[name], self.seen(name)
        if one.desired is not DesiredState.SERVE or seen.stage is not ReplicaStage.SERVING or not seen.admitted:
            return False
        return seen.weight >= 1.0 or (one.counted and seen.weight > 0.0)

    def serving(self, name: str) -> tuple[bool, float]:
        """Return a key that puts those first that serve least: they leave before others."""
        return self.counts(name), self.seen(name).weight

    def is_served(self, service: str) -> bool:
        """Whether somebody takes requests. Who is to drain does until all frontends have heard of it; of who takes over
        from it they tell as late."""
        own = [(one.desired, self.seen(name)) for name, one in self.replicas.items() if one.service == service]
        taking = [(desired, seen) for desired, seen in own if seen.stage is ReplicaStage.SERVING and seen.weight > 0.0]
        return any(
            desired is DesiredState.DRAIN or (desired is DesiredState.SERVE and seen.admitted)
            for desired, seen in taking
        )

    def is_old(self, name: str) -> bool:
        one = self.replicas[name]
        part = self.target.parts.get(one.service)
        return part is None or part.set_id != one.set_id

    def select(self, service: str, *, old: bool, desired: tuple[DesiredState, ...] = DESIRED_RUNNING) -> list[str]:
        """Who is of a service's wanted set, or of any other."""
        everybody = self.replicas.items()
        return [
            n for n, one in everybody if one.service == service and one.desired in desired and self.is_old(n) == old
        ]

    def missing(self, service: str) -> int:
        return self.target.parts[service].replicas - len(self.select(service, old=False))

    def is_up(self, service: str) -> bool:
        return self.missing(service) <= 0 and all(map(self.counts, self.select(service, old=False)))

    def is_new(self, service: str) -> bool:
        """Whether the wanted set of a service was never in place."""
        return self.stable is None or self.stable.sets.get(service) != self.target.sets[service]

    def is_in_place(self) -> bool:
        settled = all(
            one.desired is DesiredState.SERVE and not self.is_old(name) for name, one in self.replicas.items()
        )
        return settled and all(self.is_up(service) and self.missing(service) == 0 for service in self.target.parts)

    def places(self, service: str) -> list[str]:
        """Who has a place of its own, whatever is wanted of it."""
        return [n for n, one in self.replicas.items() if one.service == service and one.beside not in self.replicas]

    def leaving(self, service: str) -> list[str]:
        """Who was told to leave."""
        return [
            name for name, one in self.replicas.items() if one.service == service and one.desired not in DESIRED_RUNNING
        ]

    def is_busy(self, service: str) -> bool:
        """Whether something should come of it by itself, and soon: somebody is not yet what it is to be, or gone."""
        draining = any(self.replicas[name].drain_until_s is not None for name in self.leaving(service))
        if service in self.paused or draining or any(map(self.is_being_tried, (service, *self.part(service).peers))):
            return False
        return bool(self.leaving(service)) or (service in self.target.parts and not self.is_up(service))

    # -- how many there must be

    def _shares(self, without: str) -> dict[str, Fraction]:
        """How much of each service counts, as a part of what is wanted; of those that work in pairs only as much as
        their mates do. Nobody leaves for one that is on trial, so that does not."""
        there = [one for name, one in self.replicas.items() if name != without and self.is_proven(name)]
        counted = Counter((one.service, one.set_id) for one in there)
        sizes = {service: self.part(service).replicas for service, _ in counted}
        parts = {one: Fraction(number, sizes[one[0]]) for one, number in counted.items() if sizes[one[0]]}
        bonds = self._peer_sets()
        shares = dict.fromkeys(self.target.parts, Fraction(0))
        for own in parts:
            mates: dict[str, Fraction] = {}
            for mate in bonds.get(own, ()):
                if self.part(mate[0]).replicas:
                    mates[mate[0]] = mates.get(mate[0], Fraction(0)) + parts.get(mate, Fraction(0))
            if own[0] in shares:
                shares[own[0]] += min(parts[own], *mates.values()) if mates else parts[own]
        return shares

    def _peer_sets(self) -> dict[tuple[str, str], set[tuple[str, str]]]:
        """Of each set that works in pairs, those that a revision has it with. One that a revision has alone needs
        nobody."""
        pairs = [((one.service, one.set_id), one.pair) for one in self.replicas.values()]
        pairs += [((name, part.set_id), self.target.pair(name)) for name, part in self.target.parts.items()]
        alone = {own for own, pair in pairs if len(pair) == 1}
        bonds: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for own, mate in {(own, mate) for own, pair in pairs for mate in pair if mate != own}:
            for one, other in ((own, mate), (mate, own)):
                if one not in alone:
                    bonds.setdefault(one, set()).add(other)
        return bonds

    def is_enough(self, without: str) -> bool:
        """Whether those that count, but for one, are as many as was promised for all that it works with."""
        parts = self.target.parts
        pair = [service for service, _ in self.replicas[without].pair if service in parts and parts[service].replicas]
        spares = [Fraction(self._spare(service, without), parts[service].replicas) for service in pair]
        shares = self._shares(without)
        return all(shares[service] >= 1 - max(spares) for service in pair)

    def _spare(self, service: str, leaver: str) -> int:
        """How many of those wanted need not count when this one has left."""
        part = self.target.parts[service]
        if self.replacements(leaver) or (self.lacks_room(service) and not self.share_candidate(service)):
            return max(1, part.unavailable)
        return 0 if part.surge and self.is_on_trial(service) else part.unavailable

    def is_on_trial(self, service: str) -> bool:
        """Whether a new set has not shown yet that it can take over from others that are still there."""
        if not self.is_new(service) or not self.select(service, old=True, desired=tuple(DesiredState)):
            return False
        new = self.select(service, old=False, desired=tuple(DesiredState))
        return service not in self.tried or not any(self.replicas[name].counted for name in new)

    def is_being_tried(self, service: str) -> bool:
        """Whether one of a set on trial counts, and only customers' requests are waited for."""
        own = self.select(service, old=False) if service in self.target.parts else []
        return any(map(self.counts, own)) and self.is_on_trial(service)

    def is_proven(self, name: str) -> bool:
        """Whether it counts, and its set is not on trial."""
        return self.counts(name) and (self.is_old(name) or not self.is_on_trial(self.replicas[name].service))

    def free_places(self, service: str) -> int:
        """How many more may be started in places of their own."""
        part, there = self.target.parts[service], self.places(service)
        vacant = part.replicas + part.surge - len(there)
        if service not in self.room:
            return vacant
        coming = [
            n
            for n in there
            if self.replicas[n].desired in DESIRED_RUNNING and self.seen(n).stage is ReplicaStage.ABSENT
        ]
        return min(vacant, self.room[service] - len(coming))

    def lacks_room(self, service: str) -> bool:
        """Whether more are wanted, nobody is on the way in or out, and there is no place for one more."""
        part = self.target.parts[service]
        no_room = self.room.get(service, 1) <= 0 or part.surge == part.unavailable == 0
        return no_room and self.is_waiting(service)

    def is_waiting(self, service: str) -> bool:
        """Whether more are wanted, and nobody is on the way in or out."""
        moving = [
            n for n, one in self.replicas.items() if one.service == service and one.desired is not DesiredState.SERVE
        ]
        return self.missing(service) > 0 and not moving and all(map(self.counts, self.select(service, old=False)))

    def blocks_a_place(self, name: str) -> bool:
        """Whether it is of a set that is undone, does not count, and has the place that one which could serve waits
        for: then nothing else would happen."""
        service = self.replicas[name].service
        if not self.is_undo or self.counts(name) or not self.is_old(name) or service not in self.target.parts:
            return False
        return self.is_waiting(service) and self.free_places(service) <= 0

    def share_candidate(self, service: str) -> str:
        """An old one that a new one may stand by beside, if there is one."""
        return next(
            (n for n in self.select(service, old=True, desired=(DesiredState.SERVE,)) if self.seen(n).fits_beside), ""
        )

    def replacements(self, name: str) -> list[str]:
        """Who stands beside it, or took over from it."""
        return [heir for heir, one in self.replicas.items() if one.beside == name and one.desired in DESIRED_RUNNING]

    def may_leave(self, name: str) -> bool:
        """Who never counted, is broken or has lost its mates takes nothing away, nor does one that is in the way; any
        other only if enough are left."""
        takes_nothing = not self.counts(name) and (self.seen(name).is_broken or not self.replicas[name].counted)
        return takes_nothing or self.has_lost_peers(name) or self.blocks_a_place(name) or self.is_enough(name)

    def has_lost_peers(self, name: str) -> bool:
        """Whether it works in pairs, and everybody that it could work with is gone for good."""
        own = (self.replicas[name].service, self.replicas[name].set_id)
        staying = {(one.service, one.set_id) for one in self.replicas.values() if one.desired in DESIRED_RUNNING}
        mates = {mate for mate in self._peer_sets().get(own, ()) if self.part(mate[0]).replicas}
        return own in staying and bool(mates) and not mates & staying

    def has_drained(self, name: str) -> bool:
        seen, one = self.seen(name), self.replicas[name]
        if one.drain_until_s is None or self.now_s >= one.drain_until_s:
            return True
        if seen.stage is ReplicaStage.STARTING:  # it died meanwhile
            return self.is_undo or not one.counted or seen.is_broken or not self.is_last(name)
        if seen.stage not in (ReplicaStage.SERVING, ReplicaStage.DRAINING):
            return True
        return seen.stage is ReplicaStage.DRAINING and seen.streams == 0

    def is_last(self, name: str) -> bool:
        """Whether nobody else of its set serves or drains: then its streams wait for it, or for nobody."""
        own = (self.replicas[name].service, self.replicas[name].set_id)
        others = [n for n, one in self.replicas.items() if n != name and (one.service, one.set_id) == own]
        there = [n for n in others if self.replicas[n].desired is not DesiredState.STOP]
        return not any(self.seen(other).stage in (ReplicaStage.SERVING, ReplicaStage.DRAINING) for other in there)

    # -- what changes

    def set_desired(self, name: str, desired: DesiredState, bound_s: float = 0.0) -> None:
        until_s = self.now_s + bound_s if desired is DesiredState.DRAIN else None
        self.replicas[name] = structs.replace(
            self.replicas[name], desired=desired, drain_until_s=until_s, sent_at_s=None
        )

    def add(self, service: str, beside: str = "") -> None:
        self.serial += 1
        while (name := f"{service}-{self.serial}") in self.replicas or name in self.observed:
            self.serial += 1
        desired, set_id = DesiredState.STAND_BY if beside else DesiredState.SERVE, self.target.parts[service].set_id
        pair = self.target.pair(service)
        self.replicas[name] = ReplicaState(service=service, set_id=set_id, pair=pair, desired=desired, beside=beside)
