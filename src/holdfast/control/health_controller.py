"""The health controller decides about the health of all workers of a deployment: events about workers go in, records to
write and actions come out. Pure: no I/O, no clock (`now_s` is wall time; if it goes back, the last time counts), no
randomness but what is injected.

Theory (facts 13, 14, 22-24). Each worker has three machines: its canary, its breaker, its standing. They know nothing
of other workers; what depends on several workers is decided here:
- A wrong answer is the fault of the weights. It counts against every process that reads them: a standby, and a process
  that starts later and maps convicted weights.
- A worker is slow only in comparison with the others of its set.
- A device's fault counts against all workers on it, also those that start later.
- Convicted weights are verified, and reloaded if damaged. If another set of weights serves, it takes the streams first;
  the last set reloads in place while the frontends hold its streams.
- If convicted weights are right, the process is at fault: the weights are acquitted, and its standby takes over.
- No verdict removes the last worker of a set, or most of them at once (`health.last_resort`). Such workers keep
  serving, are probed every few seconds, and lose their streams only when others can take them. (Frontends apply the
  same rule to the verdicts they read: `TrafficWeights`, `streams/roster.py`.)
- A failing worker that has a standby hands over to it.

Every record is written before its actions are carried out, and `restore` gives another process the same state from the
records. So verdicts outlive the process that made them, a restart of control clears none, and a numbered action (a
ejection, a canary, a load) is not repeated.

Always true:
- An event says what happened and contains no judgement; a step returns records first, then actions.
- All workers with weights of one name are quarantined, or none is.
- A worker has at most one open question; a sleeping worker is asked nothing.
- Weights of one name are reloaded at most once in `RELOAD_S`, with a growing pause.
- Only lost workers are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.control.questions import expectations_of, name_of_key
from holdfast.control.worker_health import (
    FAILING,
    HANDOVER_AGAIN_S,
    HANDOVER_S,
    OWED_LOOK_S,
    OWED_S,
    PROBE_S,
    RELOAD_S,
    RIGHT_ANSWERS,
    HealthLimits,
    WorkerFacts,
    WorkerHealth,
    errors_before,
    load_id_of,
    next_reload,
    was_load_checked,
)
from holdfast.core.ports import DeadlineReached
from holdfast.health import breaker as b
from holdfast.health import canary as c
from holdfast.health import expectations as x
from holdfast.health import history, liveness, outliers
from holdfast.health import standing as s
from holdfast.health.device_faults import Severity
from holdfast.health.last_resort import ResortCandidate, last_resorts
from holdfast.health.records import HealthRecord
from holdfast.health.replacement import UnfitWorker, asked_for, replace_due_s

# Records of dead workers kept; the oldest are deleted first. A worker that cannot start leaves many of them in a day.
DEAD_MAX = 256
# Kinds of workers (card, build, dtype, device) without a worker left, for which expected answers and convicted loads
# are kept: a deployment's last few versions.
LEFT_MAX = 16
DISPUTED = "others answer otherwise, and it is not known which is right; the weights of all of them are verified"
CONVICTED = "its weights were found to answer wrongly before"


# -- events


@dataclass(frozen=True, slots=True)
class WorkerFound:
    """A worker answered control, or its facts changed because it woke or loaded again. `serving`: it may already have
    traffic, because no control checked it when it started."""

    path: str
    facts: WorkerFacts
    serving: bool = False


@dataclass(frozen=True, slots=True)
class WorkerListed:
    """The worker is in the store, even if control cannot reach it, so it does not count as dead."""

    path: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker's process ended: its key and its connections are gone."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class AnswerReceived:
    """The worker gave a complete answer to the question of this number."""

    path: str
    number: int
    answer: x.CanaryAnswer
    took_s: float
    occupancy: float  # running and waiting streams over places, the larger of before and after; without this one


@dataclass(frozen=True, slots=True)
class AnswerMissing:
    """No complete answer came in time, or the worker answered with an error."""

    path: str
    number: int
    reason: str
    moving: bool = False  # some tokens of the answer came
    sound: bool = True  # another worker sent something since the question, or there is no other
    failed: bool = False  # the worker reported an error, which tokens to clients do not excuse


@dataclass(frozen=True, slots=True)
class CanaryRefused:
    """The worker had no place for the question."""

    path: str
    number: int


@dataclass(frozen=True, slots=True)
class CheckNeeded:
    """There is a sign that the worker hangs or answers wrongly; a canary will show it."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class LivenessReported:
    """The worker's liveness changed, as control's own watcher sees it."""

    path: str
    change: liveness.LivenessChanged


@dataclass(frozen=True, slots=True)
class AttemptsReported:
    """The results of attempts on the worker since the last such event, summed over all frontends."""

    path: str
    attempts: b.Attempts
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class PacesMeasured:
    """The recent paces (seconds per token, over the same time) of workers that made tokens; about once a second."""

    paces: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The worker reports that its engine cannot continue."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceRead:
    """A device (one of `WorkerFacts.devices`) has a fault, or it was cleared."""

    device: str
    report: s.DeviceReport


@dataclass(frozen=True, slots=True)
class WeightsVerified:
    """The worker compared its weights with their source, and they are right."""

    path: str
    load: int


@dataclass(frozen=True, slots=True)
class SpareAssigned:
    """The worker is now a spare, which has no traffic, or no longer one."""

    path: str
    spare: bool


HealthEvent = (
    WorkerFound | WorkerListed | WorkerLost | AnswerReceived | AnswerMissing | CanaryRefused | CheckNeeded
    | LivenessReported | AttemptsReported | PacesMeasured | EngineFailed | DeviceRead
    | WeightsVerified | SpareAssigned | DeadlineReached
)  # fmt: skip


# -- effects


@dataclass(frozen=True, slots=True)
class WriteExpectations:
    """Write this record before the actions that follow are done; None: delete it."""

    name: str
    record: x.ExpectationsRecord | None


@dataclass(frozen=True, slots=True)
class WriteVerdict:
    """Write this verdict before the actions that follow are done. Frontends act on its weight, on a new ejection, and
    on a drain."""

    path: str
    record: HealthRecord


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """Delete the worker's record."""

    path: str


@dataclass(frozen=True, slots=True)
class AskWorker:
    """Ask the worker this question, at temperature 0, past an end of text, with `expectations.TOP` logprobs. Pass in an
    event with this number within the time."""

    path: str
    number: int
    prompt: tuple[int, ...]
    tokens: int
    within_s: float


@dataclass(frozen=True, slots=True)
class ReloadWeights:
    """Have the worker compare its weights with their source and reload damaged ones, unless it already has a load above
    `load` or is reloading. `in_place`: no other set of weights serves, so frontends hold its streams meanwhile."""

    path: str
    load: int
    in_place: bool
    reason: str


@dataclass(frozen=True, slots=True)
class HandOverToStandby:
    """Have the worker hand over to its standby and exit. Unless `believed`, the standby must not use its results."""

    path: str
    believed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class FlagAnswers:
    """Report that the worker's answers since `since_s` may be wrong."""

    path: str
    since_s: float
    reason: str


class NoticeKind(StrEnum):
    STATUS = "status"
    MOVED = "moved"  # its streams were moved after a new ejection
    DRAINED = "drained"
    QUARANTINED = "quarantined"
    RELOADED = "reloaded"  # it was asked to verify and reload its weights
    RELIEVED = "relieved"  # it was asked to hand over to its standby
    ACQUITTED = "acquitted"  # weights were acquitted, by name
    BREAKER = "breaker"
    PASSED = "canary-passed"
    FAILED = "canary-failed"
    ACCUSED = "accused"
    CONVICTED = "convicted"  # weights were convicted, by name
    WITHDRAWN = "withdrawn"  # a card's expected answer was withdrawn
    REPLACED = "replaced"  # another engine was asked for in its place
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for logs, metrics and incidents. `path` is empty where it concerns no single worker."""

    path: str
    what: NoticeKind
    text: str


HealthEffect = (
    WriteExpectations | WriteVerdict | ForgetWorker | AskWorker | ReloadWeights | HandOverToStandby | FlagAnswers
    | Notice
)  # fmt: skip


# -- the workers of one set


def same_set(worker: WorkerHealth, workers: Iterable[WorkerHealth]) -> list[WorkerHealth]:
    """Return all workers of its namespace and card, including itself, sleeping and lost ones."""
    return [other for other in workers if other.set_key == worker.set_key]


def last_resorts_in(members: list[WorkerHealth], ejecting: WorkerHealth | None = None) -> set[str]:
    """Return the paths of workers that keep serving although checks failed: too few others can, or their standby is
    about to take over. While restored workers may still be found, the set stays as it is, except for `ejecting`."""
    served = {w.group for w in members if w.awake}
    coming = any(_is_ready(w) and w.group not in served for w in members)
    handing_over = {w.path for w in members if w.handover_until_s is not None and w.awake and w.failing}
    candidates = [
        ResortCandidate(w.path, *candidacy, out=w is not ejecting and not w.standing.weight)
        for w in members
        if (candidacy := w.candidacy) is not None
    ]
    able = handing_over | last_resorts(candidates, coming=coming)
    if all(w.search_until_s is None for w in members):
        return able
    return {w.path for w in members if w.standing.last_resort or (w is ejecting and w.path in able)}


def standby_of(worker: WorkerHealth, members: list[WorkerHealth]) -> WorkerHealth | None:
    """Return an engine of its group that is ready to take over from the worker, or None."""
    return next((w for w in members if worker.group and w.group == worker.group and _is_ready(w)), None)


def _is_ready(worker: WorkerHealth) -> bool:
    return (
        worker.facts is not None and not worker.facts.active and bool(worker.group) and s.earned(worker.standing) > 0.0
    )


def others_wrong_with(worker: WorkerHealth, workers: Iterable[WorkerHealth]) -> list[WorkerHealth]:
    """Return other processes that answered wrongly with the same weights, although the weights are right."""
    return [w for w in workers if w is not worker and w.load_id == worker.load_id and w.computes_wrongly]


class HealthController:
    """Decides about the health of one deployment's workers. `by` names this control in records; `jitter` draws from
    [0, 1)."""

    def __init__(self, by: str, jitter: Callable[[], float], limits: HealthLimits | None = None) -> None:
        self._by = by
        self._jitter = jitter
        self._limits = limits or HealthLimits()
        self._now_s = 0.0
        self._workers: dict[str, WorkerHealth] = {}
        self._expectations: dict[x.Key, x.Expectations] = {}
        self._written: dict[str, x.ExpectationsRecord] = {}  # expectations as last written, by name
        self._outliers: dict[x.Key, outliers.Outliers] = {}
        self._faults: dict[str, s.DeviceReport] = {}  # by device, the gravest fault
        self._actions: list[HealthEffect] = []
        self._dirty: dict[str, None] = {}  # paths of workers that may have to be written, in order
        self._touched: dict[x.Key, None] = {}  # and expectations
        self._reviews: dict[tuple[str, str], None] = {}  # sets in which replacements are decided again

    @property
    def standings(self) -> dict[str, s.WorkerStanding]:  # by path; the lost too, while they are remembered
        return {path: worker.standing for path, worker in self._workers.items()}

    @property
    def next_deadline_s(self) -> float | None:
        dues = [due for worker in self._workers.values() for due in worker.deadlines_s()]
        dues += [due for each in self._expectations.values() if (due := each.next_deadline_s) is not None]
        return min(dues, default=None)

    def restore(
        self, records: Mapping[str, HealthRecord], expected: Mapping[str, x.ExpectationsRecord], now_s: float
    ) -> None:
        """Continue from the records, before the first event. `WorkerFound` and `DeviceRead` then report what exists."""
        assert not self._workers, self
        self._now_s = now_s
        self._written = dict(expected)
        for path, record in records.items():
            worker = self._workers[path] = WorkerHealth(path, self._jitter, self._limits)
            worker.restore(record, now_s)

    def step(self, event: HealthEvent, now_s: float) -> tuple[HealthEffect, ...]:
        self._now_s = max(self._now_s, now_s)
        self._apply(event)
        self._review_replacements()
        writes: list[HealthEffect] = []
        for key in self._touched:
            name, record = name_of_key(key), self._expectations[key].record()
            if (known := self._written.get(name)) is None or replace(known, at_unix_s=0.0) != record:
                self._written[name] = replace(record, at_unix_s=self._now_s)
                writes.append(WriteExpectations(name, self._written[name]))
        for path in self._dirty:
            worker = self._workers.get(path)
            if worker and worker.record(worker.written.at_unix_s, worker.written.by) != worker.written:
                worker.written = worker.record(self._now_s, self._by)
                writes.append(WriteVerdict(path, worker.written))
        actions, self._actions = self._actions, []
        self._dirty.clear()
        self._touched.clear()
        return (*writes, *actions)

    def _apply(self, event: HealthEvent) -> None:
        match event:
            case WorkerFound():
                self._on_found(event)
            case DeadlineReached():
                self._tick()
            case PacesMeasured():
                self._compare_paces(event.paces)
            case DeviceRead():
                self._on_device(event.device, event.report)
            case _ if event.path in self._workers:
                self._apply_to_worker(self._workers[event.path], event)

    def _apply_to_worker(self, worker: WorkerHealth, event: HealthEvent) -> None:
        """Apply an event of one known worker."""
        match event:
            case WorkerListed():
                worker.found_by_s = None
            case WorkerLost():
                self._on_lost(worker, event.reason)
            case AnswerReceived():
                self._on_answer(worker, event)
            case AnswerMissing():
                moving = event.moving or (
                    worker.canary.began_s is not None and worker.client_tokens_at_s >= worker.canary.began_s
                )
                moving = moving and not event.failed
                self._step_canary(worker, c.TryUnanswered(event.number, event.reason, moving, event.sound))
            case CanaryRefused():
                self._step_canary(worker, c.TryRefused(event.number))
            case CheckNeeded():
                self._step_canary(worker, c.CheckRequested(event.reason))
            case LivenessReported():
                self._step_standing(worker, event.change)
            case AttemptsReported():
                worker.client_tokens_at_s = self._now_s if event.tokens else worker.client_tokens_at_s
                for kind in (kind for kind, count in event.attempts.failed.items() if count):
                    worker.errors = history.with_error(worker.errors, history.FAILED_REQUEST, kind, self._now_s)
                self._step_breaker(worker, event.attempts)
                self._check_failing_worker(worker, event.attempts)
            case EngineFailed():
                self._step_standing(worker, s.ReportedFatal(worker.standing.load, event.reason))
            case WeightsVerified():
                self._on_weights_verified(worker, event.load)
            case SpareAssigned():
                worker.spare = event.spare
                self._dirty[worker.path] = None

    # -- workers that come and go

    def _on_found(self, event: WorkerFound) -> None:
        facts = event.facts
        worker = self._workers.setdefault(event.path, WorkerHealth(event.path, self._jitter, self._limits))
        if worker.is_older(facts):
            return
        before = worker.facts
        load_id = load_id_of(facts.weights or worker.path, facts.load or 1)
        fresh, worker.load_id = load_id != worker.load_id, load_id
        worker.facts, worker.found_by_s, worker.search_until_s, worker.died_at_s = facts, None, None, None
        if fresh:
            worker.accused, worker.verified, worker.right_answers = False, False, 0
        if not worker.standing.load:
            worker.errors = errors_before(facts, self._workers.values())
        load = worker.standing.load + fresh
        if before is None or before.key != facts.key:
            self._outliers.setdefault(facts.key, outliers.Outliers()).restore(worker.path, worker.pace)
        if before is not None and before.key != facts.key:
            self._outliers[before.key].forget(worker.path)
            self._update_sets(before.key)
        self._update_sets(facts.key)
        if fresh and worker.standing.load:
            self._step_breaker(worker, b.Renewed())
        took_over = (
            not fresh and before is not None and not before.active and was_load_checked(load_id, self._workers.values())
        )
        self._step_canary(worker, c.CanaryPresent(load, took_over) if facts.active else c.CanaryGone())
        # Engines of a group check themselves before they serve, and have streams as soon as they take over.
        self._step_standing(worker, s.WorkerPresent(load, event.serving or bool(facts.group)))
        if not worker.standing.quarantined and self._is_convicted(load_id):
            self._step_standing(worker, s.CanaryFailed(load, self._now_s, s.CanaryFailing.WRONG, CONVICTED))
        if worker.standing.quarantined:
            self._request_reload(load_id)
        for fault in [self._faults[device] for device in facts.devices if device in self._faults]:
            self._step_standing(worker, fault)
        self._review_last_resort(worker)
        self._reviews[worker.set_key] = None

    def _on_lost(self, worker: WorkerHealth, reason: str) -> None:
        facts, worker.facts, worker.found_by_s, worker.search_until_s = worker.facts, None, None, None
        if worker.died_at_s is not None:
            return
        worker.died_at_s = self._now_s
        self._step_canary(worker, c.CanaryGone())
        self._step_standing(worker, s.WorkerGone(worker.standing.load, reason))
        if facts is not None:
            self._outliers[facts.key].forget(worker.path)
            self._update_sets(facts.key)

    def _update_sets(self, key: x.Key) -> None:
        of_key = [w for w in self._workers.values() if w.facts and w.facts.key == key]
        if key not in self._expectations and of_key:
            self._expectations[key] = expectations_of(key, [w.facts for w in of_key if w.facts])
            if (written := self._written.get(name_of_key(key))) is not None:
                self._expectations[key].restore(written)
        sets: dict[str, bool] = {}
        for each in of_key:
            sets[each.load_id] = sets.get(each.load_id, False) or bool(each.facts and each.facts.verified)
        self._step_expectations(key, x.SetsPresent(sets))

    def _is_convicted(self, load_id: str) -> bool:
        written = any(load_id in record.convicted for record in self._written.values())
        workers = self._workers.values()
        return written or any(
            w.load_id == load_id and w.standing.quarantined and not w.computes_wrongly for w in workers
        )

    # -- time

    def _tick(self) -> None:
        for worker in list(self._workers.values()):
            if worker.found_by_s is not None and worker.found_by_s <= self._now_s:
                self._on_lost(worker, "it was not found again")
            if worker.awake:
                self._step_canary(worker, DeadlineReached())
                self._step_breaker(worker, DeadlineReached())
                self._step_standing(worker, DeadlineReached())
            if worker.handover_until_s is not None and worker.handover_until_s <= self._now_s:
                worker.handover_until_s = None
                self._review_last_resort(worker)
                self._reviews[worker.set_key] = None
            if worker.replace_due_s is not None and worker.replace_due_s <= self._now_s:
                self._reviews[worker.set_key] = None
            if worker.search_until_s is not None and worker.search_until_s <= self._now_s:
                worker.search_until_s = None
                self._review_last_resort(worker)
            if worker.probed and worker.next_probe_at_s <= self._now_s:
                self._probe_worker(worker)
            if worker.owing and worker.next_owed_canary_at_s <= self._now_s:
                self._ask_owed_canary(worker)
            if worker.repace_due_s is not None and self._stands_alone(worker):
                self._clear_slowness(worker)
            if worker.repace_due_s is not None and worker.repace_due_s <= self._now_s:
                worker.pace_measured_at_s = self._now_s
                self._step_canary(worker, c.CheckRequested("is it in pace again?", peer=True))
            if worker.reload_due_s is not None and worker.reload_due_s <= self._now_s:
                self._request_reload(worker.load_id)
        for key in self._expectations:
            self._step_expectations(key, DeadlineReached())
        dead = sorted((w.died_at_s, w.path) for w in self._workers.values() if w.died_at_s is not None)
        for place, (_, path) in enumerate(dead):
            if place < len(dead) - DEAD_MAX or (self._workers[path].forget_at_s or 0.0) <= self._now_s:
                del self._workers[path]
                self._actions.append(ForgetWorker(path))
        self._forget_old_expectations()

    def _forget_old_expectations(self) -> None:
        """Forget the expectations of kinds without workers, except the latest. A kind counts as present while its
        restored workers may still be found."""
        used = {w.facts.key for w in self._workers.values() if w.facts}
        sought = {w.model for w in self._workers.values() if w.facts is None and w.died_at_s is None}
        left = ((name, one) for name, one in self._written.items() if not (one.key in used or one.key.card in sought))
        for name, record in sorted(left, key=lambda each: each[1].at_unix_s)[:-LEFT_MAX]:
            for by_key in (self._expectations, self._outliers, self._touched):
                by_key.pop(record.key, None)
            del self._written[name]
            self._actions.append(WriteExpectations(name, None))

    # -- answers and paces

    def _on_answer(self, worker: WorkerHealth, event: AnswerReceived) -> None:
        if worker.open_try is None or worker.open_try[0] != event.number or worker.facts is None:
            return
        key, question = worker.facts.key, worker.open_try[1]
        expectations = self._expectations[key]
        wanted, said = expectations.questions[question].tokens, event.answer
        if len(said.tokens) < wanted:
            why = f"{len(said.tokens)} of {wanted} tokens came"
            self._step_canary(worker, c.TryUnanswered(event.number, why, moving=bool(said.tokens)))
            return
        began_s = worker.canary.began_s or self._now_s
        others = [w for w in self._comparable_to(key) if w is not worker]
        worker.pace_s = event.took_s / len(said.tokens)
        # Count the vote first: this answer may establish or withdraw the expectation by which it is judged.
        stood = expectations.expected_of(question, worker.load_id)
        self._step_expectations(key, x.AnswerHeard(worker.load_id, question, said))
        answered = c.TryAnswered(
            event.number,
            question,
            event.took_s,
            len(said.tokens),
            event.occupancy,
            wrong=expectations.find_error(question, said),
            peers=c.pace_of((w.canary for w in others), began_s),
            known=stood is not None and stood is expectations.expected_of(question, worker.load_id),
        )
        self._step_canary(worker, answered)
        if worker.repace_due_s is not None:
            paces = {w.path: w.pace_s for w in (worker, *others) if w.pace_s is not None}
            self._measure(key, paces, only=worker.path)

    def _compare_paces(self, paces: Mapping[str, float]) -> None:
        keys = {worker.facts.key: None for path in paces if (worker := self._workers.get(path)) and worker.facts}
        for key in keys:
            self._measure(key, {w.path: paces[w.path] for w in self._comparable_to(key) if w.path in paces})

    def _measure(self, key: x.Key, paces: Mapping[str, float], only: str | None = None) -> None:
        for paced in self._outliers[key].measure(paces, self._now_s, only):
            self._step_standing(self._workers[paced.name], paced)
        for path in paces if only is None else ():
            self._workers[path].pace_measured_at_s = self._now_s

    def _stands_alone(self, worker: WorkerHealth) -> bool:
        """Return True if no other worker of its kind can serve or is about to. (A group without an active worker may be
        waking one.)"""
        assert worker.facts
        of_key = [w for w in self._workers.values() if w.facts and w.facts.key == worker.facts.key]
        served = {w.facts.group for w in of_key if w.facts and w.facts.active}
        others = [w for w in of_key if w is not worker and not w.standing.quarantined]
        return not any(s.earned(w.standing) if w.awake else w.facts and w.facts.group not in served for w in others)

    def _ask_owed_canary(self, worker: WorkerHealth) -> None:
        worker.next_owed_canary_at_s = self._now_s + OWED_LOOK_S
        at_once = worker.standing.last_resort or self._stands_alone(worker)
        if at_once or self._now_s >= max(worker.owed_canary_asked_at_s, worker.standing.fell_s) + OWED_S:
            worker.owed_canary_asked_at_s = self._now_s
            self._step_canary(worker, c.CheckRequested("it owes canaries"))

    def _clear_slowness(self, worker: WorkerHealth) -> None:
        """Lift slowness from a worker that no other can replace: slow answers are better than none."""
        assert worker.facts
        self._notify(worker, NoticeKind.NOTE, "there is no other left to be slower than")
        self._outliers[worker.facts.key].restore(worker.path, outliers.PaceClass.NORMAL)
        self._step_standing(worker, outliers.Paced(worker.path, outliers.PaceClass.NORMAL, 1.0))

    def _comparable_to(self, key: x.Key) -> list[WorkerHealth]:
        """Return the awake, not quarantined workers of one kind, which are compared with each other."""
        return [
            w
            for w in self._workers.values()
            if w.awake and w.facts and w.facts.key == key and not w.standing.quarantined
        ]

    # -- the last resort

    def _review_last_resort(self, worker: WorkerHealth) -> None:
        """Decide again which workers of its set are last resorts, after a change other than a verdict."""
        members = same_set(worker, self._workers.values())
        for member in members:
            self._hand_over_if_failing(member, members)
        self._set_last_resort(members, last_resorts_in(members))

    def _set_last_resort(self, members: list[WorkerHealth], kept: set[str]) -> None:
        for worker in members:
            if (worker.path in kept) is not worker.standing.last_resort:
                self._step_standing(worker, s.LastResort(worker.path in kept))

    def _probe_worker(self, worker: WorkerHealth) -> None:
        """Probe a worker that is a last resort."""
        worker.next_probe_at_s = self._now_s + PROBE_S
        self._review_last_resort(worker)
        if worker.breaker.state is b.BreakerState.OPEN:
            self._step_breaker(worker, b.BreakerProbe())
        elif worker.answers_would_lift:
            self._step_canary(worker, c.CheckRequested("too few others can serve"))

    def _check_failing_worker(self, worker: WorkerHealth, attempts: b.Attempts) -> None:
        """Check a worker on which requests fail and none succeeds: with few clients its breaker opens late, and one bad
        request must not open it."""
        fails = attempts.failed and not (attempts.succeeded or attempts.outlived)
        if fails and worker.awake and self._now_s >= worker.failure_check_at_s + PROBE_S:
            worker.failure_check_at_s = self._now_s
            self._step_canary(worker, c.CheckRequested("a request failed on it"))

    def _hand_over_if_failing(self, worker: WorkerHealth, members: list[WorkerHealth]) -> None:
        """Ask a worker that fails, or answers wrongly with right weights, to hand over to its standby. If another
        process was wrong with these weights too, the standby would be as well."""
        fails = worker.failing and not worker.standing.quarantined and not s.earned(worker.standing)
        computes_wrongly = worker.computes_wrongly and not others_wrong_with(worker, self._workers.values())
        standby = standby_of(worker, members) if worker.awake and (fails or computes_wrongly) else None
        asked_at_s = max(member.handover_asked_at_s for member in members if member.group == worker.group)
        if standby is None or (asked_at_s and self._now_s < asked_at_s + HANDOVER_AGAIN_S):
            return
        worker.handover_asked_at_s, worker.handover_until_s = self._now_s, self._now_s + HANDOVER_S
        causes = worker.standing.causes
        why = next(iter(causes[cause] for cause in (s.HealthCause.WRONG, *FAILING) if cause in causes))
        self._notify(worker, NoticeKind.RELIEVED, f"it is to hand over to {standby.name}: {why}")
        self._actions.append(HandOverToStandby(worker.path, fails, why))

    # -- replacements

    def _review_replacements(self) -> None:
        """Decide again for which workers another engine is asked for, in the sets in which something changed. A
        restored worker keeps what was decided until it is found."""
        for key in self._reviews:
            members = [w for w in self._workers.values() if w.set_key == key and w.search_until_s is None]
            whys = {w.path: w.why_unfit(self._now_s) for w in members}
            unfit = [UnfitWorker(w.path, whys[w.path], w.unfit_s, bool(w.replace)) for w in members if whys[w.path]]
            asked = asked_for(unfit, sum(w.awake for w in members))
            for worker in members:
                why = asked.get(worker.path, "")
                due_s = replace_due_s(worker.standing.causes, worker.unfit_s) if worker.awake else None
                worker.replace_due_s = due_s if due_s is not None and due_s > self._now_s else None
                if why and not worker.replace:
                    self._notify(worker, NoticeKind.REPLACED, f"another engine is needed in its place: {why}")
                if why != worker.replace:
                    worker.replace = why
                    self._dirty[worker.path] = None
        self._reviews.clear()

    # -- devices

    def _on_device(self, device: str, report: s.DeviceReport) -> None:
        """Count the report against the device's workers, and remember the gravest fault for those that start later."""
        known = self._faults.get(device)
        fatal = known is not None and known.fault is not None and known.fault.severity is Severity.FATAL
        if report.fault is None:
            self._faults.pop(device, None)
            report = replace(report, at_s=min(report.at_s, self._now_s))
        elif report.fault.severity is not Severity.IGNORABLE and not fatal:
            self._faults[device] = report
        for worker in self._workers.values():
            if device in worker.devices:
                self._step_standing(worker, report)

    # -- weights that answer, and those that answer wrongly

    def _pass_sleeping_readers(self, worker: WorkerHealth, passed: s.CanaryPassed) -> None:
        """Count a passed canary as the first check of sleeping workers with the same weights: they cannot be asked, and
        must be able to take over at once."""
        for other in self._workers.values():
            asleep = other.facts is not None and not other.awake and other.load_id == worker.load_id
            if asleep and s.HealthCause.UNCHECKED in other.standing.causes:
                self._step_standing(other, s.CanaryPassed(other.standing.load, passed.asked_at_s, passed.right))

    def _convict(self, event: x.Convict) -> None:
        self._actions.append(Notice("", NoticeKind.CONVICTED, f"{event.weights}: {event.reason}"))
        for worker in self._workers.values():
            if worker.load_id == event.weights:
                if worker.reload_in_dispute:
                    worker.reload_next_s = self._now_s  # that answer decided nothing
                failed = s.CanaryFailed(worker.standing.load, event.asked_at_s, s.CanaryFailing.WRONG, event.reason)
                self._step_standing(worker, failed)
        self._request_reload(event.weights)

    def _on_weights_verified(self, worker: WorkerHealth, load: int) -> None:
        """Acquit weights that equal their source: the process that answered wrongly is at fault. If another process was
        wrong too, the device may be at fault, and the quarantine lasts until right answers come."""
        if (
            worker.facts is None
            or not worker.standing.quarantined
            or (worker.facts.load or load) != load
            or worker.verified
        ):
            return
        worker.verified = True
        self._dirty[worker.path] = None
        if others_wrong_with(worker, self._workers.values()):
            self._notify(worker, NoticeKind.NOTE, "its weights are right, and another process was wrong with them too")
            return
        self._acquit(worker)
        self._review_last_resort(worker)

    def _count_right_answer(self, worker: WorkerHealth, passed: s.CanaryPassed) -> None:
        """Count right answers of a worker that is quarantined although its weights are right."""
        if worker.standing.quarantined and worker.verified:
            worker.right_answers = worker.right_answers + 1 if passed.right else 0
            if worker.right_answers >= RIGHT_ANSWERS:
                worker.accused = False
                self._acquit(worker)

    def _acquit(self, worker: WorkerHealth) -> None:
        """End the quarantine of all workers with these right weights, except processes that were wrong themselves."""
        assert worker.facts
        self._actions.append(
            Notice("", NoticeKind.ACQUITTED, f"{worker.load_id}: these weights are as they were written")
        )
        self._step_expectations(worker.facts.key, x.WeightsAcquitted(worker.load_id))
        for other in self._workers.values():
            if other.load_id == worker.load_id and other.standing.quarantined and not other.computes_wrongly:
                other.verified, other.right_answers = False, 0
                self._step_standing(other, s.WorkerAcquitted())

    def _update_disputes(self, key: x.Key) -> None:
        """Mark workers with disputed weights, unmark others, and have disputed weights verified set by set."""
        disputed = sorted(self._expectations[key].disputed)
        for worker in [w for w in self._workers.values() if w.facts and w.facts.key == key]:
            if (worker.load_id in disputed) is (s.HealthCause.DISPUTED in worker.standing.causes):
                continue
            if worker.load_id in disputed:
                worker.reload_next_s = max(
                    worker.reload_next_s, self._now_s + disputed.index(worker.load_id) * RELOAD_S
                )
            self._step_standing(worker, s.Disputed(DISPUTED if worker.load_id in disputed else ""))

    def _request_reload(self, load_id: str) -> None:
        """Have an awake worker verify weights that may be wrong, and reload them if damaged."""
        holders = [w for w in self._workers.values() if w.awake and w.load_id == load_id and w.must_verify]
        next_s, reloads = max(((w.reload_next_s, w.reloads) for w in holders), default=(0.0, 0))
        again = not reloads or self._now_s >= next_s
        if again:
            next_s, reloads = next_reload(next_s, reloads, self._now_s, self._jitter())
        for worker in holders:
            worker.reload_next_s, worker.reloads = next_s, reloads
            worker.reload_in_dispute = not worker.standing.quarantined
            self._dirty[worker.path] = None
        if not holders or not again:
            return
        first = holders[0]
        others = [w for w in self._workers.values() if w.awake and w.model == first.model and w.load_id != load_id]
        in_place = not any(w.standing.weight for w in others)
        assert first.facts
        often = f" ({reloads} times by now, next in {next_s - self._now_s:.0f} s)" if reloads > 1 else ""
        what = "verified, and loaded again where they are damaged" + ", in place" * in_place + often
        self._notify(first, NoticeKind.RELOADED, f"its weights are to be {what}")
        why = first.standing.causes.get(s.HealthCause.WRONG, first.standing.reason)
        self._actions.append(ReloadWeights(first.path, first.facts.load, in_place, why))

    # -- the machines, coupled

    def _step_canary(self, worker: WorkerHealth, event: c.CanaryEvent) -> None:
        self._dirty[worker.path] = None
        effects = worker.canary.step(event, self._now_s)
        if worker.canary.state is not c.CanaryState.ASKING:
            worker.open_try = None
        for effect in effects:
            match effect:
                case c.SendTry():
                    self._ask(worker, effect)
                case c.Accuse():
                    self._notify(worker, NoticeKind.ACCUSED, effect.reason)
                    worker.errors = history.with_error(worker.errors, history.ACCUSED, effect.reason, self._now_s)
                    assert worker.facts
                    worker.accused, worker.right_answers = True, 0
                    accused = x.WeightsAccused(worker.load_id, effect.question, effect.asked_at_s, effect.reason)
                    self._step_expectations(worker.facts.key, accused)
                case c.AskPeers():
                    assert worker.facts
                    for other in self._comparable_to(worker.facts.key):
                        if other is not worker:
                            self._step_canary(other, c.CheckRequested(f"{worker.name} is late", peer=True))
                case s.HealthNote():
                    self._notify(worker, NoticeKind.NOTE, effect.reason)
                case b.CanaryAnswered():
                    self._step_breaker(worker, effect)
                case s.CanaryPassed():
                    self._notify(worker, NoticeKind.PASSED, "")
                    self._step_standing(worker, effect)
                    self._count_right_answer(worker, effect)
                    self._pass_sleeping_readers(worker, effect)
                case s.CanaryFailed():
                    self._notify(worker, NoticeKind.FAILED, f"{effect.failing}: {effect.reason}")
                    self._step_standing(worker, effect)

    def _ask(self, worker: WorkerHealth, effect: c.SendTry) -> None:
        assert worker.facts
        expectations = self._expectations[worker.facts.key]
        question = expectations.question_at(effect.turn) if effect.question is None else effect.question
        worker.open_try, asked = (effect.number, question), expectations.questions[question]
        self._actions.append(AskWorker(worker.path, effect.number, asked.prompt, asked.tokens, effect.within_s))

    def _step_expectations(self, key: x.Key, event: x.ExpectationsEvent) -> None:
        if key not in self._expectations:
            return
        self._touched[key] = None
        for effect in self._expectations[key].step(event, self._now_s):
            match effect:
                case x.AskSet():
                    holders = [w for w in self._workers.values() if w.awake and w.load_id == effect.weights]
                    for worker in holders[:1]:
                        self._step_canary(worker, c.CheckRequested(effect.reason, question=effect.question))
                case x.Convict():
                    self._convict(effect)
                case x.ExpectationsNote():
                    self._actions.append(
                        Notice("", NoticeKind.WITHDRAWN if effect.grave else NoticeKind.NOTE, effect.reason)
                    )
        if not isinstance(event, x.SetsPresent):  # at a beginning they are found one by one
            self._update_disputes(key)

    def _step_breaker(self, worker: WorkerHealth, event: b.BreakerEvent) -> None:
        self._dirty[worker.path] = None
        for effect in worker.breaker.step(event, self._now_s):
            match effect:
                case b.SendTrialCanary():
                    self._step_canary(worker, c.CheckRequested("its breaker is half open", number=effect.number))
                case b.BreakerOpened() | b.BreakerClosed():
                    became = "opened" if isinstance(effect, b.BreakerOpened) else "closed"
                    self._notify(worker, NoticeKind.BREAKER, f"{became}: {effect.reason}")
                    self._step_standing(worker, effect)

    def _step_standing(self, worker: WorkerHealth, event: s.StandingEvent) -> None:
        self._dirty[worker.path] = None
        before, candidacy = worker.standing, worker.candidacy
        worker.standing, effects = s.step(before, event, self._now_s)
        worker.errors = history.after_step(worker.errors, before, worker.standing, event, self._now_s)
        if worker.standing is not before:
            worker.note_fitness(self._now_s)
            self._reviews[worker.set_key] = None
        if worker.candidacy == candidacy:
            self._on_standing_effects(worker, effects)
            return
        members = same_set(worker, self._workers.values())
        self._hand_over_if_failing(worker, members)
        kept = last_resorts_in(members, ejecting=worker if before.weight else None)
        worker.standing, effects = s.step(before, event, self._now_s, last_resort=worker.path in kept)
        self._on_standing_effects(worker, effects)
        self._set_last_resort(members, kept)

    def _on_standing_effects(self, worker: WorkerHealth, effects: tuple[s.StandingEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case s.SetWeight():
                    self._notify(
                        worker, NoticeKind.STATUS, f"{effect.status.name}, weight {effect.weight:g}: {effect.reason}"
                    )
                case s.Quarantine():
                    self._notify(worker, NoticeKind.QUARANTINED, effect.reason)
                    self._actions.append(FlagAnswers(worker.path, effect.right_s, effect.reason))
                case s.MoveEjectedStreams():
                    self._notify(worker, NoticeKind.MOVED, effect.reason)
                case s.DrainWorker():
                    self._notify(worker, NoticeKind.DRAINED, effect.reason)
                case s.CheckWorkerNow():
                    self._step_canary(worker, c.CheckRequested(effect.reason))
                case s.HealthNote():
                    self._notify(worker, NoticeKind.NOTE, effect.reason)

    def _notify(self, worker: WorkerHealth, what: NoticeKind, text: str) -> None:
        self._actions.append(Notice(worker.path, what, text))
