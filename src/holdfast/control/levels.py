"""The deployment's level, and its spares: from all that control knows of its workers to what is written. Pure.

Theory. Capacity is measured about twice a second, and whenever a worker comes, goes or is weighed: `routing.capacity`
says what the workers carry, `routing.degradation` what level follows, `routing.spares` who serves of the reserve.
A deployment has one promise and one level, over all its models: a model that loses its workers takes from the others
only the share that it had of the promise. The reserve is kept for each set of like workers, for a spare helps its own
set only.

A deployment that *starts* is not short of workers: until it was whole once, or until `start_up_s` after its first
worker, its capacity counts as no less than was promised. It starts if none of its workers had been judged before;
whoever goes on from another control, whose verdicts on running workers stand, starts nothing.

Level 4 lets no traffic in that would show what workers can carry. So it is for want of workers alone, whatever was
measured of those that are there. And that they are *missing* says little of the rest: after `PLAN_S` of it the plan is
what was there meanwhile, if nobody said how many there should be; if somebody did, those that are left count for no
less than a quarter of the promise, which is level 3.

Always true: it goes on from the record that stands; what it says is to be written before anybody acts on it; a worker
counts by the last verdict that it was told of, and a spare, which has no traffic, counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from msgspec import structs

from holdfast.health.records import HealthRecord
from holdfast.health.standing import Cause, Status
from holdfast.routing.capacity import Capacity, Carrier, Meter, Profile, measure
from holdfast.routing.degradation import Degradation, LevelRecord, Sampled
from holdfast.routing.spares import Looked, Member, Reserve, Spared
from holdfast.spec.levels import LevelSettings

SAMPLE_S = 0.5
# A window of traffic that a pace is taken from: ten beats under work, so that when they arrive matters little.
WINDOW_S = 1.0
# Beats come each second at least; a longer pause was not watched, and says nothing of a pace.
PAUSE_MAX_S = 3.0
# How long a standby counts as waking: what taking over may take (`Place.wake_s`).
WAKE_S = 12.0
# How long fewer than planned are there before that is how many there are: longer than a host takes to come back.
PLAN_S = 600.0
# Then those that are left count at least for this share of the promise, whatever was said: level 3, as if all were slow
# (`capacity.SLOW_SHARE_MIN`).
LEFT_SHARE_MIN = 0.25
STARTING = "starting"


# -- what happens


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker says of itself."""

    name: str
    kind: str  # model card and device kind: who is like whom
    places: int
    group: str = ""
    active: bool = True  # False: a standby


@dataclass(frozen=True, slots=True)
class Came:
    """A worker is there, or says something else of itself than before."""

    path: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class Went:
    """A worker is gone: its key, and its connection."""

    path: str


@dataclass(frozen=True, slots=True)
class Weighed:
    """What stands in the store of a worker's health."""

    path: str
    record: HealthRecord


@dataclass(frozen=True, slots=True)
class Beaten:
    """What a beat says of a worker's work."""

    path: str
    running: int
    tokens: int  # since its start
    blocks: int = 0  # of KV; 0: it does not say


@dataclass(frozen=True, slots=True)
class Ended:
    """Requests that came to their good end since the last time, with their tokens."""

    requests: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline_s` has come."""


Event = Came | Went | Weighed | Beaten | Ended | Tick


# -- what is to be done about it


@dataclass(frozen=True, slots=True)
class WriteLevel:
    """Write this record. `changed`: the level is another one than before."""

    record: LevelRecord
    changed: bool


Effect = WriteLevel | Spared


# -- what is known


@dataclass(slots=True)
class _Window:
    """What a worker did since a beat."""

    since_s: float
    tokens: int  # at that beat
    running: int = 0  # of all beats since, together
    beats: int = 0


@dataclass(slots=True)
class _Worker:
    facts: Facts
    record: HealthRecord | None = None
    blocks: int = 0
    running: int = 0
    window: _Window | None = None

    @property
    def meter_key(self) -> str:
        return self.facts.group or self.facts.name

    @property
    def spare(self) -> bool:
        return self.record is not None and self.record.spare

    @property
    def weight(self) -> float:
        """By its standing. One of a group has proven itself by taking over; any other waits for its first verdict."""
        if self.record is None:
            return 1.0 if self.facts.group else 0.0
        return self.record.standing.weight

    @property
    def sound(self) -> bool:
        return self.facts.active and self.record is not None and self.record.standing.status == Status.HEALTHY

    @property
    def lost(self) -> bool:
        """Its group's standby is to take over from it."""
        causes = self.record.standing.causes if self.record is not None else {}
        return Cause.LOST in causes or Cause.GONE in causes


@dataclass(slots=True)
class _Start:
    """A deployment that starts: `first_s` is when its first worker was there."""

    first_s: float | None = None


@dataclass(slots=True)
class Levels:
    """One deployment's capacity, level and spares."""

    settings: LevelSettings
    written: LevelRecord | None = None  # as it stands
    judged: bool = False  # of the workers that are there, by another control before
    profile: Profile = field(default_factory=Profile)
    capacity: Capacity | None = None  # as last measured
    planned: int = 0  # workers that are to be there, spares among them
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _meters: dict[str, Meter] = field(default_factory=dict)
    _lost_s: dict[str, float] = field(default_factory=dict)  # by group: since when its active is
    _reserves: dict[str, Reserve] = field(default_factory=dict)
    _degradation: Degradation | None = None  # made at the first sample
    _start: _Start | None = None
    # How many were there within `PLAN_S`, and when last: the most first, and after each those that were there since.
    _lately: list[tuple[float, int]] = field(default_factory=list)
    _sample_s: float = 0.0  # when the next is due

    def __post_init__(self) -> None:
        known = self.written.planned if self.written is not None else 0
        self.planned = self.settings.slo.workers or known

    def __repr__(self) -> str:
        level = repr(self._degradation) if self._degradation is not None else "nothing measured yet"
        return f"{level}; {self.capacity}" if self.capacity is not None else level

    @property
    def level(self) -> int:
        return self._degradation.level if self._degradation is not None else 0

    @property
    def starting(self) -> bool:
        return self._start is not None

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """What is to be written, in order."""
        match event:
            case Came():
                self._came(event.path, event.facts)
            case Went():
                self._went(event.path, now_s)
            case Weighed():
                self._weighed(event.path, event.record, now_s)
            case Beaten():
                self._beaten(event, now_s)
            case Ended():
                self.profile.ended(event.requests, event.prompt_tokens, event.answer_tokens)
        if isinstance(event, Beaten | Ended) or (isinstance(event, Tick) and now_s < self.next_deadline_s()):
            return ()
        return tuple(self._sample(now_s))

    def next_deadline_s(self) -> float:
        due = [self._degradation.next_deadline_s() if self._degradation is not None else None]
        due += [reserve.next_deadline_s() for reserve in self._reserves.values()]
        return min([self._sample_s, *(one for one in due if one is not None)])

    # -- workers

    def _came(self, path: str, facts: Facts) -> None:
        known = self._workers.get(path)
        if known is None:
            self._workers[path] = known = _Worker(facts)
        woke = facts.active and not known.facts.active
        known.facts = facts
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

    def _weighed(self, path: str, record: HealthRecord, now_s: float) -> None:
        worker = self._workers.get(path)
        if worker is None:
            return
        fell = worker.record is not None and worker.weight == 0.0
        worker.record = record
        if not worker.facts.active:
            return
        if fell and worker.weight > 0.0:
            # What it showed before, or on its way down, says nothing of it: a level would keep small the batches that
            # could show otherwise.
            self._meters.pop(worker.meter_key, None)
            worker.window = None
        if worker.lost:
            self._lose(worker.facts.group, now_s)
        elif worker.weight > 0.0:
            self._lost_s.pop(worker.facts.group, None)

    def _lose(self, group: str, now_s: float) -> None:
        """The group's active is lost; unless another has taken over from it already."""
        own = [worker for worker in self._workers.values() if worker.facts.group == group]
        if group and not any(worker.facts.active and not worker.lost for worker in own):
            self._lost_s.setdefault(group, now_s)

    def _beaten(self, beat: Beaten, now_s: float) -> None:
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
            meter.saw(window.running / window.beats, beat.tokens - window.tokens, took_s, now_s)
            worker.window = _Window(now_s, beat.tokens)

    # -- samples

    def _sample(self, now_s: float) -> Iterator[Effect]:
        self._sample_s = now_s + SAMPLE_S
        carriers = list(self._carriers(now_s))
        there = sum(1 for one in carriers if one.carries(now_s))
        self._begin(there, now_s)
        degradation = self._degradation
        assert degradation is not None
        self._plan(now_s)
        weight = sum(one.weight for one in carriers if one.carries(now_s))
        keepers = self._keepers(weight)
        capacity = measure(self.settings.slo, self.profile, carriers, keepers, now_s)
        self.capacity = capacity
        yield from self._reserve(capacity, now_s)
        ratio, why = max(capacity.ratio, min(LEFT_SHARE_MIN, weight / keepers)), str(capacity)
        if self._is_starting(capacity, now_s):
            ratio, why = max(1.0, ratio), f"{STARTING}, {why}"
        changes = degradation.step(Sampled(ratio, capacity.carriers, why), now_s)
        record = replace(degradation.record, planned=self.planned)
        if changes or self.written is None or self.written.planned != self.planned:
            before = self.written.level if self.written is not None else 0
            self.written = record
            yield WriteLevel(record, changed=before != record.level)

    def _begin(self, there: int, now_s: float) -> None:
        """At the first sample: go on from the record, or start."""
        if self._degradation is not None:
            if self._start is not None and self._start.first_s is None and there:
                self._start.first_s = now_s
            return
        record = self.written
        self._lately = [(now_s, self.planned)]
        if not self.judged:
            self._start = _Start(now_s if there else None)
            if record is not None and not record.vacant:
                record = None  # of a former life: nobody whom it speaks of is there
                self.written = None
        self._degradation = Degradation(self.settings.times, record, now_s)

    def _is_starting(self, capacity: Capacity, now_s: float) -> bool:
        start = self._start
        if start is None or start.first_s is None:
            return False
        if capacity.ratio >= 1.0 or now_s >= start.first_s + self.settings.times.start_up_s:
            self._start = None
        return self._start is not None

    def _plan(self, now_s: float) -> None:
        """Without a word of how many there should be, it is the most that were there at once, not too long ago."""
        there = sum(1 for worker in self._workers.values() if worker.facts.active and worker.weight > 0.0)
        if not there:  # nobody at all is held for, and says nothing of how many are enough
            self._lately = [(now_s, self.planned)]
            return
        while self._lately and self._lately[-1][1] <= there:
            self._lately.pop()
        self._lately.append((now_s, there))
        while self._lately[0][0] < now_s - PLAN_S:
            self._lately.pop(0)
            for reserve in self._reserves.values():
                reserve.size = 0  # as many as it sees
        self.planned = self.settings.slo.workers or self._lately[0][1]

    def _keepers(self, weight: float) -> int:
        """How many workers like those that are there, of this weight together, keep the promise."""
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

    def _carrier(self, name: str, worker: _Worker, weight: float, waking_until_s: float | None) -> Carrier:
        return Carrier(
            name,
            weight,
            worker.facts.places,
            self._meters.setdefault(worker.meter_key, Meter()),
            kv_blocks=worker.blocks or None,
            kind=worker.facts.kind,
            waking_until_s=waking_until_s,
        )

    def _waking(self) -> Iterator[tuple[str, _Worker]]:
        """Groups whose active was lost, each with a standby that may take over: not one whose weights are doubted."""
        seen = set[str]()
        for worker in self._workers.values():
            group = worker.facts.group
            fit = worker.record is None or not worker.record.standing.quarantined
            if not worker.facts.active and fit and group in self._lost_s and group not in seen:
                seen.add(group)
                yield group, worker

    # -- the reserve

    def _reserve(self, capacity: Capacity, now_s: float) -> Iterator[Spared]:
        members: dict[str, list[Member]] = {kind: [] for kind in self._reserves}
        for path, worker in self._workers.items():
            if worker.facts.active:
                one = Member(path, worker.weight, worker.sound, worker.spare, worker.running)
                members.setdefault(worker.facts.kind, []).append(one)
        for group, worker in self._waking():
            if now_s < self._lost_s[group] + WAKE_S:
                members.setdefault(worker.facts.kind, []).append(Member(group, 1.0, False))
        for kind, own in members.items():
            reserve = self._reserves.setdefault(kind, Reserve(self.settings.reserve, begun=self.judged))
            if len(members) == 1:
                reserve.size = max(reserve.size, self.planned)
            looked = Looked(own, capacity, self.level, whole=self._start is None)
            for change in reserve.step(looked, now_s):
                worker = self._workers[change.name]
                assert worker.record is not None, "only who is sound becomes a spare, by its record"
                worker.record = structs.replace(worker.record, spare=change.spare)
                yield change

