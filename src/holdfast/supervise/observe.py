"""Observes the whole state for a rollout: this machine's replicas, what the store says of them, requests. Pure.

Always true: a worker is admitted when every frontend says so, and there is one; it drains when it was told to and no
frontend would send it anything more, so that its count of streams can only fall; it stands by when its canary passed
and it was not told to serve. A frontend that knows no worker to send requests to does not serve yet, unless there is
none. Where no control leads nothing is checked: a worker without a verdict has its whole weight if its set was in place
before, and none if the revision brings its set.

A permanent fault is what no waiting mends and what may be the revision's fault. A device that is lost, a worker that is
slow, silent or unreachable, or one that was not checked yet, only does not count. A spare counts: it is sound, and kept
without traffic on purpose.

Requests are counted from frontends' reports, whose counts only grow: of a set of workers the attempts that frontends
made, of a set of frontends its answers. Nothing is counted twice, and nothing from before counting began; a worker that
is gone counts until its minute is over, because its set is still the one that failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from holdfast.discovery.keys import CONTROLS, HEALTH, INSTANCES, REFUSALS, REPORTS, InstanceKey, admits, parse_key
from holdfast.discovery.keys import decode_record as decode_instance
from holdfast.health.records import ControlRecord, HealthRecord, ReportRecord
from holdfast.health.standing import HealthCause, WorkerStanding
from holdfast.rollout.machine import DesiredState, Observation, ObservedReplica, ReplicaStage
from holdfast.rollout.revision import Revision
from holdfast.rollout.trial import RequestCounts
from holdfast.supervise.replicas import LocalReplica

# -- control's verdict


# What is held against a worker and undoes the revision that brought it, in words that read after its name.
PERMANENT_FAULTS = {
    HealthCause.WRONG: "answers wrongly",
    HealthCause.CANARY_FAILING: "fails its canaries",
    HealthCause.ENGINE: "says that its engine cannot go on",
}
UNCHECKED = "control has not checked it yet"


def with_verdict(seen: ObservedReplica, record: HealthRecord | None, refused: str = "") -> ObservedReplica:
    """Return a worker with control's verdict on it, and with why a frontend refuses its card."""
    standing = record.standing if record is not None else WorkerStanding(reason=UNCHECKED)
    causes, weight = standing.causes, standing.weight
    trouble = next((f"{words}: {causes[cause]}" for cause, words in PERMANENT_FAULTS.items() if cause in causes), "")
    if refused:
        trouble = f"has a card that is refused: {refused}"
    how = seen.how or (standing.reason if seen.stage is ReplicaStage.SERVING and weight < 1.0 else "")
    is_shut = HealthCause.BREAKER in causes
    return structs.replace(seen, weight=weight, trouble=seen.trouble or trouble, is_shut=is_shut, how=how)


# -- requests of each set


WINDOW_S = 60.0
LISTENED_S = 10.0  # before that the number of requests is not known: frontends report once a second

Set = tuple[str, str]  # a service and its set's id
Counted = tuple[int, int]  # attempts, and those of them that failed


class SetTraffic:
    """Counts requests by service and set."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._last: dict[str, dict[str, Counted]] = {}  # by frontend, and by its workers' instances or its own process
        self._sets: dict[str, Set] = {}  # by instance or process
        self._happened: deque[tuple[float, Set, Counted]] = deque()  # oldest first, within the window

    def take(self, reports: Iterable[ReportRecord], sets: Mapping[str, Set], now_s: float) -> None:
        """All reports as they are now; `sets`: whose an instance or a frontend's process is."""
        if sets and (self._began_s is None or now_s < self._began_s):
            self._began_s = now_s
        self._sets |= sets
        told = {report.name: _counts(report) for report in reports}
        sums: dict[Set, Counted] = {}
        for frontend, counts in told.items():
            before = self._last.get(frontend, counts)  # at first sight only counting begins
            for instance, (attempts, failed) in counts.items():
                tried, lost = before.get(instance, (0, 0))
                if instance in self._sets and attempts > tried and failed >= lost:
                    whole, bad = sums.get(self._sets[instance], (0, 0))
                    sums[self._sets[instance]] = (whole + attempts - tried, bad + failed - lost)
        self._happened.extend((now_s, one, counted) for one, counted in sums.items())
        self._last = told
        known = {instance for counts in told.values() for instance in counts} | sets.keys()
        self._sets = {instance: one for instance, one in self._sets.items() if instance in known}
        while self._happened and self._happened[0][0] <= now_s - WINDOW_S:
            self._happened.popleft()

    def of(
        self, now_s: float, brought: Collection[Set] = (), since_s: float = 0.0
    ) -> dict[str, dict[str, RequestCounts]] | None:
        """What happened within the window; of sets that a revision brings only since then, for they may have been tried
        before. None: there are workers, and it was not listened for long enough yet."""
        if self._began_s is not None and now_s < self._began_s + LISTENED_S:
            return None
        sums: dict[str, dict[str, RequestCounts]] = {}
        for at_s, one, (attempts, failed) in self._happened:
            if one not in brought or at_s >= since_s:
                own = sums.setdefault(one[0], {})
                before = own.get(one[1], RequestCounts())
                own[one[1]] = RequestCounts(before.attempts + attempts, before.failed + failed)
        return sums


def _counts(report: ReportRecord) -> dict[str, Counted]:
    failed = {instance: sum(seen.failed.values()) for instance, seen in report.workers.items()}
    workers = {one: (seen.succeeded + failed[one], failed[one]) for one, seen in report.workers.items()}
    return workers | {report.process: (report.answers, report.answers_failed)}


# -- replicas


NOT_IN_STORE = "it is not in the store"
NO_WORKER = "it has no worker yet"
NO_CONTROL = "no control leads that could check it"


def prefixes(deployment: str) -> tuple[str, ...]:
    """Return what has to be read of the store."""
    return (INSTANCES, HEALTH, REFUSALS, f"{REPORTS}{deployment}/", f"{CONTROLS}{deployment}/")


@dataclass(frozen=True, slots=True)
class StoreObservation:
    """What the store says of a deployment's workers."""

    leading: dict[str, InstanceKey] = field(default_factory=dict)  # by name, without those that stand by
    verdicts: dict[str, HealthRecord] = field(default_factory=dict)  # by path, and so are
    refused: dict[str, str] = field(default_factory=dict)
    reports: tuple[ReportRecord, ...] = ()
    is_led: bool = False

    def admits(self, instance: str) -> bool:
        return bool(self.reports) and all(instance in report.admitted for report in self.reports)

    def can_send(self, frontend: str) -> bool:
        """Return whether a frontend would send requests to some worker, if there is one."""
        return not self.leading or any(report.process == frontend and report.admitted for report in self.reports)

    def would_send(self, instance: str) -> bool:
        return any(instance in report.admitted for report in self.reports)

    def refusal(self, where: InstanceKey) -> str:
        """Return why some frontend refuses its card; "": none does."""
        instance = f"{where.instance:x}"
        reasons = (report.refused[instance] for report in self.reports if instance in report.refused)
        return self.refused.get(where.path) or next(reasons, "")

    def streams(self, engines: Collection[str]) -> int:
        """Return the streams that a replica's engines have, and those that wait for one of its set. Those whose engine
        is dead and whose frontend has not reported it yet count for every replica."""
        own = [self.leading[name] for name in engines if name in self.leading]
        others = {f"{where.instance:x}" for where in self.leading.values()} - {f"{one.instance:x}" for one in own}
        found = 0
        for report in self.reports:
            found += sum(seen.open for instance, seen in report.workers.items() if instance not in others)
            found += sum(report.held.get(namespace, 0) for namespace in {one.namespace for one in own})
        return found


def observe_store(values: Mapping[str, bytes], deployment: str) -> StoreObservation:
    """Return what keys and values of `prefixes` say; what cannot be read says nothing."""
    leading: dict[str, InstanceKey] = {}
    verdicts: dict[str, HealthRecord] = {}
    refused: dict[str, str] = {}
    reports: list[ReportRecord] = []
    is_led = False
    for key, value in values.items():
        try:
            if key.startswith(REPORTS):
                reports.append(msgspec.json.decode(value, type=ReportRecord))
            elif key.startswith(CONTROLS):
                is_led |= msgspec.json.decode(value, type=ControlRecord).leads
            elif (where := parse_key(INSTANCES, key)) is not None and admits(deployment, where.namespace):
                leading[decode_instance(value).name] = where
            elif (where := parse_key(HEALTH, key)) is not None and admits(deployment, where.namespace):
                verdicts[where.path] = msgspec.json.decode(value, type=HealthRecord)
            elif (where := parse_key(REFUSALS, key)) is not None and admits(deployment, where.namespace):
                refused[where.path] = value.decode(errors="replace")
        except (ValueError, RecursionError):
            continue
    return StoreObservation(leading, verdicts, refused, tuple(reports), is_led)


def observe(
    desired: Revision,
    here: Mapping[str, LocalReplica],
    store: StoreObservation,
    desired_states: Mapping[str, DesiredState],
    *,
    room: dict[str, int] | None = None,
    fitting: Collection[str] = (),
    traffic: dict[str, dict[str, RequestCounts]] | None = None,
    refused: dict[str, str] | None = None,
    unchecked: frozenset[str] = frozenset(),
) -> Observation:
    """Join what this machine shows with what the store says. `desired_states`: what every replica was last told to do;
    `fitting`: replicas beside which there is memory for one more; `unchecked`: services whose new sets a control should
    check, while none leads."""
    new = {(service, desired.sets.get(service)) for service in unchecked}
    unknown = {name for name, one in here.items() if (one.observed.service, one.observed.set_id) in new}
    replicas = {
        name: _observe_replica(one, store, desired_states.get(name), proven=name not in unknown)
        for name, one in here.items()
    }
    replicas |= {name: structs.replace(replicas[name], fits_beside=True) for name in fitting if name in replicas}
    return Observation(
        desired=desired, replicas=replicas, room=room or {}, traffic=traffic, refused=refused or {}, unchecked=unchecked
    )


def sources_of(here: Mapping[str, LocalReplica], store: StoreObservation) -> dict[str, tuple[str, str]]:
    """Return the service and the set of every worker that leads, by instance, and of every frontend, by process."""
    workers = {
        f"{store.leading[name].instance:x}": (one.observed.service, one.observed.set_id)
        for one in here.values()
        for name in one.engines
        if name in store.leading
    }
    frontends = [one for one in here.values() if one.frontend]
    return workers | {one.frontend: (one.observed.service, one.observed.set_id) for one in frontends}


def _observe_replica(
    one: LocalReplica, store: StoreObservation, desired: DesiredState | None, *, proven: bool
) -> ObservedReplica:
    """Return one replica as it is seen. It stands by when it could serve: it is loaded, and its first canary passed.
    `proven`: its set needs no verdict while no control leads."""
    seen = _observe_running(one, store, desired, proven=proven)
    if one.engines and seen.stage is ReplicaStage.SERVING and desired is DesiredState.STAND_BY:
        stage = ReplicaStage.STANDBY if seen.weight > 0.0 else ReplicaStage.STARTING
        return structs.replace(seen, stage=stage, admitted=False)
    return seen


def _observe_running(
    one: LocalReplica, store: StoreObservation, desired: DesiredState | None, *, proven: bool
) -> ObservedReplica:
    seen = one.observed
    if seen.stage is not ReplicaStage.SERVING:
        return seen
    if one.frontend and not store.can_send(one.frontend):
        return structs.replace(seen, how=seen.how or NO_WORKER)
    if not one.engines:
        return structs.replace(seen, admitted=True, weight=1.0)
    where = next((store.leading[name] for name in one.engines if name in store.leading), None)
    if where is None:
        return structs.replace(seen, how=seen.how or NOT_IN_STORE)
    instance, record = f"{where.instance:x}", store.verdicts.get(where.path)
    stage = ReplicaStage.DRAINING if desired is DesiredState.DRAIN and not store.would_send(instance) else seen.stage
    found = structs.replace(seen, stage=stage, admitted=store.admits(instance), streams=store.streams(one.engines))
    refusal = store.refusal(where)
    if record is None and not store.is_led and not refusal:
        return structs.replace(found, weight=1.0) if proven else structs.replace(found, how=found.how or NO_CONTROL)
    return with_verdict(found, record, refusal)
