"""The state that control keeps of one worker: its facts, its machines and its times. Pure; `HealthController` steps it.

Theory. A worker is a process under one path in the store. It answers with *weights*, which other processes may read too
and which outlive it. Each load of weights has its own name (`WorkerHealth.load_id`), and a verdict on answers belongs
to that name. The machines number the loads of each worker: every change of the name is a new load, so exchanged weights
are one too, even if the engine's own count does not change.

Always true: `record` is all that another process needs to continue (`restore`); a worker that is not found yet, asleep
or lost has no open question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.core.backoff import backoff_s
from holdfast.health import breaker as b
from holdfast.health import canary as c
from holdfast.health import expectations as x
from holdfast.health import standing as s
from holdfast.health.device_faults import SWITCHES
from holdfast.health.history import History
from holdfast.health.last_resort import unfitness_of
from holdfast.health.outliers import PaceClass
from holdfast.health.records import HealthRecord, device_name
from holdfast.health.replacement import replace_due_s, replace_reason
from holdfast.spec.health import HealthSettings
from holdfast.wire.messages import Welcome

# A worker that was restored from its record and is not found within this time is dead. Longer than workers take to
# register again after a store outage, because the streams of a dead worker are moved.
FOUND_BY_S = 60.0
# A new leader reaches all reachable workers within this time. Before that it does not know which worker is the last of
# its set.
SEARCH_S = 10.0
# A reload that did not happen within this time is requested again; by the load's number the worker knows whether it has
# done it. Also the first pause between reloads that do not help. It doubles each time, and jitter adds up to a fifth:
# reloads do not repair a device that computes wrongly, and each costs its host minutes.
RELOAD_S = 60.0
RELOAD_S_MAX = 1800.0
RELOAD_JITTER = 0.2
# A slow worker without traffic is measured by a canary this often: more often than `outliers.GAP_S`.
REPACE_S = 5.0
# A worker that has no traffic because it owes canaries is asked this often; no client's request is delayed.
OWED_S = 30.0
# How often control decides whether to ask such a worker: if no other worker can serve, it is asked at once.
OWED_LOOK_S = 1.0
# A last resort is probed this often, without regard to the cost: its streams cannot move, and it is healthy again as
# soon as it passes.
PROBE_S = 3.0
# A worker that has not handed over to its standby within this time never will.
HANDOVER_S = 10.0
# Shortest time between handovers in one group: if each of its engines fails, the engine is not at fault.
HANDOVER_AGAIN_S = 60.0
# Answers in a row, known to be right, that end the quarantine of a worker with verified weights.
RIGHT_ANSWERS = 5
DEVICES_MAX = 64  # of one worker: more than any machine has GPUs
LIFTED_BY_ANSWER = frozenset({s.HealthCause.CANARY_FAILING, s.HealthCause.UNCHECKED})
FAILING = frozenset({s.HealthCause.BREAKER, s.HealthCause.CANARY_FAILING})
SLOWNESS = frozenset({s.HealthCause.SLOW, s.HealthCause.CRAWLING})


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """The limits that an operator may set."""

    canary: c.CanaryLimits = field(default_factory=c.CanaryLimits)
    breaker: b.BreakerLimits = field(default_factory=b.BreakerLimits)
    dead_kept_s: float = 3600.0  # how long the record of a dead worker is kept, in seconds: people read it


def limits_of(settings: HealthSettings) -> HealthLimits:
    canary = c.CanaryLimits(interval_s=settings.canary_interval_s, share=settings.canary_share)
    breaker = b.BreakerLimits(settings.breaker_failures, settings.breaker_open_s, settings.breaker_canaries)
    return HealthLimits(canary, breaker)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker reports about itself (`wire.messages.Welcome`, its record and its card). It says with which workers
    it can be compared, not whether it is healthy."""

    name: str  # as `holdfast status` calls it
    model: str  # its card's checksum
    group: str = ""
    build: str = ""
    dtype: str = ""
    kind: str = ""  # of its device
    devices: tuple[str, ...] = ()  # devices with faults that count against it (`devices_of`); empty: not known
    weights: str = ""  # equal for engines that read the same memory; empty: its own
    load: int = 0  # of those weights; 0: not reported
    verified: bool = False  # its bytes were compared with the source's at that load
    vocabulary: int = 0
    known: tuple[
        tuple[x.CanaryQuestion, x.CanaryAnswer | None], ...
    ] = ()  # its questions, with the card's expected answers
    questions: str = ""  # the name of the card's questions (`ModelCard.canaries_name`)
    active: bool = True  # False: it is a standby and gets no questions

    @property
    def key(self) -> x.Key:
        """Return the properties that workers must share for their answers and paces to be compared."""
        return x.Key(self.model, self.build, self.dtype, self.kind, self.questions)


def facts_of(name: str, welcome: Welcome) -> WorkerFacts:
    """Return the facts of a worker's welcome; `name` is from its record."""
    return WorkerFacts(
        name=name,
        model=welcome.checksum,
        group=welcome.group,
        build=welcome.build,
        dtype=welcome.dtype,
        kind=welcome.device,
        weights=welcome.weights,
        load=welcome.load,
        verified=welcome.load > 0,  # engines that report a load number compare what they load with its source
        vocabulary=welcome.vocabulary,
        active=welcome.active,
        devices=devices_of(welcome.process.boot_id, [pci for pci, _ in welcome.gpus[:DEVICES_MAX]]),
    )


def devices_of(boot_id: str, pcis: Sequence[str]) -> tuple[str, ...]:
    """Return the devices with faults that count against a worker: its GPUs, and if several the NVLink switches too."""
    return tuple(device_name(boot_id, one) for one in (*pcis, *((SWITCHES,) if len(pcis) > 1 else ())))


class WorkerHealth:
    """The health state of one worker. Mutable: `HealthController` steps its machines."""

    def __init__(self, path: str, jitter: Callable[[], float], limits: HealthLimits) -> None:
        self.path = path
        self._dead_kept_s = limits.dead_kept_s
        self.facts: WorkerFacts | None = None  # None: not found, or lost
        self.written = HealthRecord(name=path)  # as it was last written to the store
        self.load_id = ""  # the name of its weights' load
        self.standing = s.WorkerStanding()
        self.breaker = b.Breaker(path, jitter, limits.breaker)
        self.canary = c.WorkerCanary(path, jitter, limits.canary)
        self.errors: History = ()
        self.spare = False
        self.unfit_s = 0.0  # since when a cause against it may ask for its replacement; 0: none does
        self.replace = ""  # why another engine is needed in its place; empty: none is
        self.replace_due_s: float | None = None  # when that is decided again, if nothing changes
        self.reloads = 0  # in a row, also of loads that followed each other soon
        self.reload_next_s = 0.0
        self.reload_in_dispute = False  # the last reload was requested because of a dispute, before any verdict
        self.accused = False  # this process answered wrongly, not only another with the same weights
        self.verified = False  # after the wrong answer its weights were found equal to their source
        self.right_answers = 0  # in a row after that
        self.failure_check_at_s = 0.0  # when it was last asked because requests failed on it
        self.next_probe_at_s = 0.0  # when it is probed again, while it is a last resort
        self.handover_asked_at_s = 0.0  # when it was asked to hand over to its standby; 0: it was not
        self.handover_until_s: float | None = None  # the deadline of that handover
        self.open_try: tuple[int, int] | None = None  # the number and the question of the unanswered canary try
        self.client_tokens_at_s = 0.0  # when its clients last had tokens
        self.pace_s: float | None = None  # seconds per token of its last canary
        self.pace_measured_at_s = 0.0  # when its pace was last measured, by a canary or by traffic
        self.owed_canary_asked_at_s = 0.0  # when it was last asked for a canary that it owes
        self.next_owed_canary_at_s = 0.0  # when control decides whether to ask for the next one
        self.found_by_s: float | None = None  # a restored worker that is not found before this time is dead
        self.search_until_s: float | None = None  # a restored worker may still be found until this time
        self.died_at_s: float | None = None  # when it was lost

    def __repr__(self) -> str:
        return f"{self.name}: {self.standing}"

    @property
    def name(self) -> str:
        return self.facts.name if self.facts else self.written.name

    @property
    def group(self) -> str:
        return self.facts.group if self.facts else self.written.group

    @property
    def awake(self) -> bool:
        return self.facts is not None and self.facts.active

    @property
    def model(self) -> str:
        return self.facts.model if self.facts else self.written.model

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the GPUs that it runs on, where that is known."""
        return self.facts.devices if self.facts else self.written.devices

    @property
    def reload_due_s(self) -> float | None:
        """Return when the next reload of its weights is requested, if they must still be verified."""
        return self.reload_next_s if self.awake and self.must_verify else None

    @property
    def must_verify(self) -> bool:
        """Return True if its weights are to be compared with their source."""
        wrong = self.standing.quarantined and not self.verified
        return wrong or s.HealthCause.DISPUTED in self.standing.causes

    @property
    def set_key(self) -> tuple[str, str]:
        """Return its namespace and card; workers with the same ones can take its streams."""
        return self.path.rpartition("/")[0], self.model

    @property
    def candidacy(self) -> tuple[float, int | None] | None:
        """Return its weight without the last-resort rule and its unfitness by that rule; None: gone, asleep or
        silent."""
        if not self.awake or s.HealthCause.LOST in self.standing.causes:
            return None
        return s.earned(self.standing), unfitness_of(self.standing.causes, self.standing.heard_s)

    @property
    def probed(self) -> bool:
        return self.awake and (self.standing.last_resort or self.computes_wrongly)

    @property
    def failing(self) -> bool:
        """Return True if it fails requests that another process with the same weights may serve."""
        return not FAILING.isdisjoint(self.standing.causes)

    @property
    def answers_would_lift(self) -> bool:
        """Return True if right answers would lift a cause against it."""
        causes = self.standing.causes
        return not LIFTED_BY_ANSWER.isdisjoint(causes) or (self.standing.quarantined and self.verified)

    @property
    def computes_wrongly(self) -> bool:
        """Return True if this process answers wrongly with weights that are right."""
        return self.standing.quarantined and self.verified and self.accused

    @property
    def pace(self) -> PaceClass:
        if s.HealthCause.CRAWLING in self.standing.causes:
            return PaceClass.CRAWLING
        return PaceClass.SLOW if s.HealthCause.SLOW in self.standing.causes else PaceClass.NORMAL

    @property
    def repace_due_s(self) -> float | None:
        """Return when a slow worker is asked again, unless traffic shows its pace earlier."""
        slow = self.awake and not SLOWNESS.isdisjoint(self.standing.causes)
        return self.pace_measured_at_s + REPACE_S if slow else None

    @property
    def owing(self) -> bool:
        """Return True if it has no traffic only because of canaries that it owes."""
        held = (s.WEIGHTS[s.TABLE[s.HealthCause(cause)][0]] for cause in self.standing.causes)
        return self.awake and self.standing.owed > 1 and all(held)

    def note_fitness(self, now_s: float) -> None:
        """Note since when it is unfit: from the first cause that may ask for its replacement until it has weight by its
        own merit again."""
        unfit = replace_due_s(self.standing.causes, 0.0) is not None
        if not unfit and (s.earned(self.standing) > 0.0 or s.HealthCause.GONE in self.standing.causes):
            self.unfit_s = 0.0
        elif unfit and not self.unfit_s:
            self.unfit_s = now_s

    def why_unfit(self, now_s: float) -> str:
        """Return why a replacement is due; the reason for which it was asked for stands until the worker serves."""
        if not self.awake or not self.unfit_s or self.handover_until_s is not None:
            return ""
        return replace_reason(self.standing.causes, self.unfit_s, now_s) or self.replace

    @property
    def forget_at_s(self) -> float | None:
        return None if self.died_at_s is None else self.died_at_s + self._dead_kept_s

    def deadlines_s(self) -> Iterator[float]:
        if self.awake:
            due = (self.canary.next_deadline_s, self.breaker.next_deadline_s, s.next_deadline_s(self.standing))
            yield from (each for each in due if each is not None)
        if self.owing:
            yield self.next_owed_canary_at_s
        if self.probed:
            yield self.next_probe_at_s
        bounds = (self.found_by_s, self.forget_at_s, self.handover_until_s, self.search_until_s)
        more = (*bounds, self.reload_due_s, self.repace_due_s, self.replace_due_s)
        yield from (each for each in more if each is not None)

    def record(self, now_s: float, by: str) -> HealthRecord:
        weights, _, load = self.load_id.rpartition("@")
        return HealthRecord(
            name=self.name,
            group=self.group,
            model=self.model,
            weights=weights,
            load=int(load or 0),
            devices=self.devices,
            reloads=self.reloads,
            reload_next_s=self.reload_next_s,
            verified=self.verified,
            last_resort=self.standing.last_resort,
            standing=self.standing,
            breaker=self.breaker.record(),
            # A running check is not part of the record.
            canary=self.canary.record() if self.open_try is None else self.written.canary,
            spare=self.spare,
            replace=self.replace,
            unfit_s=self.unfit_s,
            errors=self.errors,
            at_unix_s=now_s,
            by=by,
        )

    def restore(self, record: HealthRecord, now_s: float) -> None:
        self.written = record
        self.load_id = load_id_of(record.weights, record.load)
        self.standing = s.restore(record.standing, now_s)
        self.breaker.restore(record.breaker, now_s)
        self.canary.restore(record.canary)
        self.spare, self.reloads, self.verified = record.spare, record.reloads, record.verified
        self.accused, self.errors = record.verified, record.errors
        self.replace, self.unfit_s = record.replace, min(record.unfit_s, now_s)
        self.reload_next_s = min(record.reload_next_s, now_s + RELOAD_S_MAX * (1 + RELOAD_JITTER))
        if s.HealthCause.GONE in self.standing.causes:
            self.died_at_s = self.standing.since_s
        else:
            self.found_by_s, self.search_until_s = now_s + FOUND_BY_S, now_s + SEARCH_S

    def is_older(self, facts: WorkerFacts) -> bool:
        """Return True if the facts are out of date: they are of an earlier load of the same weights."""
        weights, _, load = self.load_id.rpartition("@")
        return bool(load) and weights == (facts.weights or self.path) and (facts.load or 1) < int(load)


def next_reload(due_s: float, reloads: int, now_s: float, jitter: float) -> tuple[float, int]:
    """Return when the next reload is due and the number of reloads in a row, after one that is requested now and was
    due at `due_s`. `jitter` is from [0, 1). After a long time without a reload the count starts again."""
    count = 1 if now_s > due_s + RELOAD_S_MAX else reloads + 1
    return now_s + backoff_s(count, RELOAD_S, RELOAD_S_MAX) * (1 + RELOAD_JITTER * jitter), count


def was_load_checked(load_id: str, workers: Iterable[WorkerHealth]) -> bool:
    """Return True if a canary of any worker checked that load of weights before."""
    return any(worker.load_id == load_id and worker.standing.heard_s for worker in workers)


def errors_before(facts: WorkerFacts, workers: Iterable[WorkerHealth]) -> History:
    """Return the errors of the process that a new one replaces: the last dead one with its name and model."""
    same = [
        worker
        for worker in workers
        if worker.died_at_s is not None and (worker.name, worker.model) == (facts.name, facts.model)
    ]
    return max(same, key=lambda worker: worker.died_at_s or 0.0).errors if same else ()


def load_id_of(weights: str, load: int) -> str:
    return f"{weights}@{load}" if weights else ""
