"""Leads a deployment from one revision to the next: a rollout begins, continues, is undone, and ends.

Theory. Each step gets everything that should run and everything that is observed (`Observation`), never what changed:
so the same observation may come twice or late, and another process may continue after this one died. What no
observation can show is in `RolloutState`, which is written down before any action is carried out: above all the desired
state of each replica, which `moves.py` decides. The actions are the difference between desired and observed
(`NEEDED_ACTIONS`); each is returned once, and again only if it had no visible effect after `RETRY_S`. A replica's name
is used once, so a start of one that is there is already done.

A revision whose new sets prove to be bad is undone, once: everything goes back to the revision that was last in place,
by the same rules. Bad is a new replica that can never serve (its card is refused, its canary fails, its settings are
invalid), that crashes again and again, or makes no progress until its deadline; a new set that no device here could
hold; and one of whose requests too many fail while others' do not (`trial.py`). A failure in a set that was in place
before is not the revision's fault, and undoes nothing.
A revision without a way back, or whose undo itself takes too long, is stuck, and says so; work on it continues, and it
ends well whenever it can. A newer revision takes over at any time: what is there then belongs to it, or is old.

Always true: a revision is undone at most once, to one that was in place; what is paused stands still, and so does its
deadline, but an undo is never paused; a new set of workers that no control can check waits as if it were paused; a
replica that is observed and not known is adopted, and leaves by the same rules; a trigger that has no entry in the
table changes nothing. No I/O, no clock: `now_s` is wall time and is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec
from msgspec import Struct, field, structs

from holdfast.health.bounds import Count, UnixS
from holdfast.rollout.moves import move_replicas
from holdfast.rollout.replica import CRASHES_MAX, DesiredState, ObservedReplica, ReplicaStage, ReplicaState
from holdfast.rollout.revision import Revision, changes
from holdfast.rollout.stock import WorkloadReplicas, part_of
from holdfast.rollout.trial import TRIAL_S, RequestCounts, SetTrial

VERSION = 1  # of `RolloutState` as it is written
RETRY_S = 10.0  # long against what carrying something out takes, short against a deadline


class RolloutPhase(StrEnum):
    """Where a deployment is."""

    STEADY = "steady"
    ROLLING = "rolling"
    UNDOING = "undoing"
    STUCK = "stuck"


class Trigger(StrEnum):
    """What a look shows of the whole."""

    NEWER = "a newer revision is wanted"
    FAILED = "its new sets are bad, and there is a way back"
    BLOCKED = "its time is over, or it is bad and there is no way back"
    WHOLE = "everything is in place"


# -- what is seen


class Observation(Struct, frozen=True, kw_only=True):
    """Everything at one moment."""

    desired: Revision
    replicas: dict[str, ObservedReplica] = {}
    room: dict[str, int] = {}  # how many more of a service can be placed; not said: as many as it takes
    # By service, and by the set's id. None: nobody listened long enough to say how much is asked for.
    traffic: dict[str, dict[str, RequestCounts]] | None = {}
    refused: dict[str, str] = {}  # by a set's id: why none of it can ever be started here
    unchecked: frozenset[str] = frozenset()  # services whose new set needs a control's verdict, while no control leads


# -- what is remembered


class ServiceProgress(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a service, with its mates, ever was on this way, and since when. Its clock stands still while nothing is
    to come of it: where it is paused, or waits for others, or drains within its bound."""

    best: int
    progress_at_s: UnixS = field(name="moved_s")
    paused_since_s: UnixS | None = field(default=None, name="still_s")  # since when its clock stands still


class Downtime(Struct, frozen=True, forbid_unknown_fields=True):
    """How long requests to a service found nobody on this way, at a stretch."""

    longest_s: float = 0.0  # of those that are over
    since_s: UnixS | None = None  # when the one under way began

    def until(self, now_s: float) -> float:
        """The longest, the one under way included."""
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
        """Services whose new set has been."""
        return frozenset(service for service, until_s in self.trials.items() if until_s is None)


NOTHING = RolloutState(target=Revision(number=0, parts={}))


def encode(state: RolloutState) -> bytes:
    return msgspec.json.encode(state)


def decode(data: bytes) -> RolloutState:
    """ValueError, if another version wrote it, or nobody: whoever reads it then leaves everything as it is."""
    state = msgspec.json.decode(data, type=RolloutState)
    if state.version != VERSION:
        raise ValueError(f"a rollout's memory of version {state.version}; version {VERSION} is known here")
    return state


def restore(state: RolloutState, now_s: float) -> RolloutState:
    """To go on from what another process wrote: it may have done what it said or not, and its clock may have been
    ahead."""
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
    """Who stands by is to serve."""

    name: str


class DrainReplica(Struct, frozen=True):
    """Nothing new for it. A worker's streams are handed over; a frontend closes connections after their answers."""

    name: str


class ResumeServing(Struct, frozen=True):
    """It is to serve again after all."""

    name: str


class StopReplica(Struct, frozen=True):
    """It is to end."""

    name: str


class LogLine(Struct, frozen=True):
    """A line for people."""

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
    """The next memory, to be written down first, and then what is to be done, in order."""
    return _Step(state, observation, now_s).run()


def next_deadline_s(state: RolloutState) -> float | None:
    """When to look again at the latest; None: when something changes."""
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
    """One look, and what follows from it."""

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
        """What follows from a turn, if the look shows it."""
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
        """Take in whoever is there and not known, and note who counts."""
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
        """What to think of one that is not known. It may have counted, unless its set is what is being brought; and who
        stands by for nobody is not kept."""
        desired = (
            DesiredState.STOP if seen.stage in (ReplicaStage.STANDBY, ReplicaStage.LEAVING) else DesiredState.SERVE
        )
        known = (self.state.stable, self.state.target, self.observation.desired)
        its = [one for one in known if one is not None and one.sets.get(seen.service) == seen.set_id]
        pair = its[0].pair(seen.service) if its else ((seen.service, seen.set_id),)
        counted = seen.set_id != self.observation.desired.sets.get(seen.service)
        return ReplicaState(service=seen.service, set_id=seen.set_id, pair=pair, desired=desired, counted=counted)

    def _update_target(self) -> None:
        """The same revision may be wanted in another number or manner."""
        state, desired = self.state, self.observation.desired
        if desired.number == state.target.number == state.desired_number and desired.sets == state.target.sets:
            stable = desired if state.stable is not None and state.stable.number == desired.number else state.stable
            state = structs.replace(state, target=desired, stable=stable)
        self._set_state(state)

    # -- how it goes

    def _is_over(self) -> bool:
        """All is in place, and where there is a way back it was judged, watched and tried."""
        state = self.state
        if state.in_place_since_s is None or state.stable is None or not state.target.brings(state.stable):
            return state.in_place_since_s is not None
        if self.observation.unchecked:
            return False
        return state.tried == state.trials.keys() and self.now_s >= state.in_place_since_s + state.target.watch_s

    def _note_progress(self) -> None:
        """Progress is one more that counts, or one less that is old and not leaving."""
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
        """A new set's trial begins when one of it counts first, and is over for good when it was tried, or is late."""
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
        """Of services that had somebody before."""
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
        """Why the new sets cannot be, in one line; "": nothing says so."""
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
        """Too many of its requests fail, and not so everywhere. Also when its breakers have opened for it."""
        trial = self._trial(service)
        serves = any(self.workload.seen(name).admitted for name in self.workload.select(service, old=False))
        told = f"{trial.own.failed} of {trial.own.attempts} requests to the new {service} failed"
        told += f" (its rollout.errorPercentMax is {trial.percent_max})"
        return told if serves and trial.is_bad else ""

    def _is_overdue(self, service: str) -> bool:
        at = self.state.progress[service]
        return at.paused_since_s is None and self.now_s >= at.progress_at_s + self.workload.part(service).deadline_s

    def _overdue_reason(self, service: str) -> str:
        """It makes no progress, for want of a replica that serves."""
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
        """What is overdue, although nothing is wrong with the new sets."""
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
