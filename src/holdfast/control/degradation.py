"""The level controller decides a deployment's degradation level and which of its workers are spares. Pure.

Theory. Capacity is measured about twice a second, and whenever a worker comes, goes or gets a verdict.
`routing.capacity` computes what the workers carry, `routing.degradation` the level, `routing.spares` which spares
serve. A deployment has one promise (its SLO) and one level, over all its models: a model that loses its workers reduces
capacity only by its share of the promise. Each set of like workers has its own reserve, because a spare helps only its
set.

A deployment that *starts* is not short of workers: until it was whole once, or until `start_up_s` after its first
worker, its capacity counts as at least the promise. It starts if none of its workers had a verdict before; a control
that takes over from another finds verdicts.

At level 4 no traffic is admitted that could show what workers carry. So only a lack of workers leads to it, never slow
measurements. After `PLAN_S` with *missing* workers:
- Without a number in the settings, the most workers that were there in that time become the plan.
- With one, the remaining workers count for at least a quarter of the promise, which is level 3.

Always true:
- The controller continues from the stored record.
- Its effects are written before any process acts on them.
- A worker counts by its last verdict; a spare has no traffic and counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from msgspec import structs

from holdfast.control.worker_health import WorkerFacts
from holdfast.core.ports import DeadlineReached
from holdfast.health.records import HealthRecord
from holdfast.health.standing import HealthCause, HealthStatus
from holdfast.routing.capacity import Capacity, Carrier, Meter, Profile, measure_capacity
from holdfast.routing.degradation import Degradation, LevelRecord, Sampled
from holdfast.routing.spares import Reserve, SpareCandidate, SpareChanged, SparesSampled
from holdfast.spec.health import LevelSettings

SAMPLE_S = 0.5
# A pace is measured over this window: it has enough beats under work that their exact arrival matters little.
WINDOW_S = 1.0
# Beats come each second at least; after a longer pause the window starts again.
PAUSE_MAX_S = 3.0
# How long a standby counts as waking: the longest takeover (`FailoverSettings.wake_s`).
WAKE_S = 12.0
# After this time with fewer workers than planned, their number becomes the plan: longer than a host takes to restart.
PLAN_S = 600.0
# After PLAN_S the remaining workers count for at least this share of the promise, even if the settings plan more
# workers: level 3, as if all were slow (`capacity.SLOW_SHARE_MIN`).
LEFT_SHARE_MIN = 0.25
STARTING = "starting"


# -- events


@dataclass(frozen=True, slots=True)
class WorkerCame:
    """A worker is new, or its facts have changed."""

    path: str
    facts: WorkerFacts
    places: int


@dataclass(frozen=True, slots=True)
class WorkerWent:
    """A worker is gone: its key was deleted and its connection is closed."""

    path: str


@dataclass(frozen=True, slots=True)
class VerdictWritten:
    """A worker's health record has changed."""

    path: str
    record: HealthRecord


@dataclass(frozen=True, slots=True)
class BeatReceived:
    """A worker's beat came, with the counts of its work."""

    path: str
    running: int
    tokens: int  # since the worker's start
    blocks: int = 0  # KV blocks; 0: not reported


@dataclass(frozen=True, slots=True)
class RequestsEnded:
    """Requests ended well since the last such event; the tokens are sums."""

    requests: int
    prompt_tokens: int
    answer_tokens: int


LevelEvent = WorkerCame | WorkerWent | VerdictWritten | BeatReceived | RequestsEnded | DeadlineReached


# -- effects


@dataclass(frozen=True, slots=True)
class WriteLevel:
    """Write this record. `changed`: the level differs from the record before."""

    record: LevelRecord
    changed: bool


LevelEffect = WriteLevel | SpareChanged


# -- state


@dataclass(slots=True)
class _Window:
    """Sums the work of a worker since a beat."""

    since_s: float
    tokens: int  # at that beat
    running: int = 0  # sum over all beats since
    beats: int = 0


@dataclass(slots=True)
class _Carrier:
    facts: WorkerFacts
    places: int
    record: HealthRecord | None = None
    blocks: int = 0
    running: int = 0
    window: _Window | None = None

    @property
    def kind(self) -> str:
        """Return the model card and device kind; workers of equal kind are compared."""
        return f"{self.facts.model}/{self.facts.kind}"

    @property
    def meter_key(self) -> str:
        return self.facts.group or self.facts.name

    @property
    def spare(self) -> bool:
        return self.record is not None and self.record.spare

    @property
    def weight(self) -> float:
        """Return the weight of its verdict. Before the first verdict an engine of a group has weight 1, because it
        checked itself when it took over; any other worker has 0."""
        if self.record is None:
            return 1.0 if self.facts.group else 0.0
        return self.record.standing.weight

    @property
    def sound(self) -> bool:
        return self.facts.active and self.record is not None and self.record.standing.status == HealthStatus.HEALTHY

    @property
    def lost(self) -> bool:
        """Return True if its group's standby should take over from it."""
        causes = self.record.standing.causes if self.record is not None else {}
        return HealthCause.LOST in causes or HealthCause.GONE in causes


@dataclass(slots=True)
class LevelController:
    """Keeps one deployment's capacity, level and spares, and decides their changes."""

    settings: LevelSettings
    written: LevelRecord | None = None  # as stored
    continues: bool = False  # workers that are present have verdicts of an earlier control
    profile: Profile = field(default_factory=Profile)
    capacity: Capacity | None = None  # as last measured
    planned: int = 0  # desired number of workers, spares included
    _workers: dict[str, _Carrier] = field(default_factory=dict)
    _meters: dict[str, Meter] = field(default_factory=dict)
    _lost_s: dict[str, float] = field(default_factory=dict)  # by group: since when its active worker is lost
    _reserves: dict[str, Reserve] = field(default_factory=dict)
    _degradation: Degradation | None = None  # made at the first sample
    starting: bool = False
    _first_s: float | None = None  # when the first worker of a starting deployment appeared
    # (time, number of workers) within `PLAN_S`: the maximum first, and after each entry the maximum since.
    _lately: list[tuple[float, int]] = field(default_factory=list)
    _sample_s: float = 0.0  # when the next sample is due

    def __post_init__(self) -> None:
        known = self.written.planned if self.written is not None else 0
        self.planned = self.settings.slo.workers or known

    @property
    def level(self) -> int:
        return self._degradation.level if self._degradation is not None else 0

    def step(self, event: LevelEvent, now_s: float) -> tuple[LevelEffect, ...]:
        """Apply an event; return what is to be written, in order."""
        match event:
            case WorkerCame():
                self._came(event)
            case WorkerWent():
                self._went(event.path, now_s)
            case VerdictWritten():
                self._on_verdict(event.path, event.record, now_s)
            case BeatReceived():
                self._beaten(event, now_s)
            case RequestsEnded():
                self.profile.add_ended(event.requests, event.prompt_tokens, event.answer_tokens)
        if isinstance(event, BeatReceived | RequestsEnded) or (
            isinstance(event, DeadlineReached) and now_s < self.next_deadline_s()
        ):
            return ()
        return tuple(self._sample(now_s))

    def next_deadline_s(self) -> float:
        due = [self._degradation.next_deadline_s() if self._degradation is not None else None]
        due += [reserve.next_deadline_s() for reserve in self._reserves.values()]
        return min([self._sample_s, *(one for one in due if one is not None)])

    # -- workers

    def _came(self, event: WorkerCame) -> None:
        facts, known = event.facts, self._workers.setdefault(event.path, _Carrier(event.facts, event.places))
        woke = facts.active and not known.facts.active
        known.facts, known.places = facts, event.places
        if facts.active and (woke or not known.lost):
            self._lost_s.pop(facts.group, None)

    def _went(self, path: str, now_s: float) -> None:
        gone = self._workers.pop(path, None)
        if gone is None:
            return
        key, group = gone.meter_key, gone.facts.group
        if all(worker.meter_key != key for worker in self._workers.values()):
            self._meters.pop(key, None)
            self._lost_s.pop(group, None)
        elif gone.facts.active:
            self._lose(group, now_s)

    def _on_verdict(self, path: str, record: HealthRecord, now_s: float) -> None:
        worker = self._workers.get(path)
        if worker is None:
            return
        had_none = worker.record is not None and worker.weight == 0.0
        worker.record = record
        if not worker.facts.active:
            return
        if had_none and worker.weight > 0.0:
            # Discard measurements from before it lost its weight: a level based on them would keep batches too small to
            # disprove them.
            self._meters.pop(worker.meter_key, None)
            worker.window = None
        if worker.lost:
            self._lose(worker.facts.group, now_s)
        elif worker.weight > 0.0:
            self._lost_s.pop(worker.facts.group, None)

    def _lose(self, group: str, now_s: float) -> None:
        """Note that the group's active worker is lost, unless another has already taken over."""
        own = [worker for worker in self._workers.values() if worker.facts.group == group]
        if group and not any(worker.facts.active and not worker.lost for worker in own):
            self._lost_s.setdefault(group, now_s)

    def _beaten(self, beat: BeatReceived, now_s: float) -> None:
        worker = self._workers.get(beat.path)
        if worker is None:
            return
        worker.blocks, worker.running = beat.blocks, beat.running
        window = worker.window
        if window is None or beat.tokens < window.tokens or now_s - window.since_s > PAUSE_MAX_S:
            worker.window = _Window(now_s, beat.tokens)
            return
        window.running += beat.running
        window.beats += 1
        took_s = now_s - window.since_s
        if took_s >= WINDOW_S:
            meter = self._meters.setdefault(worker.meter_key, Meter())
            meter.add_window(window.running / window.beats, beat.tokens - window.tokens, took_s, now_s)
            worker.window = _Window(now_s, beat.tokens)

    # -- samples

    def _sample(self, now_s: float) -> Iterator[LevelEffect]:
        self._sample_s = now_s + SAMPLE_S
        carriers = list(self._carriers(now_s))
        there = sum(1 for one in carriers if one.carries(now_s))
        self._begin(there, now_s)
        degradation = self._degradation
        assert degradation is not None
        self._plan(now_s)
        weight = sum(one.weight for one in carriers if one.carries(now_s))
        keepers = self._keepers(weight)
        capacity = measure_capacity(self.settings.slo, self.profile, carriers, keepers, now_s)
        self.capacity = capacity
        yield from self._reserve(capacity, now_s)
        ratio, why = max(capacity.ratio, min(LEFT_SHARE_MIN, weight / keepers)), str(capacity)
        if self._is_starting(capacity, now_s):
            ratio, why = max(1.0, ratio), f"{STARTING}, {why}"
        changed = degradation.step(Sampled(ratio, capacity.carriers, why), now_s)
        record = replace(degradation.record, planned=self.planned)
        if changed or self.written is None or self.written.planned != self.planned:
            before = self.written.level if self.written is not None else 0
            self.written = record
            yield WriteLevel(record, changed=before != record.level)

    def _begin(self, there: int, now_s: float) -> None:
        """Continue from the record, or start; called at the first sample."""
        if self._degradation is not None:
            if self.starting and self._first_s is None and there:
                self._first_s = now_s
            return
        record = self.written
        self._lately = [(now_s, self.planned)]
        if not self.continues:
            self.starting, self._first_s = True, now_s if there else None
            if record is not None and not record.vacant:
                record = None  # it is of an earlier run, of which no worker is there
                self.written = None
        self._degradation = Degradation(self.settings.times, record, now_s)

    def _is_starting(self, capacity: Capacity, now_s: float) -> bool:
        if not self.starting or self._first_s is None:
            return False
        self.starting = capacity.ratio < 1.0 and now_s < self._first_s + self.settings.times.start_up_s
        return self.starting

    def _plan(self, now_s: float) -> None:
        """Set `planned`: the number in the settings, or else the most workers at once within `PLAN_S`."""
        there = sum(1 for worker in self._workers.values() if worker.facts.active and worker.weight > 0.0)
        if not there:  # a complete outage says nothing about how many workers are enough
            self._lately = [(now_s, self.planned)]
            return
        while self._lately and self._lately[-1][1] <= there:
            self._lately.pop()
        self._lately.append((now_s, there))
        while self._lately[0][0] < now_s - PLAN_S:
            self._lately.pop(0)
            for reserve in self._reserves.values():
                reserve.size = 0  # counted again from the present workers
        self.planned = self.settings.slo.workers or self._lately[0][1]

    def _keepers(self, weight: float) -> int:
        """Return how many workers keep the promise; `weight` is the sum of the present workers' weights."""
        kept = sum(reserve.wanted for reserve in self._reserves.values())
        keepers = max(1, self.planned - kept)
        if self._lately[0][1] >= self.planned:
            return keepers
        return max(1, min(keepers, int(weight / LEFT_SHARE_MIN)))

    def _carriers(self, now_s: float) -> Iterator[Carrier]:
        for path, worker in self._workers.items():
            if worker.facts.active:
                yield self._carrier(path, worker, 0.0 if worker.spare else worker.weight, None)
        for group, worker in self._waking():
            yield self._carrier(group, worker, 1.0, self._lost_s[group] + WAKE_S)

    def _carrier(self, name: str, worker: _Carrier, weight: float, waking_until_s: float | None) -> Carrier:
        return Carrier(
            name,
            weight,
            worker.places,
            self._meters.setdefault(worker.meter_key, Meter()),
            kv_blocks=worker.blocks or None,
            kind=worker.kind,
            waking_until_s=waking_until_s,
        )

    def _waking(self) -> Iterator[tuple[str, _Carrier]]:
        """Yield groups that lost their active worker, each with a standby that may take over and is not quarantined."""
        seen = set[str]()
        for worker in self._workers.values():
            group = worker.facts.group
            fit = worker.record is None or not worker.record.standing.quarantined
            if not worker.facts.active and fit and group in self._lost_s and group not in seen:
                seen.add(group)
                yield group, worker

    # -- the reserve

    def _reserve(self, capacity: Capacity, now_s: float) -> Iterator[SpareChanged]:
        members: dict[str, list[SpareCandidate]] = {kind: [] for kind in self._reserves}
        for path, worker in self._workers.items():
            if worker.facts.active:
                one = SpareCandidate(path, worker.weight, worker.sound, worker.spare, worker.running)
                members.setdefault(worker.kind, []).append(one)
        for group, worker in self._waking():
            if now_s < self._lost_s[group] + WAKE_S:
                members.setdefault(worker.kind, []).append(SpareCandidate(group, 1.0, False))
        for kind, own in members.items():
            reserve = self._reserves.setdefault(kind, Reserve(self.settings.reserve, begun=self.continues))
            if len(members) == 1:
                reserve.size = max(reserve.size, self.planned)
            looked = SparesSampled(own, capacity, self.level, whole=not self.starting)
            for change in reserve.step(looked, now_s):
                worker = self._workers[change.name]
                assert worker.record is not None, "only who is sound becomes a spare, by its record"
                worker.record = structs.replace(worker.record, spare=change.spare)
                yield change
