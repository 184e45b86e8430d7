"""One worker's standing: how much traffic it has earned, from everything that is known of it. Pure: no I/O, no clock.
`now_s` is passed in and never goes back; it is wall time, for what is written down outlives whoever wrote it.

Theory (facts 14, 24). Many witnesses speak of a worker (canaries, its breaker, the judge of its beats, the device, its
pace, itself), late, twice and in any order, and none may undo what another said. So what is kept are the *causes* that
are held against it, each with its reason. A cause is held until its own kind of evidence lifts it, and the status is
the most urgent of those that are held: when the last grave one is lifted the way back is open, by construction.

What is quick to undo comes first: half the traffic at the first doubt, none at proof, and then its streams are moved,
once per fall. Slowness alone takes streams by plan. Nothing here kills or restarts: that is the supervisor's. A wrong
answer is another matter: no later right one makes the weights what they were, only a fresh load does (facts 22, 23),
or the word that they are as they were written (`Acquitted`).

Where no other worker can serve (`last_resort.kept`, decided by the caller), a worker is SUSPICIOUS at most: its causes
are held, its streams stay, and a fall is postponed until another can take them.

Who had no traffic returns by way of half of it, and must pass a canary after its customers had time to complain; who
falls again soon, twice as many as the last time, all but one of them with no traffic.

Always true: `TABLE` names every cause, what it makes of a worker and what lifts it; weight follows from status; a fall
(something is found that makes it UNHEALTHY or DEAD, and nothing had been, or it is the last resort no longer) gives
exactly one `MoveStreams`, under a number of its own, and nothing else does; a quarantined worker has weight 0 unless
it is the last resort; an event that is heard twice changes nothing the second time; nor does one about an earlier
load, or a canary older than the last heard (but a wrong answer of this load always counts). A `Standing` is plain data:
the verdict as it is written down, and all it takes to go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Annotated

from msgspec import Meta

from holdfast.health.bounds import Count, UnixS
from holdfast.health.breaker import Closed, Opened
from holdfast.health.device_faults import Fault, Severity
from holdfast.health.liveness import LOST, Judged, Verdict
from holdfast.health.outliers import Pace, Paced

CANARY_FAILURES_MAX = 3  # one may be lost to a hiccup; three in a row, each with its own retries, are not one
# At half its traffic, before the canary that ends this counts: by then customers have been heard, for frontends report
# once a second and a breaker needs three failures.
PROVING_S = 5.0
# A fall this soon after the last is flapping: as long as a breaker rests at most, which is not to be forgiven for it.
FLAP_S = 600.0
OWED_MAX = 8  # canaries to pass after a fall: 1, and twice as many at each that follows soon; four minutes (`OWED_S`)
UNCHECKED = "not checked since it was loaded"
LAST_RESORT = "it serves because too few others can"


class Status(IntEnum):
    """The numbers are those of the metric; which is worse is `URGENCY`."""

    HEALTHY = 0
    SUSPICIOUS = 1  # half its traffic, nothing moved
    UNHEALTHY = 2  # no traffic, streams moved
    DRAINING = 3  # no new traffic, streams leave by plan
    DEAD = 4


WEIGHTS = {Status.HEALTHY: 1.0, Status.SUSPICIOUS: 0.5, Status.DRAINING: 0.0, Status.UNHEALTHY: 0.0, Status.DEAD: 0.0}
URGENCY = (Status.HEALTHY, Status.SUSPICIOUS, Status.DRAINING, Status.UNHEALTHY, Status.DEAD)
FALLEN = frozenset({Status.UNHEALTHY, Status.DEAD})


class Lift(StrEnum):
    """Evidence that takes a cause away."""

    PASSED = "a canary passed"
    ANSWERED = "a canary was answered rightly, if slowly"
    LOADED = "a fresh load"
    ACQUITTED = "its weights are as they were written, and answer rightly"
    SETTLED = "it is known who is right"
    SEEN = "its process is there"
    ALIVE = "its judge calls it alive"
    BACK = "its judge tries it again"
    CLOSED = "its breaker closed"
    IN_PACE = "it is in pace with its set"
    CLEARED = "its device was reset or replaced"


class Cause(StrEnum):
    """What is held against a worker."""

    UNCHECKED = "unchecked"  # since it was loaded
    CANARY_FAILED = "canary-failed"
    CANARY_FAILING = "canary-failing"  # again and again
    CANARY_SLOW = "canary-slow"
    WRONG = "wrong-answer"  # this is the quarantine
    DISPUTED = "disputed"  # others answer otherwise, and nobody knows who is right
    BREAKER = "breaker-open"
    LOST = "lost"  # stopped, wedged, or out of reach
    PROBATION = "probation"
    SLOW = "slow"
    CRAWLING = "crawling"
    DEVICE_SICK = "device-sick"  # it needs a reset
    DEVICE_LOST = "device-lost"
    ENGINE = "engine-failed"  # it says so itself
    GONE = "gone"  # its process ended


S, L = Status, Lift
_CANARY = frozenset({L.PASSED, L.ANSWERED, L.LOADED})

TABLE: dict[Cause, tuple[Status, frozenset[Lift]]] = {
    Cause.UNCHECKED: (S.UNHEALTHY, frozenset({L.PASSED, L.ANSWERED})),
    Cause.CANARY_FAILED: (S.SUSPICIOUS, _CANARY),
    Cause.CANARY_FAILING: (S.UNHEALTHY, _CANARY),
    Cause.CANARY_SLOW: (S.SUSPICIOUS, frozenset({L.PASSED, L.LOADED})),
    Cause.WRONG: (S.UNHEALTHY, frozenset({L.LOADED, L.ACQUITTED})),
    Cause.DISPUTED: (S.SUSPICIOUS, frozenset({L.SETTLED, L.LOADED})),
    Cause.BREAKER: (S.UNHEALTHY, frozenset({L.CLOSED})),
    Cause.LOST: (S.UNHEALTHY, frozenset({L.BACK, L.ALIVE})),
    Cause.PROBATION: (S.SUSPICIOUS, frozenset({L.ALIVE})),
    Cause.SLOW: (S.SUSPICIOUS, frozenset({L.IN_PACE})),
    Cause.CRAWLING: (S.DRAINING, frozenset({L.IN_PACE})),
    Cause.DEVICE_SICK: (S.DRAINING, frozenset({L.CLEARED})),
    Cause.DEVICE_LOST: (S.UNHEALTHY, frozenset({L.CLEARED})),
    Cause.ENGINE: (S.UNHEALTHY, frozenset({L.LOADED})),
    Cause.GONE: (S.DEAD, frozenset({L.SEEN, L.LOADED})),
}


class Failing(StrEnum):
    """How a canary failed, after its retries."""

    NO_ANSWER = "no answer"
    SLOW = "slow"  # right, but late for this worker; not told where its whole set is (`Outliers`)
    WRONG = "wrong"  # other tokens, or their probabilities out of their band


# -- what happens


@dataclass(frozen=True, slots=True)
class Present:
    """The worker is there with weights of this load, a number above 0 that grows with every fresh load of them."""

    load: int  # of the weights: another process that maps them has the same
    serving: bool = False  # it has streams already (it took over, or nobody checked before); only findings take them


@dataclass(frozen=True, slots=True)
class Gone:
    """Its process ended."""

    load: int
    reason: str


@dataclass(frozen=True, slots=True)
class CanaryPassed:
    load: int
    asked_s: float  # when it was sent
    right: bool = True  # it was compared with what stood expected, and no answer was wrong lately


@dataclass(frozen=True, slots=True)
class CanaryFailed:
    load: int
    asked_s: float
    failing: Failing
    reason: str
    moving: bool = False  # clients had tokens of this worker meanwhile: it is busy, not silent


@dataclass(frozen=True, slots=True)
class Disputed:
    reason: str  # why nobody knows if its answers are right; empty: it is known


@dataclass(frozen=True, slots=True)
class Acquitted:
    """Its weights are as they were written, and it was another process that answered wrongly with them, or its own
    answers are right again."""


@dataclass(frozen=True, slots=True)
class LastResort:
    """No other worker of its set can serve, or that is over."""

    serves: bool


@dataclass(frozen=True, slots=True)
class ReportedFatal:
    """The worker itself says that its engine cannot go on."""

    load: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceFaulted:
    fault: Fault
    at_s: float  # when the device reported it


@dataclass(frozen=True, slots=True)
class DeviceCleared:
    """Its device was reset or replaced."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline_s` has come."""


# Three machines' effects are events here as they are: of its breaker, its judge, and what compares its set.
Event = (
    Present | Gone | CanaryPassed | CanaryFailed | Disputed | Acquitted | LastResort | ReportedFatal | DeviceFaulted
    | DeviceCleared | Opened | Closed | Judged | Paced | Tick
)  # fmt: skip


# -- what is to be done about it


@dataclass(frozen=True, slots=True)
class Weigh:
    """Give it this share of what it would get; to be written down before anything else is done."""

    status: Status
    weight: float
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Its answers cannot be believed: flag what it made since then. Who shares its weights is to hear of it too."""

    reason: str
    right_s: float  # when it was last known to be right


@dataclass(frozen=True, slots=True)
class MoveStreams:
    """Resume its streams elsewhere, now. Whoever has done so for this fall, or a later one, does nothing."""

    fall: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let its streams, if it has any, end or be handed over, as for a rollout. It is not to be killed."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskCanary:
    """Send a canary now, not at the next interval."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:  # something people may want to read; nothing follows from it
    reason: str


Effect = Weigh | Quarantine | MoveStreams | Drain | AskCanary | Note

# -- what is known


@dataclass(frozen=True, slots=True)
class Standing:
    """The verdict on one worker: first what follows from the rest, for whoever only reads it. It begins unchecked."""

    status: int = Status.UNHEALTHY
    weight: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    quarantined: bool = False
    reason: str = UNCHECKED
    since_s: UnixS = 0.0  # of this status
    fall: Count = 0  # how often its streams had to be moved
    causes: Mapping[str, str] = field(default_factory=lambda: {Cause.UNCHECKED: UNCHECKED})  # with their reasons
    load: Count = 0  # 0: none yet
    failures: Count = 0  # canaries in a row without an answer
    owed: Annotated[int, Meta(ge=0, le=OWED_MAX)] = 0  # canaries to pass to be HEALTHY again, beside what is held
    prove_s: UnixS = 0.0  # only one that is sent from then on is the last that it owes
    asked: bool = False  # for that one
    heard_s: UnixS = 0.0  # when the latest canary that was heard of had been sent
    good_s: UnixS = 0.0  # when the latest that passed had been
    right_s: UnixS = 0.0  # and the latest that was known to be right; a load is, when it comes
    fell_s: UnixS = 0.0
    fell_for: Mapping[str, str] = field(default_factory=dict)  # the causes that were held then
    flaps: Count = 0  # falls in a row that came soon after another
    cleared_s: UnixS = 0.0  # when its device was last reset or replaced
    last_resort: bool = False  # no other can serve: SUSPICIOUS at most, and falls are postponed

    def __str__(self) -> str:
        return f"{Status(self.status).name} ({self.reason})"


Outcome = tuple[Standing, tuple[Effect, ...]]


def restore(written: Standing, now_s: float) -> Standing:
    """A standing as another process wrote it down, to go on from. Its clock may have been ahead: no time lies after
    now. A cause that is not known here (a newer version's) becomes UNCHECKED: no traffic before a canary passed."""
    causes = {cause if cause in TABLE else Cause.UNCHECKED: why for cause, why in written.causes.items()}
    times = {
        name: min(getattr(written, name), now_s)
        for name in ("since_s", "heard_s", "good_s", "right_s", "fell_s", "cleared_s")
    }
    known = replace(written, causes=causes, prove_s=min(written.prove_s, now_s + PROVING_S), asked=False, **times)
    return _derive(known)


def next_deadline_s(standing: Standing) -> float | None:
    """When a `Tick` is due, if nothing else happens before."""
    proving = standing.owed == 1 and standing.weight > 0 and not standing.asked
    return standing.prove_s if proving else None


# -- steps


def earned(standing: Standing) -> float:
    """Return the weight that its causes and what it owes leave it, whether or not another can serve."""
    return WEIGHTS[_earned_status(standing)]


def step(standing: Standing, event: Event, now_s: float, *, last_resort: bool | None = None) -> Outcome:
    """The next standing, to be written down first, and then what is to be done, in order. `last_resort`: whether no
    other worker can serve once this is taken; None: as before."""
    taken, asks = _take(standing, event, now_s)
    if last_resort is not None and last_resort is not taken.last_resort:
        taken = replace(taken, last_resort=last_resort)
    after, effects = _settle(standing, taken, now_s)
    return after, effects + asks


def _take(s: Standing, event: Event, now_s: float) -> Outcome:
    match event:
        case Present():
            return _see(s, event, now_s)
        case CanaryPassed() | CanaryFailed() | Gone() | ReportedFatal() if event.load != s.load:
            return s, ()  # of what is not there any more
        case CanaryPassed():
            return _hear_pass(s, event), ()
        case CanaryFailed():
            return _hear_failure(s, event)
        case Disputed():
            return (_hold(s, Cause.DISPUTED, event.reason) if event.reason else _lift(s, Lift.SETTLED)), ()
        case Acquitted():
            return _acquit(s), ()
        case LastResort():
            return (s if event.serves is s.last_resort else replace(s, last_resort=event.serves)), ()
        case Gone():
            return _hold(s, Cause.GONE, event.reason), ()
        case ReportedFatal():
            return _hold(s, Cause.ENGINE, event.reason), ()
        case DeviceFaulted():
            return _hear_device(s, event)
        case DeviceCleared():
            return replace(_lift(s, Lift.CLEARED), cleared_s=max(s.cleared_s, event.at_s)), ()
        case Opened():
            return _hold(s, Cause.BREAKER, f"its breaker is open: {event.reason}"), ()
        case Closed():
            return _lift(s, Lift.CLOSED), ()
        case Judged():
            return _hear_judge(s, event), ()
        case Paced():
            return _hear_pace(s, event), ()
        case Tick():
            due_s = next_deadline_s(s)
            if due_s is None or now_s < due_s:
                return s, ()
            return replace(s, asked=True), (AskCanary("it is back"),)


def _settle(before: Standing, s: Standing, now_s: float) -> Outcome:
    """What follows from the causes that are held now, and from the difference to those before."""
    if s is before:
        return s, ()
    fell = _taken_out(s) and not _taken_out(before) and (before.owed <= 1 or before.last_resort)
    found = [TABLE[Cause(cause)][0] for cause in s.causes if cause not in before.causes and cause != Cause.UNCHECKED]
    if fell:
        s = _become_fallen(s, now_s, anew=not (before.last_resort and s.causes.keys() <= s.fell_for.keys()))
    elif Status.DRAINING in found:
        s = replace(s, owed=max(s.owed, 1))
    s = _derive(s)
    if before.weight == 0 and s.weight > 0:
        s = replace(s, prove_s=now_s + PROVING_S, asked=False)
    effects: list[Effect] = []
    if s.status != before.status or (before.load == 0 and s.load > 0):
        s = replace(s, since_s=now_s)
        effects.append(Weigh(Status(s.status), s.weight, s.reason))
    else:
        effects += [Note(why) for cause, why in s.causes.items() if cause not in before.causes]
    if s.quarantined and not before.quarantined:
        effects.append(Quarantine(s.causes[Cause.WRONG], s.right_s))
    if fell:
        effects.append(MoveStreams(s.fall, s.reason))
    elif s.status == Status.DRAINING != before.status:
        effects.append(Drain(s.reason))
    return s, tuple(effects)


# -- witnesses


def _see(s: Standing, event: Present, now_s: float) -> Outcome:
    asks = (AskCanary("a fresh load"),)
    if event.load < s.load:
        return s, ()
    if event.load == s.load:
        return _lift(s, Lift.SEEN), asks if Cause.UNCHECKED in s.causes else ()
    trusted = event.serving and (s.load == 0 or s.status == Status.HEALTHY)
    left = {cause: why for cause, why in _lift(s, Lift.LOADED).causes.items() if cause != Cause.UNCHECKED}
    fresh = replace(s, causes=left, load=event.load, failures=0, heard_s=0.0, good_s=now_s, right_s=now_s)
    # Falls of the old load are not held against the new; what is not a load's matter still returns by way of half.
    fresh = replace(fresh, owed=0 if WEIGHTS[_worst(fresh)] > 0 else 1)
    return (fresh if trusted else _hold(fresh, Cause.UNCHECKED, UNCHECKED)), asks


def _hear_pass(s: Standing, event: CanaryPassed) -> Standing:
    asked_s = event.asked_s
    if asked_s <= s.heard_s:
        return s
    good_s = s.good_s if s.quarantined else asked_s
    heard = replace(s, heard_s=asked_s, good_s=good_s, right_s=good_s if event.right else s.right_s, failures=0)
    lifted = _lift(heard, Lift.PASSED)
    # It was what a cause waited for, or it says nothing about the time since the fall: then it pays for nothing else.
    if lifted is not heard or asked_s <= s.fell_s:
        return lifted
    if s.owed > 1:
        return replace(heard, owed=s.owed - 1)
    proved = s.owed == 1 and s.weight > 0 and asked_s >= s.prove_s
    return replace(heard, owed=0) if proved else heard


def _hear_failure(s: Standing, event: CanaryFailed) -> Outcome:
    why = f"canary {event.failing}: {event.reason}"
    if event.failing is Failing.WRONG:
        return replace(_hold(s, Cause.WRONG, why), heard_s=max(s.heard_s, event.asked_s)), ()
    if event.asked_s <= s.heard_s:
        return s, ()
    heard = replace(s, heard_s=event.asked_s)
    if event.failing is Failing.SLOW:
        return _hold(_lift(replace(heard, failures=0), Lift.ANSWERED), Cause.CANARY_SLOW, why), ()
    if event.moving:
        return heard, (Note(f"{why}; but its clients have tokens"),)
    heard = replace(heard, failures=s.failures + 1)
    if heard.failures < CANARY_FAILURES_MAX:
        return _hold(heard, Cause.CANARY_FAILED, why), (AskCanary(why),) if s.weight > 0 else ()
    return _hold(heard, Cause.CANARY_FAILING, f"{heard.failures} canaries in a row; {why}"), ()


def _acquit(s: Standing) -> Standing:
    lifted = _lift(s, Lift.ACQUITTED)
    if lifted is s or _grave(lifted):
        return lifted
    return replace(lifted, owed=0)  # the fall was not its own


def _hear_judge(s: Standing, event: Judged) -> Standing:
    """Doubt (silence) is not written down: who has streams there sees it first, and mostly it passes (facts 31)."""
    if event.after in LOST:
        return _hold(s, Cause.LOST, f"{event.after}: {event.reason}")
    if event.after is Verdict.PROBATION:
        return _hold(_lift(s, Lift.BACK), Cause.PROBATION, f"on probation: {event.reason}")
    return _lift(s, Lift.ALIVE) if event.after is Verdict.ALIVE else s


def _hear_pace(s: Standing, event: Paced) -> Standing:
    cause = {Pace.CRAWLING: Cause.CRAWLING, Pace.SLOW: Cause.SLOW}.get(event.pace)
    return _hold(s, cause, event.reason) if cause else _lift(s, Lift.IN_PACE)


def _hear_device(s: Standing, event: DeviceFaulted) -> Outcome:
    fault = event.fault
    if event.at_s <= s.cleared_s:
        return s, ()
    if fault.severity is Severity.IGNORABLE:
        return s, (Note(fault.reason),)
    lost = fault.severity is Severity.FATAL
    return _hold(s, Cause.DEVICE_LOST if lost else Cause.DEVICE_SICK, fault.reason), ()


# -- causes


def _hold(s: Standing, cause: Cause, why: str) -> Standing:
    """The first reason stays: that is when it began."""
    return s if cause in s.causes else replace(s, causes={**s.causes, cause: why})


def _lift(s: Standing, lift: Lift) -> Standing:
    """The same object where there was nothing to lift."""
    left = {cause: why for cause, why in s.causes.items() if lift not in TABLE[Cause(cause)][1]}
    return s if len(left) == len(s.causes) else replace(s, causes=left)


def _worst(s: Standing) -> Status:
    """Of what is held, without what it owes."""
    return max((TABLE[Cause(cause)][0] for cause in s.causes), key=URGENCY.index, default=Status.HEALTHY)


def _earned_status(s: Standing) -> Status:
    owing = Status.HEALTHY if not s.owed else Status.SUSPICIOUS if s.owed == 1 else Status.UNHEALTHY
    return max(_worst(s), owing, key=URGENCY.index)


def _grave(s: Standing) -> bool:
    """Whether something was found that takes its streams: to be unchecked is no finding."""
    return any(TABLE[Cause(cause)][0] in FALLEN for cause in s.causes if cause != Cause.UNCHECKED)


def _taken_out(s: Standing) -> bool:
    """Whether its streams are to be elsewhere. A process that ended is no resort."""
    return _grave(s) and not (s.last_resort and Cause.GONE not in s.causes)


def _become_fallen(s: Standing, now_s: float, *, anew: bool) -> Standing:
    """Not `anew`: it had fallen for the same, and served since only because no other could."""
    soon = s.fall > 0 and now_s - s.fell_s <= FLAP_S
    flaps = s.flaps if not anew else s.flaps + 1 if soon else 0
    owed = min(2 ** min(flaps, OWED_MAX), OWED_MAX)
    return replace(s, fall=s.fall + 1, fell_s=now_s, fell_for=s.causes, flaps=flaps, owed=owed)


def _derive(s: Standing) -> Standing:
    """Status, weight and reason, from what is held and owed. The first of a status; a quarantine's before others'."""
    status = _earned_status(s)
    reasons = [why for cause, why in s.causes.items() if TABLE[Cause(cause)][0] is status]
    if Cause.WRONG in s.causes and status is not Status.DEAD:
        reasons.insert(0, s.causes[Cause.WRONG])
    if s.owed:
        reasons.append(f"it must pass {s.owed} more canaries" if s.owed > 1 else "it must pass a canary")
    reason = next(iter(reasons), "sound")
    if s.last_resort and not WEIGHTS[status] and status is not Status.DEAD:
        status, reason = Status.SUSPICIOUS, f"{LAST_RESORT}: {reason}"
    quarantined = Cause.WRONG in s.causes
    return replace(s, status=status, weight=WEIGHTS[status], quarantined=quarantined, reason=reason)
