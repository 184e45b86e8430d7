"""A rollout in plain words: one line for the whole, one for each service, and whether it is over. Pure.

Always true: every phase has its line, and says what it waits for where it waits; nothing is stored that is said here.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core.enums import OpenStrEnum
from holdfast.rollout.machine import (
    DESIRED_RUNNING,
    DesiredState,
    Downtime,
    Observation,
    ObservedReplica,
    ReplicaStage,
    ReplicaState,
    RolloutPhase,
    RolloutState,
    WorkloadReplicas,
)


class RolloutResult(OpenStrEnum):
    """Whether what was asked for is there; a command that waits ends with any but `UNDER_WAY` and `PAUSED`."""

    DONE = "done"
    UNDER_WAY = "under way"
    PAUSED = "paused"
    UNDONE = "undone"
    STUCK = "stuck"


class ServiceStatus(Struct, frozen=True):
    """How far one service is."""

    name: str
    wanted: int
    new: int  # of the wanted set, that count
    old: int  # of other sets, that count
    there: int  # in all
    waits_for: str = ""
    held_s: float = 0.0  # how long requests found no replica during this rollout, at a stretch
    is_unwell: bool = False  # one of the wanted set is broken, and what is waited for says which

    def __str__(self) -> str:
        old = f", {self.old} of an earlier set" if self.old else ""
        waits = f"; {self.waits_for}" if self.waits_for else ""
        down = f"; none did for {self.held_s:.1f} s" if self.held_s else ""
        return f"{self.name}: {self.new} of {self.wanted} serve{old}{down}{waits}"


class RolloutReport(Struct, frozen=True):
    """The report of a rollout."""

    state: RolloutResult = field(name="verdict")  # as records have it
    revision: int  # the newest that was asked for
    headline: str
    services: tuple[ServiceStatus, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether what was asked for is there, and nothing else: also a count that changed while nothing was
        replaced."""
        return self.state is RolloutResult.DONE and all(one.new == one.wanted == one.there for one in self.services)

    @property
    def is_unwell(self) -> bool:
        """Whether what was asked for is in place, and has a fault that no undo mends."""
        return self.state is RolloutResult.DONE and any(one.is_unwell for one in self.services)

    @property
    def serves(self) -> bool:
        """Whether a replica of every desired service serves."""
        return bool(self.services) and all(one.new + one.old > 0 for one in self.services if one.wanted)


def report(state: RolloutState, observation: Observation, now_s: float) -> RolloutReport:
    replicas = dict(state.replicas)
    workload = WorkloadReplicas(
        state.target, state.stable, replicas, observation.replicas, observation.room, now_s, state.serial
    )
    workload.tried = state.tried
    names = sorted({*state.target.parts, *(one.service for one in state.replicas.values())})
    services = tuple(_service(workload, name, state.downtimes.get(name, Downtime())) for name in names)
    headline = _unchecked(state, observation) or _headline(state, services, now_s)
    return RolloutReport(rollout_result(state), state.desired_number, headline, services)


def rollout_result(state: RolloutState) -> RolloutResult:
    if state.phase is RolloutPhase.STUCK:
        return RolloutResult.STUCK
    if state.undone:
        return RolloutResult.UNDONE if state.phase is RolloutPhase.STEADY else RolloutResult.UNDER_WAY
    if state.phase is RolloutPhase.STEADY:
        return RolloutResult.DONE
    return RolloutResult.PAUSED if is_paused(state) else RolloutResult.UNDER_WAY


def is_paused(state: RolloutState) -> bool:
    return state.phase is RolloutPhase.ROLLING and any(part.paused for part in state.target.parts.values())


def _unchecked(state: RolloutState, observation: Observation) -> str:
    """Return what a rollout waits for that no control can judge, with the remedy; "": it does not."""
    new = sorted(observation.unchecked & state.target.parts.keys())
    if not new or state.phase is not RolloutPhase.ROLLING or is_paused(state):
        return ""
    waits = f"revision {state.target.number} waits for a control: none leads that could check the new {', '.join(new)}"
    return f"{waits}; `holdfast status` shows whether one runs, and its log in the state directory why it does not lead"


def _headline(state: RolloutState, services: tuple[ServiceStatus, ...], now_s: float) -> str:
    number, undone = state.target.number, state.undone
    counts = ", ".join(f"{one.name} {one.new} of {one.wanted}" for one in services) or "nothing runs"
    first = sorted(services, key=lambda one: not one.is_unwell)
    waits = next((f"; {one.waits_for}" for one in first if one.waits_for), "")
    if state.desired_number == 0:
        return "no manifest has been applied yet"
    match state.phase:
        case RolloutPhase.STEADY if undone:
            return f"revision {undone} was undone: {state.why}; revision {number} is in place: {counts}{waits}"
        case RolloutPhase.STEADY:
            stays = "; the revision was in place before that, so nothing is undone" if _is_unwell(services) else ""
            return f"revision {number} is in place: {counts}{waits}{stays}"
        case RolloutPhase.UNDOING:
            return f"revision {undone} is being undone: {state.why}; back to revision {number}: {counts}{waits}"
        case RolloutPhase.STUCK if undone:
            back = f"back to revision {number}, which is stuck: {state.stuck}"
            return f"revision {undone} is being undone: {state.why}; {back}; {counts}{waits}"
        case RolloutPhase.STUCK:
            same = waits.startswith(f"; {state.stuck.partition(' ')[0]} ")
            return f"revision {number} is stuck: {state.stuck}; {counts}{'' if same else waits}"
        case RolloutPhase.ROLLING if is_paused(state):
            return f"revision {number} is paused: {counts}{waits}"
        case RolloutPhase.ROLLING if state.in_place_since_s is not None:
            watched_s = state.in_place_since_s + state.target.watch_s
            tried_s = max((until_s for until_s in state.trials.values() if until_s is not None), default=0.0)
            most = "up to " if tried_s > watched_s else ""
            left_s = max(0.0, watched_s - now_s, tried_s - now_s)
            return f"revision {number} is all there and watched for {most}{left_s:.0f} s more: {counts}"
        case RolloutPhase.ROLLING:
            return f"revision {number} is rolling out: {counts}{waits}"


def _is_unwell(services: tuple[ServiceStatus, ...]) -> bool:
    return any(one.is_unwell for one in services)


def _service(workload: WorkloadReplicas, name: str, downtime: Downtime) -> ServiceStatus:
    wanted = workload.target.parts[name].replicas if name in workload.target.parts else 0
    new = sum(map(workload.counts, workload.select(name, old=False)))
    old = sum(map(workload.counts, workload.select(name, old=True)))
    own = [key for key, one in workload.replicas.items() if one.service == name]
    coming = [key for key in own if not workload.is_old(key) and not workload.counts(key)]
    coming.sort(key=lambda key: not workload.seen(key).is_broken)
    leaving = [key for key in own if workload.replicas[key].desired not in DESIRED_RUNNING]
    waits = next((f"{key} {_waits(workload.replicas[key], workload.seen(key))}" for key in coming + leaving), "")
    if wanted and workload.is_being_tried(name):
        tried = next(key for key in workload.select(name, old=False) if workload.counts(key))
        waits = f"{tried} is tried with customers' requests before others leave"
    elif not waits and wanted and workload.missing(name) > 0:
        no_room = workload.room.get(name, 1) <= 0
        waits = f"there is no room for another {name}" if no_room else f"another {name} is to be started"
    # One that is under way in whole seconds: a report that is the same is not written again.
    held_s = downtime.longest_s if downtime.since_s is None else float(int(downtime.until(workload.now_s)))
    unwell = bool(coming) and workload.seen(coming[0]).is_broken
    return ServiceStatus(name, wanted, new, old, len(own), waits, held_s, unwell)


def _waits(one: ReplicaState, seen: ObservedReplica) -> str:
    """Return what a replica that does not count, or leaves, is doing; reads after its name."""
    why = f": {seen.how}" if seen.how else ""
    if seen.is_broken:
        return seen.trouble or f"crashed {seen.crashes} times in a row{why}"
    match one.desired, seen.stage:
        case DesiredState.STOP, _:
            return "is being stopped"
        case DesiredState.DRAIN, ReplicaStage.DRAINING if one.drain_until_s is None:
            return "is kept until the one that took over is proven"
        case DesiredState.DRAIN, ReplicaStage.DRAINING:
            return f"drains, {seen.streams} {'stream is' if seen.streams == 1 else 'streams are'} left"
        case DesiredState.DRAIN, _:
            return "is to drain"
        case _, ReplicaStage.ABSENT:
            return f"is to be started{why}"
        case _, ReplicaStage.STARTING:
            return f"is starting{why}"
        case DesiredState.STAND_BY, _:
            return f"stands by beside {one.beside}"
        case _, ReplicaStage.STANDBY:
            return "is waking"
        case _, ReplicaStage.DRAINING | ReplicaStage.LEAVING:
            return f"is {seen.stage}"
    if not seen.admitted:
        return f"is not admitted by a frontend yet{why}"
    if seen.weight <= 0.0:
        return f"gets no traffic before its canary has passed{why}"
    return f"gets a part of its traffic until it is proven{why}"
