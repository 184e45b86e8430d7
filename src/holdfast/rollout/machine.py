"""Leads a deployment from one revision to the next: a rollout begins, continues, is undone, and ends.

Theory. Each step gets everything that should run and everything that is observed (`Observation`), never what changed:
so the same observation may come twice or late, and another process may continue after this one died. What no
observation can show is in `RolloutState`, which is written down before any action is carried out: above all the desired
state of each replica, which `move_replicas` decides. The actions are the difference between desired and observed
(`NEEDED_ACTIONS`); each is returned once, and again only if it had no visible effect after `RETRY_S`. A replica's name
is used once, so a start of one that is there is already done.

A revision whose new sets prove to be bad is undone, once: everything goes back to the revision that was last in place,
by the same rules. Bad is a new replica that can never serve (its card is refused, its canary fails, its settings are
invalid), that crashes again and again, or makes no progress until its deadline; a new set that no device here could
hold; and one of whose requests too many fail while others' do not (`trial.py`). A failure in a set that was in place
before is not the revision's fault, and undoes nothing.
A revision without a way back, or whose undo itself takes too long, is stuck, and says so; work on it continues, and it
ends well whenever it can. A newer revision takes over at any time: what is there then belongs to it, or is old.

Which count: a replica *counts* when it serves, a frontend has admitted it, and control's verdict gave it its whole
traffic once (so its canaries passed, with clients' requests too). Services that work in pairs count as far as their
pairs are whole, and a pair is of sets that one revision has. A replica may leave only if enough of those that count are
left without it (facts 21), or if it takes nothing away; one less is enough only where one gives up its place because
there is no room for one more, and only one at a time does.

How they move: of a set on trial one replica is started, and no other leaves for it where there is room. Leaving is
draining: streams are handed over, and frontends resume what is left when the replica is stopped. Where there is no room
for one more, a new engine stands by beside an old one on its device, if that has the memory; it takes over when it is
ready, and the old one is kept until the new one counts. Else one old replica at a time gives up its place first, and
requests that find no replica are held. A draining replica that is desired again resumes before another is started, and
a whole service that is no longer desired leaves last. There are never more than replicas and surge, each in its own
place; to move twice, as things are, is to move once.

Always true: a revision is undone at most once, to one that was in place; what is paused stands still, and so does its
deadline, but an undo is never paused; a new set of workers that no control can check waits as if it were paused; a
replica that is observed and not known is adopted, and leaves by the same rules; a trigger that has no entry in the
table changes nothing. No I/O, no clock: `now_s` is wall time and is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import msgspec
from msgspec import Struct, field, structs

from holdfast.health.bounds import Count, UnixS
from holdfast.rollout.revision import Pair, Part, Revision, changes
from holdfast.rollout.trial import TRIAL_S, RequestCounts, SetTrial

# -- one replica: its desired state, what is observed of it, and what is remembered


CRASHES_MAX = 3  # in a row: one may be a person's kill, two its echo


class DesiredState(StrEnum):
    """What a replica should do."""

    STAND_BY = "stand by"  # beside an old one, until that has handed over
    SERVE = "serve"
    DRAIN = "drain"
    STOP = "stop"


DESIRED_RUNNING = (DesiredState.SERVE, DesiredState.STAND_BY)


class ReplicaStage(StrEnum):
    """What a replica is observed to do."""

    ABSENT = "absent"
    STARTING = "starting"  # or waiting to be started again
    STANDBY = "standing by"
    SERVING = "serving"
    DRAINING = "draining"
    LEAVING = "leaving"  # it was told to stop


class ObservedReplica(Struct, frozen=True, kw_only=True):
    """What is observed of one replica. A frontend is admitted, and has its whole weight, when it answers."""

    service: str
    set_id: str
    stage: ReplicaStage
    admitted: bool = False  # by a frontend
    weight: float = 0.0  # control's verdict: above 0 its canary passed, at 1 nothing is held against it
    streams: int = 0
    crashes: int = 0  # in a row
    trouble: str = ""  # why it can never serve; reads after its name: `failed its canary: …`
    is_shut: bool = False  # its breaker has opened: its own failures took its traffic away
    how: str = ""  # it last crashed, or what it waits for
    fits_beside: bool = False  # its device has the memory for a second engine

    @property
    def is_broken(self) -> bool:
        return bool(self.trouble) or self.crashes >= CRASHES_MAX


class ReplicaState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    service: str
    set_id: str
    pair: Pair
    desired: DesiredState = field(default=DesiredState.SERVE, name="want")
    # How long it may drain; None: it does not, or has.
    drain_until_s: UnixS | None = field(default=None, name="until_s")
    # When the action that it needs was last returned; None: it needs none, or not yet.
    sent_at_s: UnixS | None = field(default=None, name="asked_s")
    counted: bool = False  # ever
    beside: str = ""  # whose device it shares, and whom it takes over from


# -- which replicas count, and which may leave


def part_of(service: str, target: Revision, stable: Revision | None) -> Part:
    """Return a service as it should be, or was."""
    for revision in (target, stable):
        if revision is not None and service in revision.parts:
            return revision.parts[service]
    return Part(set_id="", replicas=0)


@dataclass(slots=True)
class WorkloadReplicas:
    """All replicas, by name and oldest first. `stable` was last in place; `paused` are services that wait."""

    target: Revision
    stable: Revision | None
    replicas: dict[str, ReplicaState]
    observed: dict[str, ObservedReplica]
    room: dict[str, int]
    now_s: float
    serial: int
    paused: frozenset[str] = frozenset()
    is_undo: bool = False  # what leaves is bad
    tried: frozenset[str] = frozenset()  # services whose new set was, by its customers

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
        """Return whether a replica takes requests. One that should drain does until all frontends have read that; they
        report its replacement as late."""
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
        """Return the replicas of a service's desired set, or of any other."""
        known = self.replicas.items()
        return [n for n, one in known if one.service == service and one.desired in desired and self.is_old(n) == old]

    def missing(self, service: str) -> int:
        return self.target.parts[service].replicas - len(self.select(service, old=False))

    def is_up(self, service: str) -> bool:
        return self.missing(service) <= 0 and all(map(self.counts, self.select(service, old=False)))

    def is_new(self, service: str) -> bool:
        """Return whether the desired set of a service was never in place."""
        return self.stable is None or self.stable.sets.get(service) != self.target.sets[service]

    def is_in_place(self) -> bool:
        settled = all(
            one.desired is DesiredState.SERVE and not self.is_old(name) for name, one in self.replicas.items()
        )
        return settled and all(self.is_up(service) and self.missing(service) == 0 for service in self.target.parts)

    def places(self, service: str) -> list[str]:
        """Return the replicas with a place of their own, whatever is desired of them."""
        return [n for n, one in self.replicas.items() if one.service == service and one.beside not in self.replicas]

    def leaving(self, service: str) -> list[str]:
        """Return the replicas that were told to leave."""
        return [
            name for name, one in self.replicas.items() if one.service == service and one.desired not in DESIRED_RUNNING
        ]

    def is_busy(self, service: str) -> bool:
        """Return whether progress should come by itself, and soon: a replica is not yet what it should be, or gone."""
        draining = any(self.replicas[name].drain_until_s is not None for name in self.leaving(service))
        if service in self.paused or draining or any(map(self.is_being_tried, (service, *self.part(service).peers))):
            return False
        return bool(self.leaving(service)) or (service in self.target.parts and not self.is_up(service))

    # -- how many there must be

    def _shares(self, without: str) -> dict[str, Fraction]:
        """Return how much of each service counts, as a share of its replicas; of those that work in pairs only as much
        as their peers do. No replica leaves for one that is on trial, so that does not count."""
        there = [one for name, one in self.replicas.items() if name != without and self.is_proven(name)]
        counted = Counter((one.service, one.set_id) for one in there)
        sizes = {service: self.part(service).replicas for service, _ in counted}
        parts = {one: Fraction(number, sizes[one[0]]) for one, number in counted.items() if sizes[one[0]]}
        bonds = self._peer_sets()
        shares = dict.fromkeys(self.target.parts, Fraction(0))
        for own in parts:
            peers: dict[str, Fraction] = {}
            for peer in bonds.get(own, ()):
                if self.part(peer[0]).replicas:
                    peers[peer[0]] = peers.get(peer[0], Fraction(0)) + parts.get(peer, Fraction(0))
            if own[0] in shares:
                shares[own[0]] += min(parts[own], *peers.values()) if peers else parts[own]
        return shares

    def _peer_sets(self) -> dict[tuple[str, str], set[tuple[str, str]]]:
        """Return, for each set that works in pairs, the sets that a revision has it with. One that a revision has alone
        needs no other."""
        pairs = [((one.service, one.set_id), one.pair) for one in self.replicas.values()]
        pairs += [((name, part.set_id), self.target.pair(name)) for name, part in self.target.parts.items()]
        alone = {own for own, pair in pairs if len(pair) == 1}
        bonds: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for own, peer in {(own, peer) for own, pair in pairs for peer in pair if peer != own}:
            for one, other in ((own, peer), (peer, own)):
                if one not in alone:
                    bonds.setdefault(one, set()).add(other)
        return bonds

    def is_enough(self, without: str) -> bool:
        """Return whether those that count, except one, are as many as was promised for all that it works with."""
        parts = self.target.parts
        pair = [service for service, _ in self.replicas[without].pair if service in parts and parts[service].replicas]
        spares = [Fraction(self._spare(service, without), parts[service].replicas) for service in pair]
        shares = self._shares(without)
        return all(shares[service] >= 1 - max(spares) for service in pair)

    def _spare(self, service: str, leaver: str) -> int:
        """Return how many of the desired replicas need not count when this one has left."""
        part = self.target.parts[service]
        if self.replacements(leaver) or (self.lacks_room(service) and not self.share_candidate(service)):
            return max(1, part.unavailable)
        return 0 if part.surge and self.is_on_trial(service) else part.unavailable

    def is_on_trial(self, service: str) -> bool:
        """Return whether a new set has not shown yet that it can take over from others that are still there."""
        if not self.is_new(service) or not self.select(service, old=True, desired=tuple(DesiredState)):
            return False
        new = self.select(service, old=False, desired=tuple(DesiredState))
        return service not in self.tried or not any(self.replicas[name].counted for name in new)

    def is_being_tried(self, service: str) -> bool:
        """Return whether one of a set on trial counts, and only clients' requests are waited for."""
        own = self.select(service, old=False) if service in self.target.parts else []
        return any(map(self.counts, own)) and self.is_on_trial(service)

    def is_proven(self, name: str) -> bool:
        """Return whether it counts, and its set is not on trial."""
        return self.counts(name) and (self.is_old(name) or not self.is_on_trial(self.replicas[name].service))

    def free_places(self, service: str) -> int:
        """Return how many more may be started in places of their own."""
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
        """Return whether replicas are missing, none starts or leaves, and there is no place for one more."""
        part = self.target.parts[service]
        no_room = self.room.get(service, 1) <= 0 or part.surge == part.unavailable == 0
        return no_room and self.is_waiting(service)

    def is_waiting(self, service: str) -> bool:
        """Return whether replicas are missing, and none starts or leaves."""
        moving = [
            n for n, one in self.replicas.items() if one.service == service and one.desired is not DesiredState.SERVE
        ]
        return self.missing(service) > 0 and not moving and all(map(self.counts, self.select(service, old=False)))

    def blocks_a_place(self, name: str) -> bool:
        """Return whether it is of a set that is undone, does not count, and has the place that one which could serve
        waits for: then nothing else would happen."""
        service = self.replicas[name].service
        if not self.is_undo or self.counts(name) or not self.is_old(name) or service not in self.target.parts:
            return False
        return self.is_waiting(service) and self.free_places(service) <= 0

    def share_candidate(self, service: str) -> str:
        """Return an old replica that a new one may stand by beside; "": there is none."""
        return next(
            (n for n in self.select(service, old=True, desired=(DesiredState.SERVE,)) if self.seen(n).fits_beside), ""
        )

    def replacements(self, name: str) -> list[str]:
        """Return the replicas that stand beside it, or took over from it."""
        return [heir for heir, one in self.replicas.items() if one.beside == name and one.desired in DESIRED_RUNNING]

    def may_leave(self, name: str) -> bool:
        """Return whether it may leave. One that never counted, is broken, has lost its peers or blocks a place takes
        nothing away; any other may leave only if enough are left."""
        takes_nothing = not self.counts(name) and (self.seen(name).is_broken or not self.replicas[name].counted)
        return takes_nothing or self.has_lost_peers(name) or self.blocks_a_place(name) or self.is_enough(name)

    def has_lost_peers(self, name: str) -> bool:
        """Return whether it works in pairs, and every replica that it could work with is gone for good."""
        own = (self.replicas[name].service, self.replicas[name].set_id)
        staying = {(one.service, one.set_id) for one in self.replicas.values() if one.desired in DESIRED_RUNNING}
        peers = {peer for peer in self._peer_sets().get(own, ()) if self.part(peer[0]).replicas}
        return own in staying and bool(peers) and not peers & staying

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
        """Return whether no other of its set serves or drains: then its streams can continue only on it."""
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


# -- what is desired next of each replica


def move_replicas(workload: WorkloadReplicas) -> None:
    """Change the desired state of replicas, as far as the rules allow now."""
    _reconsider_unsent_drains(workload)
    _hand_over(workload)
    for service in workload.target.parts:
        _resume_draining(workload, service)
    for service in _unpaused(workload):
        _start(workload, service)
    _retire_all(workload)
    _stop_drained(workload)


def _unpaused(workload: WorkloadReplicas) -> list[str]:
    return [service for service in workload.target.parts if service not in workload.paused]


def _reconsider_unsent_drains(workload: WorkloadReplicas) -> None:
    """Decide again about replicas that should drain, serve and were not told (the process that decided it died)."""
    for name, one in list(workload.replicas.items()):
        untold = (
            one.desired is DesiredState.DRAIN
            and one.sent_at_s is None
            and workload.seen(name).stage is ReplicaStage.SERVING
        )
        if untold and not workload.replacements(name):
            workload.set_desired(name, DesiredState.SERVE)


def _hand_over(workload: WorkloadReplicas) -> None:
    """Let a standby take over when it is ready: from then on the replica that it stands beside drains."""
    for name, one in list(workload.replicas.items()):
        if one.desired is not DesiredState.STAND_BY or workload.is_old(name):
            continue
        host = workload.replicas.get(one.beside)
        if host is None or host.desired is not DesiredState.SERVE:
            workload.set_desired(name, DesiredState.SERVE)
        elif (
            workload.seen(name).stage is ReplicaStage.STANDBY
            and one.service not in workload.paused
            and workload.is_enough(one.beside)
        ):
            workload.set_desired(name, DesiredState.SERVE)
            _leave(workload, one.beside)


def _resume_draining(workload: WorkloadReplicas, service: str) -> None:
    """Let draining replicas serve that are desired again; also where it is paused, because it is no step forward."""
    for name in workload.select(service, old=False, desired=(DesiredState.DRAIN,))[: max(0, workload.missing(service))]:
        workload.set_desired(name, DesiredState.SERVE)


def _start(workload: WorkloadReplicas, service: str) -> None:
    few = min(workload.missing(service), workload.free_places(service))
    if workload.is_on_trial(service):
        few = min(few, 1 - len(workload.select(service, old=False, desired=(DesiredState.SERVE,))))
    for _ in range(few):
        workload.add(service)
    if workload.lacks_room(service) and (host := workload.share_candidate(service)):
        workload.add(service, beside=host)


def _retire_all(workload: WorkloadReplicas) -> None:
    """Retire the surplus first, those that serve least and then the newest; then other sets; last whole services that
    are no longer desired."""
    parts = workload.target.parts
    for service in _unpaused(workload):
        newest = list(reversed(workload.select(service, old=False)))
        newest.sort(key=workload.serving)
        _retire(workload, newest[: max(0, -workload.missing(service))])
        _retire(workload, sorted(workload.select(service, old=True), key=workload.serving))
    gone = [name for name, one in workload.replicas.items() if one.service not in parts]
    if all(map(workload.is_up, parts)):
        _retire(workload, gone)
    elif any(map(workload.lacks_room, parts)) and all(
        workload.replicas[name].desired in DESIRED_RUNNING for name in gone
    ):
        _retire(workload, gone[:1])


def _retire(workload: WorkloadReplicas, names: list[str]) -> None:
    staying: set[str] = set()  # of sets: where one that counts may not leave, no other may
    for name in names:
        one = workload.replicas[name]
        if (
            one.desired not in DESIRED_RUNNING
            or workload.replacements(name)
            or (one.set_id in staying and workload.counts(name))
        ):
            continue
        if workload.may_leave(name):
            _leave(workload, name)
        elif workload.counts(name):
            staying.add(one.set_id)


def _leave(workload: WorkloadReplicas, name: str) -> None:
    """Drain a replica; one that only stood by just ends, and the one that it stood beside serves again."""
    one, part = workload.replicas[name], workload.part(workload.replicas[name].service)
    waited_for = one.service in workload.target.parts and workload.lacks_room(one.service)
    desired = DesiredState.STOP if one.desired is DesiredState.STAND_BY else DesiredState.DRAIN
    workload.set_desired(name, desired, part.swap_drain_s if waited_for else part.drain_s)
    if not waited_for and not workload.is_undo:
        _leave_as_last(workload, one)
    host = workload.replicas.get(one.beside)
    if host is not None and host.desired is DesiredState.DRAIN and not one.counted:
        workload.set_desired(one.beside, DesiredState.SERVE)


def _leave_as_last(workload: WorkloadReplicas, last: ReplicaState) -> None:
    """Give all that drain, of a set of which no replica stays, the time that their streams take to end."""
    its = {n: one for n, one in workload.replicas.items() if (one.service, one.set_id) == (last.service, last.set_id)}
    until_s = workload.now_s + workload.part(last.service).last_drain_s
    if all(one.desired not in DESIRED_RUNNING for one in its.values()):
        workload.replicas |= {
            n: structs.replace(one, drain_until_s=until_s) for n, one in its.items() if one.drain_until_s
        }


def _stop_drained(workload: WorkloadReplicas) -> None:
    """Stop what has drained, but one with a replacement only when that counts and was tried. Forget what is gone."""
    for name, one in list(workload.replicas.items()):
        if one.desired is DesiredState.DRAIN and workload.has_drained(name):
            workload.replicas[name] = structs.replace(one, drain_until_s=None)
            if all(map(workload.is_proven, workload.replacements(name))):
                workload.set_desired(name, DesiredState.STOP)
        if workload.replicas[name].desired is DesiredState.STOP and workload.seen(name).stage is ReplicaStage.ABSENT:
            del workload.replicas[name]


VERSION = 1  # of `RolloutState` as it is written
RETRY_S = 10.0  # long against what carrying something out takes, short against a deadline


class RolloutPhase(StrEnum):
    """The phase of a rollout."""

    STEADY = "steady"
    ROLLING = "rolling"
    UNDOING = "undoing"
    STUCK = "stuck"


class Trigger(StrEnum):
    """What an observation shows of the whole."""

    NEWER = "a newer revision is wanted"
    FAILED = "its new sets are bad, and there is a way back"
    BLOCKED = "its time is over, or it is bad and there is no way back"
    WHOLE = "everything is in place"


# -- what is seen


class Observation(Struct, frozen=True, kw_only=True):
    """Everything that is observed at one moment."""

    desired: Revision
    replicas: dict[str, ObservedReplica] = {}
    room: dict[str, int] = {}  # how many more of a service can be placed; not said: as many as it takes
    # By service, and by the set's id. None: reports were not read for long enough to know.
    traffic: dict[str, dict[str, RequestCounts]] | None = {}
    refused: dict[str, str] = {}  # by a set's id: why none of it can ever be started here
    unchecked: frozenset[str] = frozenset()  # services whose new set needs a control's verdict, while no control leads


# -- what is remembered


class ServiceProgress(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a service and its peers ever came towards this revision, and when. The clock pauses while no progress is
    due: where it is paused, or waits for others, or drains within its bound."""

    best: int
    progress_at_s: UnixS = field(name="moved_s")
    paused_since_s: UnixS | None = field(default=None, name="still_s")  # since when its clock stands still


class Downtime(Struct, frozen=True, forbid_unknown_fields=True):
    """How long requests to a service found no replica during this rollout, at a stretch."""

    longest_s: float = 0.0  # of those that are over
    since_s: UnixS | None = None  # when the one under way began

    def until(self, now_s: float) -> float:
        """Return the longest one, including the one that lasts."""
        return max(self.longest_s, 0.0 if self.since_s is None else now_s - self.since_s)


class RolloutState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a rollout remembers."""

    version: int = VERSION
    phase: RolloutPhase = RolloutPhase.STEADY
    target: Revision  # what is worked at
    stable: Revision | None = None  # what was last in place
    desired_number: Count = field(default=0, name="wanted")  # of the newest desired revision that was read
    undone: Count = 0  # that one, if it was undone
    why: str = ""  # it was undone
    stuck: str = ""  # why it is
    replicas: dict[str, ReplicaState] = {}
    serial: Count = 0  # of the last replica that was named
    progress: dict[str, ServiceProgress] = {}
    trials: dict[str, UnixS | None] = {}  # by when a service's new set must have been tried; None: it has been
    began_s: UnixS = 0.0
    ended_s: UnixS | None = None
    in_place_since_s: UnixS | None = field(default=None, name="whole_s")  # None: not everything is in place
    extra_replicas_max: int = field(default=0, name="surged")  # the most of a service that there were beyond its count
    downtimes: dict[str, Downtime] = field(default_factory=dict, name="held")  # by service, of those that had any

    @property
    def tried(self) -> frozenset[str]:
        """The services whose new set was tried."""
        return frozenset(service for service, until_s in self.trials.items() if until_s is None)


NOTHING = RolloutState(target=Revision(number=0, parts={}))


def encode(state: RolloutState) -> bytes:
    return msgspec.json.encode(state)


def decode(data: bytes) -> RolloutState:
    """Raise ValueError if another version wrote it, or it is invalid: the reader then leaves everything as it is."""
    state = msgspec.json.decode(data, type=RolloutState)
    if state.version != VERSION:
        raise ValueError(f"a rollout's memory of version {state.version}; version {VERSION} is known here")
    return state


def restore(state: RolloutState, now_s: float) -> RolloutState:
    """Return a state to continue from that another process wrote: it may have carried out what it decided or not, and
    its clock may have been ahead."""
    replicas = {}
    for name, one in state.replicas.items():
        part = part_of(one.service, state.target, state.stable)
        until_s = (
            None if one.drain_until_s is None else min(one.drain_until_s, now_s + max(part.drain_s, part.last_drain_s))
        )
        replicas[name] = structs.replace(one, sent_at_s=None, drain_until_s=until_s)
    progress = {}
    for service, at in state.progress.items():
        still_s = None if at.paused_since_s is None else min(at.paused_since_s, now_s)
        progress[service] = structs.replace(at, progress_at_s=min(at.progress_at_s, now_s), paused_since_s=still_s)
    whole_s = None if state.in_place_since_s is None else min(state.in_place_since_s, now_s)
    downtimes = {}
    for service, away in state.downtimes.items():
        downtimes[service] = structs.replace(away, since_s=None if away.since_s is None else min(away.since_s, now_s))
    trials = {key: None if until_s is None else min(until_s, now_s + TRIAL_S) for key, until_s in state.trials.items()}
    changed = {"replicas": replicas, "progress": progress, "trials": trials, "downtimes": downtimes}
    return structs.replace(state, **changed, in_place_since_s=whole_s)


# -- what is to be done


class StartReplica(Struct, frozen=True):
    """Start a replica of this set under this name. `beside`: to stand by on that one's device."""

    name: str
    service: str
    set_id: str
    beside: str = ""


class WakeReplica(Struct, frozen=True):
    """Let a standby serve."""

    name: str


class DrainReplica(Struct, frozen=True):
    """Send it nothing new. A worker's streams are handed over; a frontend closes connections after their answers."""

    name: str


class ResumeServing(Struct, frozen=True):
    """Let a draining replica serve again."""

    name: str


class StopReplica(Struct, frozen=True):
    """End it."""

    name: str


class LogLine(Struct, frozen=True):
    """A line of the log, for people."""

    text: str


ReplicaAction = WakeReplica | DrainReplica | ResumeServing | StopReplica
RolloutAction = StartReplica | ReplicaAction | LogLine
Outcome = tuple[RolloutState, tuple[RolloutAction, ...]]

NEEDED_ACTIONS: dict[DesiredState, dict[ReplicaStage, type[StartReplica | ReplicaAction]]] = {
    DesiredState.STAND_BY: {ReplicaStage.ABSENT: StartReplica},
    DesiredState.SERVE: {
        ReplicaStage.ABSENT: StartReplica,
        ReplicaStage.STANDBY: WakeReplica,
        ReplicaStage.DRAINING: ResumeServing,
    },
    DesiredState.DRAIN: {ReplicaStage.SERVING: DrainReplica},
    DesiredState.STOP: {
        ReplicaStage.STARTING: StopReplica,
        ReplicaStage.STANDBY: StopReplica,
        ReplicaStage.SERVING: StopReplica,
        ReplicaStage.DRAINING: StopReplica,
    },
}


# -- steps


def step(state: RolloutState, observation: Observation, now_s: float) -> Outcome:
    """Return the next state, to be written down first, and then the actions, in order."""
    return _Step(state, observation, now_s).run()


def next_deadline_s(state: RolloutState) -> float | None:
    """Return when to step again at the latest; None: when something changes."""
    due = [one.sent_at_s + RETRY_S for one in state.replicas.values() if one.sent_at_s is not None]
    due += [one.drain_until_s for one in state.replicas.values() if one.drain_until_s is not None]
    trials = [until_s for until_s in state.trials.values() if until_s is not None]
    due += trials
    if state.in_place_since_s is not None:
        due.append(max(state.in_place_since_s + state.target.watch_s, *trials, 0.0))
    if state.phase in (RolloutPhase.ROLLING, RolloutPhase.UNDOING):
        running = {service: at.progress_at_s for service, at in state.progress.items() if at.paused_since_s is None}
        bounds_s = {service: part_of(service, state.target, state.stable).deadline_s for service in running}
        due += [moved_s + bounds_s[service] for service, moved_s in running.items()]
    return min(due, default=None)


class _Step:
    """One observation, and what follows from it."""

    def __init__(self, state: RolloutState, observation: Observation, now_s: float) -> None:
        self.observation, self.now_s = observation, now_s
        self.actions: list[RolloutAction] = []
        self.state = state
        replicas, serial = dict(state.replicas), state.serial
        self.workload = WorkloadReplicas(
            state.target, state.stable, replicas, observation.replicas, observation.room, now_s, serial
        )

    def run(self) -> Outcome:
        self._adopt_unknown()
        self._update_target()
        self._apply(Trigger.NEWER, self.observation.desired.number > self.state.desired_number)
        self._note_progress()
        if why := self._failure_reason():
            self._apply(Trigger.FAILED if self.state.stable is not None else Trigger.BLOCKED, True, why)
        elif why := self._late_reason():
            self._apply(Trigger.BLOCKED, True, why)
        self._note_trials()
        move_replicas(self.workload)
        self._note_progress()
        self._note_downtimes()
        self._apply(Trigger.WHOLE, self._is_over())
        self._emit_actions()
        return structs.replace(self.state, replicas=self.workload.replicas, serial=self.workload.serial), tuple(
            self.actions
        )

    def _apply(self, trigger: Trigger, holds: bool, why: str = "") -> None:
        """Make the transition of a trigger, if the observation shows it."""
        become = TABLE.get((self.state.phase, trigger))
        if holds and become is not None:
            become(self, why)

    def _set_state(self, state: RolloutState) -> None:
        is_rolling = state.phase is RolloutPhase.ROLLING
        paused = {service for service, part in state.target.parts.items() if part.paused and is_rolling}
        if state.stable is not None:  # else nothing serves that a step forward could harm
            paused |= self.observation.unchecked & state.target.parts.keys()
        self.state = state
        self.workload.target, self.workload.stable = state.target, state.stable
        self.workload.paused = frozenset(paused)
        self.workload.is_undo = bool(state.undone)
        self.workload.tried = state.tried

    def _adopt_unknown(self) -> None:
        """Adopt replicas that are there and not known, and note which count."""
        workload = self.workload
        for name, seen in self.observation.replicas.items():
            if name not in workload.replicas and seen.stage is not ReplicaStage.ABSENT:
                workload.replicas[name] = self._adopted(seen)
                number = name.rpartition("-")[2]
                workload.serial = max(workload.serial, int(number) if number.isdecimal() else 0)
        for name, one in workload.replicas.items():
            if not one.counted and workload.counts(name):
                workload.replicas[name] = structs.replace(one, counted=True)

    def _adopted(self, seen: ObservedReplica) -> ReplicaState:
        """Return the record of a replica that is not known. It may have counted, unless its set is what the revision
        brings; a standby that stands beside no replica is not kept."""
        desired = (
            DesiredState.STOP if seen.stage in (ReplicaStage.STANDBY, ReplicaStage.LEAVING) else DesiredState.SERVE
        )
        known = (self.state.stable, self.state.target, self.observation.desired)
        its = [one for one in known if one is not None and one.sets.get(seen.service) == seen.set_id]
        pair = its[0].pair(seen.service) if its else ((seen.service, seen.set_id),)
        counted = seen.set_id != self.observation.desired.sets.get(seen.service)
        return ReplicaState(service=seen.service, set_id=seen.set_id, pair=pair, desired=desired, counted=counted)

    def _update_target(self) -> None:
        """Take over a desired state with the same revision but other counts or settings."""
        state, desired = self.state, self.observation.desired
        if desired.number == state.target.number == state.desired_number and desired.sets == state.target.sets:
            stable = desired if state.stable is not None and state.stable.number == desired.number else state.stable
            state = structs.replace(state, target=desired, stable=stable)
        self._set_state(state)

    # -- how it goes

    def _is_over(self) -> bool:
        """Return whether all is in place and, where there is a way back, was checked, watched and tried."""
        state = self.state
        if state.in_place_since_s is None or state.stable is None or not state.target.brings(state.stable):
            return state.in_place_since_s is not None
        if self.observation.unchecked:
            return False
        return state.tried == state.trials.keys() and self.now_s >= state.in_place_since_s + state.target.watch_s

    def _note_progress(self) -> None:
        """Note progress: one more that counts, or one less that is old and not leaving."""
        state, workload = self.state, self.workload
        if state.phase is RolloutPhase.STEADY:
            return
        services = sorted({*state.target.parts, *(one.service for one in workload.replicas.values())})
        progress = {service: self._progress(service, state.progress.get(service)) for service in services}
        surged = max(
            [
                state.extra_replicas_max,
                *(len(workload.places(name)) - workload.part(name).replicas for name in services),
            ]
        )
        whole_s = (
            (self.now_s if state.in_place_since_s is None else state.in_place_since_s)
            if workload.is_in_place()
            else None
        )
        self._set_state(structs.replace(state, progress=progress, in_place_since_s=whole_s, extra_replicas_max=surged))

    def _progress(self, service: str, last: ServiceProgress | None) -> ServiceProgress:
        workload, score = self.workload, 0
        for name in {service, *workload.part(service).peers}:
            score += sum(map(workload.counts, workload.select(name, old=False))) - len(workload.select(name, old=True))
        if last is None or score > last.best:
            return ServiceProgress(score, self.now_s, None if workload.is_busy(service) else self.now_s)
        if not workload.is_busy(service):
            return structs.replace(
                last, paused_since_s=self.now_s if last.paused_since_s is None else last.paused_since_s
            )
        away_s = 0.0 if last.paused_since_s is None else self.now_s - last.paused_since_s
        return structs.replace(last, progress_at_s=last.progress_at_s + away_s, paused_since_s=None)

    def _note_trials(self) -> None:
        """Begin a trial when one of a new set counts first; end it for good when the set was tried, or is late."""
        workload, trials = self.workload, dict(self.state.trials)
        for service in filter(workload.is_new, self.state.target.parts):
            if service in trials or any(
                workload.replicas[name].counted for name in workload.select(service, old=False)
            ):
                until_s = trials.get(service, self.now_s + TRIAL_S)
                tried = self.observation.traffic is not None and self._is_tried(service, until_s)
                trials[service] = None if tried or until_s is None or self.now_s >= until_s else until_s
        self._set_state(structs.replace(self.state, trials=trials))

    def _is_tried(self, service: str, until_s: float | None) -> bool:
        """Return whether the new set has had enough good requests, or gets none while the old ones are there."""
        trial, part = self._trial(service), self.state.target.parts[service]
        is_without_traffic = until_s is not None and self.now_s >= until_s - TRIAL_S + part.no_traffic_s
        return trial.is_tried or (is_without_traffic and not trial.own.attempts)

    def _trial(self, service: str) -> SetTrial:
        part, traffic = self.state.target.parts[service], (self.observation.traffic or {}).get(service, {})
        is_shut = any(self.workload.seen(name).is_shut for name in self.workload.select(service, old=False))
        return SetTrial.of(traffic, part.set_id, part.errors_percent_max, is_shut=is_shut)

    def _note_downtimes(self) -> None:
        """Note the downtimes of services that were served before."""
        state, downtimes = self.state, dict(self.state.downtimes)
        before = state.stable.parts if state.stable is not None and state.phase is not RolloutPhase.STEADY else {}
        for service in sorted(before.keys() & state.target.parts.keys()):
            last = downtimes.get(service, Downtime())
            if self.workload.is_served(service) or not state.target.parts[service].replicas:
                last = Downtime(last.until(self.now_s))
            elif last.since_s is None:
                last = structs.replace(last, since_s=self.now_s)
            if last != Downtime():
                downtimes[service] = last
        self._set_state(structs.replace(state, downtimes=downtimes))

    def _failure_reason(self) -> str:
        """Return why the new sets are bad, in one line; "": nothing shows it."""
        if self.state.phase is RolloutPhase.STEADY:
            return ""
        new = filter(self.workload.is_new, self.state.target.parts)
        whys = (
            self._broken_reason(service) or self._error_rate_reason(service) or self._overdue_reason(service)
            for service in new
        )
        return next((why for why in whys if why), "")

    def _broken_reason(self, service: str) -> str:
        if why := self.observation.refused.get(self.state.target.sets[service]):
            return f"{service} cannot be started: {why}"
        for name in self.workload.select(service, old=False):
            seen = self.workload.seen(name)
            if seen.trouble:
                return f"{name} {seen.trouble}"
            if seen.crashes >= CRASHES_MAX:
                return f"{name} crashed {seen.crashes} times in a row" + (f": {seen.how}" if seen.how else "")
        return ""

    def _error_rate_reason(self, service: str) -> str:
        """Return the error rate of a set of whose requests too many fail, and not so everywhere; also when its breakers
        have opened."""
        trial = self._trial(service)
        serves = any(self.workload.seen(name).admitted for name in self.workload.select(service, old=False))
        told = f"{trial.own.failed} of {trial.own.attempts} requests to the new {service} failed"
        told += f" (its rollout.errorPercentMax is {trial.percent_max})"
        return told if serves and trial.is_bad else ""

    def _is_overdue(self, service: str) -> bool:
        at = self.state.progress[service]
        return at.paused_since_s is None and self.now_s >= at.progress_at_s + self.workload.part(service).deadline_s

    def _overdue_reason(self, service: str) -> str:
        """Return why it makes no progress, for want of a replica that serves; "": it does."""
        if self.workload.is_up(service) or not self._is_overdue(service):
            return ""
        bound = f"within {self.state.target.parts[service].deadline_s:g} s"
        waiting = next(
            (name for name in self.workload.select(service, old=False) if not self.workload.counts(name)), ""
        )
        if not waiting:
            return "" if self.workload.leaving(service) else f"there was no room for another {service} {bound}"
        how = self.workload.seen(waiting).how
        return f"{waiting} did not come to serve {bound}" + (f": {how}" if how else "")

    def _late_reason(self) -> str:
        """Return what is overdue although nothing is wrong with the new sets; "": nothing."""
        for service in filter(self._is_overdue, self.state.progress):
            if service in self.state.target.parts and (reason := self._overdue_reason(service)):
                return reason
            if leavers := self.workload.leaving(service):
                return f"{leavers[0]} does not leave"
        return ""

    # -- transitions, named by where they go

    def become_rolling(self, _why: str) -> None:
        desired, before = self.observation.desired, self.state
        instead = "" if before.phase is RolloutPhase.STEADY else f" in place of {before.target.number}"
        lines = "; ".join(changes(before.target, desired)) or "nothing is replaced"
        self.actions.append(LogLine(f"revision {desired.number} begins{instead}: {lines}"))
        begun = RolloutState(
            phase=RolloutPhase.ROLLING, target=desired, desired_number=desired.number, began_s=self.now_s
        )
        self._set_state(structs.replace(begun, stable=before.stable))

    def become_undoing(self, why: str) -> None:
        state, back = self.state, self.state.stable
        assert back is not None, "only what can be undone is"
        bad = state.target.number
        self.actions.append(LogLine(f"revision {bad} is undone: {why}; going back to revision {back.number}"))
        changed = {"phase": RolloutPhase.UNDOING, "target": back, "undone": bad, "why": why, "stuck": ""}
        self._set_state(structs.replace(state, **changed, progress={}, trials={}))

    def become_stuck(self, why: str) -> None:
        state = self.state
        self.actions.append(LogLine(f"revision {state.target.number} is stuck: {why}"))
        self._set_state(structs.replace(state, phase=RolloutPhase.STUCK, stuck=why))

    def become_steady(self, _why: str) -> None:
        state = self.state
        again = " again" if state.undone else ""
        after_s = self.now_s - state.began_s
        down = "".join(f"; no {name} served for {one.longest_s:.1f} s" for name, one in state.downtimes.items())
        self.actions.append(LogLine(f"revision {state.target.number} is in place{again}, after {after_s:.1f} s{down}"))
        changed = {"phase": RolloutPhase.STEADY, "stable": state.target, "stuck": "", "ended_s": self.now_s}
        self._set_state(structs.replace(state, **changed, progress={}, trials={}, in_place_since_s=None))

    # -- what is said

    def _emit_actions(self) -> None:
        replicas = self.workload.replicas
        for name, one in replicas.items():
            action = NEEDED_ACTIONS[one.desired].get(self.workload.seen(name).stage)
            asked_s = one.sent_at_s if action is not None else None
            if action is not None and (asked_s is None or not asked_s <= self.now_s < asked_s + RETRY_S):
                asked_s = self.now_s
                beside = one.beside if one.beside in replicas else ""
                if issubclass(action, StartReplica):
                    self.actions.append(StartReplica(name, one.service, one.set_id, beside))
                else:
                    self.actions.append(action(name))
            if asked_s != one.sent_at_s:
                replicas[name] = structs.replace(one, sent_at_s=asked_s)


TABLE: dict[tuple[RolloutPhase, Trigger], Callable[[_Step, str], None]] = {
    (RolloutPhase.STEADY, Trigger.NEWER): _Step.become_rolling,
    (RolloutPhase.ROLLING, Trigger.NEWER): _Step.become_rolling,
    (RolloutPhase.ROLLING, Trigger.FAILED): _Step.become_undoing,
    (RolloutPhase.ROLLING, Trigger.BLOCKED): _Step.become_stuck,
    (RolloutPhase.ROLLING, Trigger.WHOLE): _Step.become_steady,
    (RolloutPhase.UNDOING, Trigger.NEWER): _Step.become_rolling,
    (RolloutPhase.UNDOING, Trigger.BLOCKED): _Step.become_stuck,
    (RolloutPhase.UNDOING, Trigger.WHOLE): _Step.become_steady,
    (RolloutPhase.STUCK, Trigger.NEWER): _Step.become_rolling,
    (RolloutPhase.STUCK, Trigger.FAILED): _Step.become_undoing,
    (RolloutPhase.STUCK, Trigger.WHOLE): _Step.become_steady,
}
