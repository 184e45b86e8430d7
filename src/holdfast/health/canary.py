"""The canary machine of one worker decides when to send it a known question, and checks the answers. Pure: no I/O, no
clock (`now_s` is passed in, wall time as in `standing`, and never goes back), no randomness but what is injected.
(`expectations` decides what the answer must be, for all workers of a kind.)

Theory (facts 14, 24). A worker's own report that it is well proves nothing; its answers do. Every worker has its own
machine and schedule. Busy workers are checked like idle ones, because there a fault hurts most. A worker is checked:
- before it gets traffic, and after each load of weights;
- then every 30 s, or less often where that would take more than `CanaryLimits.share` of its time;
- at once when its breaker, its standing or `expectations` requests it.
A worker that takes over is not checked in its first seconds: streams wait for it then, and its engine checks itself
with a known question (facts 22).

After a bad answer the same question is asked again, up to twice; one sound answer ends the check as passed. Only wrong
answers are remembered after that, because corruption comes and goes: three wrong ones, with fewer than ten clean checks
between them, are an accusation, which the other sets of weights confirm or refute. A late answer is no failure in these
cases:
- The worker's load explains it: each class of occupancy (`OCCUPANCIES`) has its own usual time, and while requests wait
  no answer is late.
- The other workers of its set are late too, or there is no other worker to compare with (`pace_of`).
A missing answer is no failure if control reached no other worker either: control may be cut off itself.

Always true:
- `TABLE` contains every change of state.
- At most one try is unanswered at a time; a check has at most `TRIES` tries and at most one outcome.
- An answer that comes late, twice, or to another question changes nothing; a lost answer only ends its check.
- Failures and late answers change no baseline.
- A breaker's request is answered once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Annotated

from msgspec import Meta

from holdfast.core.ports import DeadlineReached
from holdfast.health.bounds import Count, UnixS
from holdfast.health.breaker import CanaryAnswered
from holdfast.health.standing import CanaryFailed, CanaryFailing, CanaryPassed, HealthNote
from holdfast.spec.health import CANARY_SHARE

TRIES = 3
# How long the probe waits for the last token. All tries and their pauses together fit in a breaker's `CANARY_S`.
TRY_S = 15.0
# Pauses between tries, so that the next try runs in another batch.
PAUSES_S = (1.0, 2.0)
# If no event came this long after `TRY_S`, the probe has ended or lost the answer.
LOST_S = 5.0
Took = Annotated[float, Meta(ge=0.0, le=TRY_S + LOST_S)]
# Pause before a worker that had no place for the canary is asked again. Short: a refusal costs nothing, and a worker
# gets no traffic before its first check.
REFUSED_S = 5.0
# Delay of the first check after a takeover: streams run again then, and the next standby has loaded.
TOOK_OVER_S = 10.0
JITTER_MAX = 0.2  # longer, never shorter: the share is an upper bound
ALPHA = 0.1
# No answer is late before so many were measured; the first ones count in full, so that a cold start is forgotten.
SAMPLES_MIN = 3
WRONGS_MAX = 3
CLEAN = 10  # after so many checks without a wrong try, earlier wrong tries are forgotten
REQUESTED_MAX = 16  # waiting requests for checks: more than `expectations` and a breaker have at once
# Upper bounds of the classes of occupancy (share of its places in use); above the last, requests wait, and any delay is
# explained.
OCCUPANCIES = (0.0, 0.25, 0.5, 1.0)


class CanaryState(StrEnum):
    ABSENT = "absent"
    IDLE = "idle"
    ASKING = "asking"  # a try is out
    PAUSING = "pausing"  # before the next try of the same check


class CanaryCause(StrEnum):
    CAME = "came"
    LEFT = "left"
    BEGUN = "begun"
    TRY_FAILED = "try-failed"
    AGAIN = "again"
    OVER = "over"  # decided, refused, lost, or of an earlier load


TABLE: dict[CanaryState, dict[CanaryCause, CanaryState]] = {
    CanaryState.ABSENT: {CanaryCause.CAME: CanaryState.IDLE},
    CanaryState.IDLE: {CanaryCause.BEGUN: CanaryState.ASKING, CanaryCause.LEFT: CanaryState.ABSENT},
    CanaryState.ASKING: {
        CanaryCause.TRY_FAILED: CanaryState.PAUSING,
        CanaryCause.OVER: CanaryState.IDLE,
        CanaryCause.LEFT: CanaryState.ABSENT,
    },
    CanaryState.PAUSING: {
        CanaryCause.AGAIN: CanaryState.ASKING,
        CanaryCause.OVER: CanaryState.IDLE,
        CanaryCause.LEFT: CanaryState.ABSENT,
    },
}


@dataclass(frozen=True, slots=True)
class CanaryLimits:
    interval_s: float = 30.0  # between checks, in seconds, at least
    share: float = CANARY_SHARE  # of a worker's time that checks may take
    slow_ratio: float = 3.0  # times its usual time is late


# -- events


@dataclass(frozen=True, slots=True)
class CanaryPresent:
    """The worker is there, awake, with weights of this load (as in `standing.WorkerPresent`)."""

    load: int
    took_over: bool = False  # it slept, and its weights were checked before in another process


@dataclass(frozen=True, slots=True)
class CanaryGone:
    """The worker is absent or asleep."""


@dataclass(frozen=True, slots=True)
class CheckRequested:
    """A check is requested now. `question`: the one to ask; `number`: of the breaker's canary that this is; `peer`:
    True if another worker's `AskPeers` requested it."""

    reason: str
    question: int | None = None
    number: int | None = None
    peer: bool = False


@dataclass(frozen=True, slots=True)
class TryAnswered:
    """The try of that number was answered completely."""

    number: int
    question: int  # that was asked
    took_s: float
    tokens: int  # above 0
    occupancy: float  # running and waiting streams over places, the larger of before and after; without the canary
    wrong: str = ""  # as `Expectations.find_error` says
    peers: float | None = None  # `pace_of` the others of its set since this check began
    known: bool = True  # it was compared with an answer that was expected before it came, and still is


@dataclass(frozen=True, slots=True)
class TryUnanswered:
    """No complete answer came in time, or the worker answered with an error."""

    number: int
    reason: str
    moving: bool = False  # the worker made tokens meanwhile, for a client or for the canary
    sound: bool = True  # control reached another worker since the check began, or there is no other


@dataclass(frozen=True, slots=True)
class TryRefused:
    """The worker had no place for the canary."""

    number: int


CanaryEvent = CanaryPresent | CanaryGone | CheckRequested | TryAnswered | TryUnanswered | TryRefused | DeadlineReached


# -- effects


@dataclass(frozen=True, slots=True)
class SendTry:
    """Ask the worker this question now (None: `Expectations.question_at(turn)`), and report the result under this
    number within this time."""

    number: int
    turn: int
    question: int | None = None
    within_s: float = TRY_S


@dataclass(frozen=True, slots=True)
class Accuse:
    """The worker's answers are wrong; `Expectations` decides whether the weights or the expected answer are wrong."""

    question: int
    asked_at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class AskPeers:
    """Check the other workers of its set too (`CheckRequested.peer`): if they are late as well, it is not at fault."""


# `CanaryPassed` and `CanaryFailed` are events of the worker's standing, `CanaryAnswered` of its breaker.
CanaryEffect = SendTry | Accuse | AskPeers | HealthNote | CanaryPassed | CanaryFailed | CanaryAnswered


@dataclass(slots=True)
class Baseline:
    """The usual seconds per token; plain data."""

    mean_s: Took = 0.0
    samples: Count = 0

    def add(self, pace_s: float) -> None:
        self.samples += 1
        self.mean_s += max(ALPHA, 1 / self.samples) * (pace_s - self.mean_s)


@dataclass(frozen=True, slots=True)
class CanaryRecord:
    """The stored part of the machine; plain data. A running check is not part of it."""

    load: Count = 0
    number: Count = 0  # of the last try
    turn: Count = 0
    due_s: UnixS = 0.0
    cost_s: Took = 0.0
    wrongs: Annotated[int, Meta(ge=0, le=WRONGS_MAX)] = 0
    clean: Count = 0
    baselines: dict[int, Baseline] = field(default_factory=dict)  # by class of occupancy


@dataclass(slots=True)
class _Check:
    question: int | None  # None: the question of this turn
    breaker: int | None  # the number of its breaker's canary, if it is that
    peer: bool
    began_s: float
    failed: list[CanaryFailing] = field(default_factory=list)
    why: str = ""
    moving: bool = False
    sound: bool = True
    known: bool = False  # `TryAnswered.known` of the last answer that was not wrong
    ratio: float = 0.0  # of the last late answer: its time over the usual one
    peers: float | None = None


class WorkerCanary:
    """Schedules and checks the canaries of one worker. `jitter` draws from [0, 1)."""

    def __init__(self, name: str, jitter: Callable[[], float], limits: CanaryLimits | None = None) -> None:
        self.name = name
        self.state = CanaryState.ABSENT
        self.measured: list[tuple[float, float]] = []  # of its last answers: when asked, and time over the usual one
        self._limits = limits or CanaryLimits()
        self._jitter = jitter
        self._load = 0
        self._number = 0
        self._turn = 0
        self._asked_s = 0.0  # the last try
        self._until_s = 0.0  # ASKING: when the try counts as lost; PAUSING: when the next try begins
        self._due_s = 0.0  # IDLE: the next check
        self._cost_s = 0.0
        self._check: _Check | None = None
        self._requested: list[CheckRequested] = []
        self._wrongs = 0
        self._clean = 0
        self._baselines: dict[int, Baseline] = {}

    def __repr__(self) -> str:
        return f"{self.name}: {self.state}, load {self._load}, {self._number} tries, {self._wrongs} wrong lately"

    @property
    def began_s(self) -> float | None:
        """Return when the running check began."""
        return self._check.began_s if self._check else None

    @property
    def next_deadline_s(self) -> float | None:
        if self.state is CanaryState.ABSENT:
            return None
        return self._due_s if self.state is CanaryState.IDLE else self._until_s

    def record(self) -> CanaryRecord:
        baselines = {place: replace(each) for place, each in self._baselines.items()}
        return CanaryRecord(
            self._load, self._number, self._turn, self._due_s, self._cost_s, self._wrongs, self._clean, baselines
        )

    def restore(self, record: CanaryRecord) -> None:
        """Continue from another process's record, once the worker is present with the same load."""
        assert self.state is CanaryState.ABSENT, self
        self._load, self._number, self._turn = record.load, record.number, record.turn
        self._due_s, self._cost_s = record.due_s, record.cost_s
        self._wrongs, self._clean = record.wrongs, record.clean
        self._baselines = {place: replace(each) for place, each in record.baselines.items()}

    def step(self, event: CanaryEvent, now_s: float) -> tuple[CanaryEffect, ...]:
        match event:
            case CanaryPresent():
                return self._on_present(event, now_s)
            case CanaryGone():
                return self._become_absent()
            case CheckRequested():
                return self._on_requested(event, now_s)
            case DeadlineReached():
                return self._tick(now_s)
        if self.state is not CanaryState.ASKING or event.number != self._number:
            return ()
        match event:
            case TryAnswered():
                return self._check_answer(event, now_s)
            case TryUnanswered():
                assert self._check is not None
                self._check.moving |= event.moving
                self._check.sound = event.sound
                return self._on_failed_try(CanaryFailing.NO_ANSWER, event.reason, now_s)
            case TryRefused():
                return self._become_idle(now_s, min(REFUSED_S, self._limits.interval_s))

    # -- the schedule

    def _on_present(self, event: CanaryPresent, now_s: float) -> tuple[CanaryEffect, ...]:
        if self.state is not CanaryState.ABSENT and event.load == self._load:
            return ()
        if self.state is CanaryState.ABSENT:
            self.state = TABLE[self.state][CanaryCause.CAME]
        elif self.state is not CanaryState.IDLE:
            self.state = TABLE[self.state][CanaryCause.OVER]
        self._check = None
        same, self._load = event.load == self._load, event.load
        if not same:
            self._wrongs = self._clean = 0
            self._baselines, self._cost_s, self.measured = {}, 0.0, []
        if event.took_over:
            self._due_s = now_s + min(TOOK_OVER_S, self._limits.interval_s)
            return ()
        # The record's time may be of another clock; no check waits for longer than an interval.
        self._due_s = min(self._due_s, now_s + self._interval_s()) if same else now_s
        return () if same else self._tick(now_s)

    def _become_absent(self) -> tuple[CanaryEffect, ...]:
        if self.state is not CanaryState.ABSENT:
            self.state = TABLE[self.state][CanaryCause.LEFT]
        self._check = None
        self._requested.clear()
        self._due_s = 0.0  # when it is back, at once
        return ()

    def _on_requested(self, event: CheckRequested, now_s: float) -> tuple[CanaryEffect, ...]:
        same = any((each.question, each.number) == (event.question, event.number) for each in self._requested)
        # A request for any question is served by one that was sent this moment.
        served = event.question is None and event.number is None and self._asked_s == now_s
        if self.state is CanaryState.ABSENT or same or served or len(self._requested) >= REQUESTED_MAX:
            return ()
        # A breaker's canary has a deadline: it goes before questions that only teach the expected answer.
        self._requested.insert(0 if event.number is not None else len(self._requested), event)
        return self._begin_requested(now_s) if self.state is CanaryState.IDLE else ()

    def _tick(self, now_s: float) -> tuple[CanaryEffect, ...]:
        due_s = self.next_deadline_s
        if due_s is None or now_s < due_s:
            return ()
        if self.state is CanaryState.IDLE:
            return self._become_asking(CheckRequested("it is time"), now_s)
        if self.state is CanaryState.PAUSING:
            self.state = TABLE[self.state][CanaryCause.AGAIN]
            return self._send(now_s)
        return (HealthNote(f"no answer or error was reported for canary {self._number}"), *self._become_idle(now_s))

    def _begin_requested(self, now_s: float) -> tuple[CanaryEffect, ...]:
        return self._become_asking(self._requested.pop(0), now_s) if self._requested else ()

    def _become_asking(self, request: CheckRequested, now_s: float) -> tuple[CanaryEffect, ...]:
        self.state = TABLE[self.state][CanaryCause.BEGUN]
        if request.question is None:
            self._turn += 1
        self._check = _Check(request.question, request.number, request.peer, now_s)
        return self._send(now_s)

    def _send(self, now_s: float) -> tuple[CanaryEffect, ...]:
        assert self._check is not None
        self._number += 1
        self._asked_s = now_s
        self._until_s = now_s + TRY_S + LOST_S
        return (SendTry(self._number, self._turn, self._check.question),)

    def _become_idle(self, now_s: float, pause_s: float | None = None) -> tuple[CanaryEffect, ...]:
        self.state = TABLE[self.state][CanaryCause.OVER]
        self._check = None
        self._due_s = now_s + (self._interval_s() if pause_s is None else pause_s)
        return self._begin_requested(now_s)

    def _interval_s(self) -> float:
        return max(self._limits.interval_s, self._cost_s / self._limits.share) * (1 + JITTER_MAX * self._jitter())

    # -- the check of answers

    def _check_answer(self, event: TryAnswered, now_s: float) -> tuple[CanaryEffect, ...]:
        check = self._check
        assert check is not None
        check.question, check.peers = event.question, event.peers
        if event.wrong:
            self._wrongs += 1
            self._clean = 0
            return self._on_failed_try(CanaryFailing.WRONG, event.wrong, now_s)
        check.known = event.known
        place = next((place for place, most in enumerate(OCCUPANCIES) if event.occupancy <= most), None)
        if place is None:
            return self._pass(now_s)
        baseline = self._baselines.setdefault(place, Baseline())
        pace_s = min(event.took_s, TRY_S) / event.tokens  # anything longer is a delay of the probe itself
        if baseline.samples >= SAMPLES_MIN:
            ratio = pace_s / baseline.mean_s if baseline.mean_s > 0.0 else 1.0
            self.measured = [*self.measured[1 - 2 * TRIES :], (self._asked_s, ratio)]
            if ratio > self._limits.slow_ratio:
                check.ratio = ratio
                return self._on_failed_try(
                    CanaryFailing.SLOW, f"{event.took_s:.2f} s, {ratio:.1f} times what is usual", now_s
                )
        baseline.add(pace_s)
        # In a full batch a canary shares its time with other streams: the least occupied class shows its cost best.
        self._cost_s = min(TRY_S, self._baselines[min(self._baselines)].mean_s * event.tokens)
        return self._pass(now_s)

    def _on_failed_try(self, failing: CanaryFailing, why: str, now_s: float) -> tuple[CanaryEffect, ...]:
        """Try again after a failed try, or end the check."""
        check = self._check
        assert check is not None
        check.failed.append(failing)
        check.why = why
        if self._wrongs >= WRONGS_MAX and failing is CanaryFailing.WRONG:
            assert check.question is not None  # it was answered
            self._wrongs = 0
            return self._end(check, Accuse(check.question, self._asked_s, why), False, now_s)
        if len(check.failed) == TRIES:
            return self._give_up(check, now_s)
        self._until_s = now_s + PAUSES_S[len(check.failed) - 1]
        self.state = TABLE[self.state][CanaryCause.TRY_FAILED]
        first = failing is CanaryFailing.SLOW and check.failed.count(CanaryFailing.SLOW) == 1
        # A worker that is checked as a peer requests no checks of peers: where all are late that would never end.
        return (AskPeers(),) if first and check.peers is None and not check.peer else ()

    def _give_up(self, check: _Check, now_s: float) -> tuple[CanaryEffect, ...]:
        """End a check of which every try failed. A right but late answer counts as an answer."""
        if CanaryFailing.SLOW in check.failed:
            late = f"late by {check.ratio:.1f} times"
            if check.peers is None:
                return (HealthNote(f"{late}, and there is no other to compare it with"), *self._pass(now_s))
            if check.ratio <= self._limits.slow_ratio * max(1.0, check.peers):
                return (HealthNote(f"{late}, as the others of its set are ({check.peers:.1f})"), *self._pass(now_s))
            why = f"{late}, the others of its set by {check.peers:.1f}"
            return self._end(check, CanaryFailed(self._load, self._asked_s, CanaryFailing.SLOW, why), True, now_s)
        if not check.sound:
            return (HealthNote(f"no verdict, control reached no worker: {check.why}"), *self._become_idle(now_s))
        failed = CanaryFailed(self._load, self._asked_s, CanaryFailing.NO_ANSWER, check.why, check.moving)
        return self._end(check, failed, False, now_s)

    def _pass(self, now_s: float) -> tuple[CanaryEffect, ...]:
        check = self._check
        assert check is not None
        notes: tuple[CanaryEffect, ...] = ()
        if CanaryFailing.WRONG in check.failed:
            notes = (HealthNote(f"a wrong answer, and a right one when asked again: {check.why}"),)
        else:
            self._clean += 1
            self._wrongs = 0 if self._clean >= CLEAN else self._wrongs
        passed = CanaryPassed(self._load, self._asked_s, right=check.known and not self._wrongs)
        return notes + self._end(check, passed, True, now_s)

    def _end(self, check: _Check, outcome: CanaryEffect, passed: bool, now_s: float) -> tuple[CanaryEffect, ...]:
        notes = () if check.breaker is None else (CanaryAnswered(check.breaker, passed),)
        return (outcome, *notes, *self._become_idle(now_s))


def pace_of(others: Iterable[WorkerCanary], since_s: float) -> float | None:
    """Return the median lateness of the other workers of a set since `since_s`; None: none was asked.

    Of each worker the maximum counts: if all were slow and have recovered, a worker is compared with peers that were
    measured after it.
    """
    ratios = [[ratio for asked_at_s, ratio in each.measured if asked_at_s >= since_s] for each in others]
    latest = [max(own) for own in ratios if own]
    return median(latest) if latest else None
