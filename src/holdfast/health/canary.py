"""One worker's canaries: when it is asked a known question, and what is made of how it answers. Pure: no I/O, no clock
(`now_s` is passed in, wall time as in `standing`, and never goes back), no randomness but what is injected.

Theory (facts 14, 24). A worker that says it is well proves nothing; one that answers does. Every worker has a machine
and a time of its own: none waits for another's answer, and a worker with much to do is asked like an idle one, for that
is where faults hurt. It is asked before it has traffic and after each load, then every 30 s (less often where that
would take more than `Limits.share` of its time), and at once when its breaker, its standing or what compares answers
(`expectations`) wants to know. Only one that takes over is let alone for its first seconds: streams wait for them, and
its engine answers a known question of its own in them (facts 22).

One bad answer is a hiccup. It is asked the same again, twice, and whatever one sound answer disproves is not held
against it. Only wrong answers are remembered beyond that, because rot comes and goes: three, with fewer than ten clean
checks between them, are an accusation, which the other sets of weights confirm or refute. A late answer is no failure
if this worker's load explains it (each measure of load has its own baseline, and with work waiting none holds), and
none if the others of its set are late too or there is no other to compare it with: a set that is slow as a whole
accuses nobody (`outliers`). An asker that reached nobody has learnt nothing of the worker.

Always true: `TABLE` is every change of state; at most one try is out; an answer that comes late, twice, or to another's
question changes nothing, and one that never comes ends its check, and no more; a check has at most `TRIES` tries and
one outcome at most; failures and late answers move no baseline; a breaker's wish is answered once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Annotated

from msgspec import Meta

from holdfast.health.bounds import Count, UnixS
from holdfast.health.breaker import CanaryAnswered
from holdfast.health.standing import CanaryFailed, CanaryPassed, Failing
from holdfast.spec.health import CANARY_SHARE

TRIES = 3
# Whoever asks waits so long for the last token. With the pauses all tries are over within a breaker's `CANARY_S`.
TRY_S = 15.0
# Between tries: another batch, another moment.
PAUSES_S = (1.0, 2.0)
# Without a word for so much longer, whoever asked is gone or lost it.
LOST_S = 5.0
Took = Annotated[float, Meta(ge=0.0, le=TRY_S + LOST_S)]
# A worker that had no place for it is asked again then: a refusal costs nothing, and a first check lets traffic in.
REFUSED_S = 5.0
# One that took over is asked then: its streams run again, and the standby that is started in its place has loaded.
TOOK_OVER_S = 10.0
JITTER_MAX = 0.2  # longer, never shorter: the cost is a promise
ALPHA = 0.1
# Answers to learn from before one can be late; the first ones count in full, so that a cold start is forgotten.
SAMPLES_MIN = 3
WRONGS_MAX = 3
CLEAN = 10  # checks without a wrong try, and earlier wrong tries are forgotten
WANTED_MAX = 16  # wishes that wait: more than questions, sets and a breaker have at once
# Share of its places that are taken, by class; above the last, work is waiting and any delay is explained.
OCCUPANCIES = (0.0, 0.25, 0.5, 1.0)


class State(StrEnum):
    ABSENT = "absent"
    RESTING = "resting"
    ASKING = "asking"  # a try is out
    PAUSING = "pausing"  # before the next try of the same check


class Cause(StrEnum):
    CAME = "came"
    LEFT = "left"
    BEGUN = "begun"
    DOUBTED = "doubted"
    AGAIN = "again"
    OVER = "over"  # decided, refused, lost, or of an earlier load


TABLE: dict[State, dict[Cause, State]] = {
    State.ABSENT: {Cause.CAME: State.RESTING},
    State.RESTING: {Cause.BEGUN: State.ASKING, Cause.LEFT: State.ABSENT},
    State.ASKING: {Cause.DOUBTED: State.PAUSING, Cause.OVER: State.RESTING, Cause.LEFT: State.ABSENT},
    State.PAUSING: {Cause.AGAIN: State.ASKING, Cause.OVER: State.RESTING, Cause.LEFT: State.ABSENT},
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a person may set."""

    interval_s: float = 30.0  # between checks, in seconds, at least
    share: float = CANARY_SHARE  # of a worker's time that checks may take
    slow_ratio: float = 3.0  # times its usual time is late


# -- what happens


@dataclass(frozen=True, slots=True)
class Present:
    """The worker is there, awake, with weights of this load (as in `standing.Present`)."""

    load: int
    took_over: bool = False  # it slept, and its weights were asked before in another's hands


@dataclass(frozen=True, slots=True)
class Gone:
    """It is not there, or asleep."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody wants a check now. `question`: this one; `number`: its breaker's canary; `peer`: for another's
    `AskPeers`."""

    reason: str
    question: int | None = None
    number: int | None = None
    peer: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The whole answer to the try of that number."""

    number: int
    question: int  # that was asked
    took_s: float
    tokens: int  # above 0
    occupancy: float  # running and waiting streams over places, the larger of before and after; without the canary
    wrong: str = ""  # as `Expectations.judge` says
    peers: float | None = None  # `pace_of` the others of its set since this check began
    known: bool = True  # it was compared with what was expected before, and still is


@dataclass(frozen=True, slots=True)
class Unanswered:
    """There was no whole answer within the time, or an error."""

    number: int
    reason: str
    moving: bool = False  # tokens came from this worker meanwhile, a client's or some of the canary's own
    sound: bool = True  # whoever asked reached another worker since the check began, or there is no other


@dataclass(frozen=True, slots=True)
class Refused:
    """It had no place for the canary."""

    number: int


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline_s` has come."""


Event = Present | Gone | Asked | Answered | Unanswered | Refused | Tick


# -- what is to be done


@dataclass(frozen=True, slots=True)
class Send:
    """Ask the worker this question, or if none is named `Expectations.question_at(turn)`, now, and tell within this
    time what came of that number."""

    number: int
    turn: int
    question: int | None = None
    within_s: float = TRY_S


@dataclass(frozen=True, slots=True)
class Accuse:
    """Its answers are wrong; whether it is the weights or what is expected is for `Expectations` to find."""

    question: int
    asked_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class AskPeers:
    """Check the others of its set too (`Asked.peer`): it is late, and if they are it is not its fault."""


@dataclass(frozen=True, slots=True)
class Note:
    reason: str


# The outcomes are events of its standing and its breaker as they are.
Effect = Send | Accuse | AskPeers | Note | CanaryPassed | CanaryFailed | CanaryAnswered


@dataclass(slots=True)
class Baseline:
    """Seconds per token that are usual; plain data."""

    mean_s: Took = 0.0
    samples: Count = 0

    def take(self, pace_s: float) -> None:
        self.samples += 1
        self.mean_s += max(ALPHA, 1 / self.samples) * (pace_s - self.mean_s)


@dataclass(frozen=True, slots=True)
class Record:
    """What must outlive the process that keeps the machine; plain data. A check that was under way is not in it."""

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
    question: int | None  # None: whose turn it is
    breaker: int | None  # the number of its breaker's canary, if it is that
    peer: bool
    began_s: float
    failed: list[Failing] = field(default_factory=list)
    why: str = ""
    moving: bool = False
    sound: bool = True
    known: bool = False  # of the last answer that was not wrong
    ratio: float = 0.0  # of the last late answer
    peers: float | None = None


class Canary:
    """One worker's. `jitter` draws from [0, 1)."""

    __slots__ = (
        "_asked_s", "_baselines", "_check", "_clean", "_cost_s", "_due_s", "_jitter", "_limits", "_load", "_number",
        "_turn", "_until_s", "_wanted", "_wrongs", "measured", "name", "state",
    )  # fmt: skip

    def __init__(self, name: str, jitter: Callable[[], float], limits: Limits | None = None) -> None:
        self.name = name
        self.state = State.ABSENT
        self.measured: list[tuple[float, float]] = []  # its last answers: when it was asked, and in what ratio
        self._limits = limits or Limits()
        self._jitter = jitter
        self._load = 0
        self._number = 0
        self._turn = 0
        self._asked_s = 0.0  # the last try
        self._until_s = 0.0  # ASKING: it is lost then; PAUSING: the next try
        self._due_s = 0.0  # RESTING: the next check
        self._cost_s = 0.0
        self._check: _Check | None = None
        self._wanted: list[Asked] = []
        self._wrongs = 0
        self._clean = 0
        self._baselines: dict[int, Baseline] = {}

    def __repr__(self) -> str:
        return f"{self.name}: {self.state}, load {self._load}, {self._number} tries, {self._wrongs} wrong lately"

    @property
    def began_s(self) -> float | None:
        """When the check that is under way began."""
        return self._check.began_s if self._check else None

    @property
    def next_deadline_s(self) -> float | None:
        """When a `Tick` is due, if nothing else happens before."""
        if self.state is State.ABSENT:
            return None
        return self._due_s if self.state is State.RESTING else self._until_s

    def record(self) -> Record:
        baselines = {place: replace(each) for place, each in self._baselines.items()}
        return Record(
            self._load, self._number, self._turn, self._due_s, self._cost_s, self._wrongs, self._clean, baselines
        )

    def restore(self, record: Record) -> None:
        """Go on from what another process wrote down, once the worker is found present with the same load."""
        assert self.state is State.ABSENT, self
        self._load, self._number, self._turn = record.load, record.number, record.turn
        self._due_s, self._cost_s = record.due_s, record.cost_s
        self._wrongs, self._clean = record.wrongs, record.clean
        self._baselines = {place: replace(each) for place, each in record.baselines.items()}

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Take what happened; what is to be done, in order."""
        match event:
            case Present():
                return self._meet(event, now_s)
            case Gone():
                return self._become_absent()
            case Asked():
                return self._want(event, now_s)
            case Tick():
                return self._tick(now_s)
        if self.state is not State.ASKING or event.number != self._number:
            return ()
        match event:
            case Answered():
                return self._hear(event, now_s)
            case Unanswered():
                assert self._check is not None
                self._check.moving |= event.moving
                self._check.sound = event.sound
                return self._doubt(Failing.NO_ANSWER, event.reason, now_s)
            case Refused():
                return self._become_resting(now_s, min(REFUSED_S, self._limits.interval_s))

    # -- the schedule

    def _meet(self, event: Present, now_s: float) -> tuple[Effect, ...]:
        if self.state is not State.ABSENT and event.load == self._load:
            return ()
        if self.state is State.ABSENT:
            self.state = TABLE[self.state][Cause.CAME]
        elif self.state is not State.RESTING:
            self.state = TABLE[self.state][Cause.OVER]
        self._check = None
        same, self._load = event.load == self._load, event.load
        if not same:
            self._wrongs = self._clean = 0
            self._baselines, self._cost_s, self.measured = {}, 0.0, []
        if event.took_over:
            self._due_s = now_s + min(TOOK_OVER_S, self._limits.interval_s)
            return ()
        # Its time may have been another clock's; nobody waits for longer than an interval.
        self._due_s = min(self._due_s, now_s + self._interval_s()) if same else now_s
        return () if same else self._tick(now_s)

    def _become_absent(self) -> tuple[Effect, ...]:
        if self.state is not State.ABSENT:
            self.state = TABLE[self.state][Cause.LEFT]
        self._check = None
        self._wanted.clear()
        self._due_s = 0.0  # when it is back, at once
        return ()

    def _want(self, event: Asked, now_s: float) -> tuple[Effect, ...]:
        same = any((each.question, each.number) == (event.question, event.number) for each in self._wanted)
        # Whoever is glad of any question is served by one that was sent this moment.
        served = event.question is None and event.number is None and self._asked_s == now_s
        if self.state is State.ABSENT or same or served or len(self._wanted) >= WANTED_MAX:
            return ()
        # A breaker's canary has its time: it does not wait behind questions that are to be learnt.
        self._wanted.insert(0 if event.number is not None else len(self._wanted), event)
        return self._begin_wanted(now_s) if self.state is State.RESTING else ()

    def _tick(self, now_s: float) -> tuple[Effect, ...]:
        due_s = self.next_deadline_s
        if due_s is None or now_s < due_s:
            return ()
        if self.state is State.RESTING:
            return self._become_asking(Asked("it is time"), now_s)
        if self.state is State.PAUSING:
            self.state = TABLE[self.state][Cause.AGAIN]
            return self._send(now_s)
        return (Note(f"nobody told what became of canary {self._number}"), *self._become_resting(now_s))

    def _begin_wanted(self, now_s: float) -> tuple[Effect, ...]:
        return self._become_asking(self._wanted.pop(0), now_s) if self._wanted else ()

    def _become_asking(self, wish: Asked, now_s: float) -> tuple[Effect, ...]:
        self.state = TABLE[self.state][Cause.BEGUN]
        if wish.question is None:
            self._turn += 1
        self._check = _Check(wish.question, wish.number, wish.peer, now_s)
        return self._send(now_s)

    def _send(self, now_s: float) -> tuple[Effect, ...]:
        assert self._check is not None
        self._number += 1
        self._asked_s = now_s
        self._until_s = now_s + TRY_S + LOST_S
        return (Send(self._number, self._turn, self._check.question),)

    def _become_resting(self, now_s: float, rest_s: float | None = None) -> tuple[Effect, ...]:
        self.state = TABLE[self.state][Cause.OVER]
        self._check = None
        self._due_s = now_s + (self._interval_s() if rest_s is None else rest_s)
        return self._begin_wanted(now_s)

    def _interval_s(self) -> float:
        return max(self._limits.interval_s, self._cost_s / self._limits.share) * (1 + JITTER_MAX * self._jitter())

    # -- the judge

    def _hear(self, event: Answered, now_s: float) -> tuple[Effect, ...]:
        check = self._check
        assert check is not None
        check.question, check.peers = event.question, event.peers
        if event.wrong:
            self._wrongs += 1
            self._clean = 0
            return self._doubt(Failing.WRONG, event.wrong, now_s)
        check.known = event.known
        place = next((place for place, most in enumerate(OCCUPANCIES) if event.occupancy <= most), None)
        if place is None:
            return self._pass(now_s)
        baseline = self._baselines.setdefault(place, Baseline())
        pace_s = min(event.took_s, TRY_S) / event.tokens  # longer is its asker's: one that was stopped, say
        if baseline.samples >= SAMPLES_MIN:
            ratio = pace_s / baseline.mean_s if baseline.mean_s > 0.0 else 1.0
            self.measured = [*self.measured[1 - 2 * TRIES :], (self._asked_s, ratio)]
            if ratio > self._limits.slow_ratio:
                check.ratio = ratio
                return self._doubt(Failing.SLOW, f"{event.took_s:.2f} s, {ratio:.1f} times what is usual", now_s)
        baseline.take(pace_s)
        # In a full batch a canary's time is others' too: the least occupied class tells best what it costs.
        self._cost_s = min(TRY_S, self._baselines[min(self._baselines)].mean_s * event.tokens)
        return self._pass(now_s)

    def _doubt(self, failing: Failing, why: str, now_s: float) -> tuple[Effect, ...]:
        """A try failed: once more, or that was the last."""
        check = self._check
        assert check is not None
        check.failed.append(failing)
        check.why = why
        if self._wrongs >= WRONGS_MAX and failing is Failing.WRONG:
            return self._accuse(check, now_s)
        if len(check.failed) == TRIES:
            return self._give_up(check, now_s)
        self._until_s = now_s + PAUSES_S[len(check.failed) - 1]
        self.state = TABLE[self.state][Cause.DOUBTED]
        first = failing is Failing.SLOW and check.failed.count(Failing.SLOW) == 1
        # Who is asked for another's sake asks nobody: where all are late that would never end.
        return (AskPeers(),) if first and check.peers is None and not check.peer else ()

    def _give_up(self, check: _Check, now_s: float) -> tuple[Effect, ...]:
        """Every try failed. An answer that was right, if late, is an answer."""
        if Failing.SLOW in check.failed:
            late = f"late by {check.ratio:.1f} times"
            if check.peers is None:
                return (Note(f"{late}, and there is nobody to compare it with"), *self._pass(now_s))
            if check.ratio <= self._limits.slow_ratio * max(1.0, check.peers):
                return (Note(f"{late}, as the others of its set are ({check.peers:.1f})"), *self._pass(now_s))
            why = f"{late}, the others of its set by {check.peers:.1f}"
            return self._end(check, CanaryFailed(self._load, self._asked_s, Failing.SLOW, why), True, now_s)
        if not check.sound:
            return (Note(f"no verdict, its asker reached nobody: {check.why}"), *self._become_resting(now_s))
        failed = CanaryFailed(self._load, self._asked_s, Failing.NO_ANSWER, check.why, check.moving)
        return self._end(check, failed, False, now_s)

    def _pass(self, now_s: float) -> tuple[Effect, ...]:
        check = self._check
        assert check is not None
        told: tuple[Effect, ...] = ()
        if Failing.WRONG in check.failed:
            told = (Note(f"a wrong answer, and a right one when asked again: {check.why}"),)
        else:
            self._clean += 1
            self._wrongs = 0 if self._clean >= CLEAN else self._wrongs
        passed = CanaryPassed(self._load, self._asked_s, right=check.known and not self._wrongs)
        return told + self._end(check, passed, True, now_s)

    def _accuse(self, check: _Check, now_s: float) -> tuple[Effect, ...]:
        self._wrongs = 0
        assert check.question is not None  # it was answered
        return self._end(check, Accuse(check.question, self._asked_s, check.why), False, now_s)

    def _end(self, check: _Check, outcome: Effect, passed: bool, now_s: float) -> tuple[Effect, ...]:
        told = () if check.breaker is None else (CanaryAnswered(check.breaker, passed),)
        return (outcome, *told, *self._become_resting(now_s))


def pace_of(others: Iterable[Canary], since_s: float) -> float | None:
    """How late the others of a set were since then, each at its latest, as the median of them; None: nobody was asked.

    At its latest: where all were slow and are well again one of them is asked last, and compared with who was asked
    after it.
    """
    ratios = [[ratio for asked_s, ratio in each.measured if asked_s >= since_s] for each in others]
    latest = [max(own) for own in ratios if own]
    return median(latest) if latest else None
