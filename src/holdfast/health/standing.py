"""A worker's standing is control's verdict: how much traffic the worker gets, derived from all evidence about it. Pure:
no I/O, no clock. `now_s` is passed in and never goes back; it is wall time, because records outlive their writer.

Theory (facts 14, 24). Evidence about a worker comes from canaries, its breaker, its liveness, its device, its
pace and its own reports. It comes late, twice and in any order, and one kind must not undo another. So the standing
keeps the *causes* against the worker, each with its reason. Only the evidence that `TABLE` names for a cause lifts it.
The status is the most urgent one of all causes, so the worker can return when the last grave cause is lifted.

Measures that are quick to undo come first: half the traffic for the first, unproven cause, no traffic for a proven one,
and then the streams are moved, once per ejection. Slowness alone only drains. The standing kills and restarts nothing;
the supervisor does. After a wrong answer later right answers are not enough. The weights must be loaded again (facts
22, 23), or compared with their source and found right (`WorkerAcquitted`).

If no other worker can serve (`last_resort`, decided by the caller), the worker is SUSPICIOUS at worst: it keeps its
causes and its streams, and an ejection is postponed until another worker can take the streams.

A worker that had no traffic returns at half weight. It gets full weight after one more canary, which is sent late
enough for failures of its clients' requests to be reported first. If it is ejected again within `FLAP_S`, it must pass
twice as many canaries as the last time, all but the last of them without traffic.

An *ejection* is the moment when a worker loses its streams: the first finding that makes it UNHEALTHY or DEAD, or the
end of its time as the last resort. Ejections are numbered (`WorkerStanding.fall`), so that each moves streams once.

Always true:
- `TABLE` names every cause, its status and what lifts it; weight follows from status.
- Every ejection gives exactly one `MoveEjectedStreams` with its number, and nothing else does.
- A quarantined worker has weight 0 unless it is the last resort.
- These change nothing: a repeated event, an event about an earlier load, a canary older than the last one. But a wrong
  answer of this load always counts.
- A `WorkerStanding` is plain data: the stored verdict, and all that is needed to continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from holdfast.core.enums import OpenIntEnum
from holdfast.core.ports import DeadlineReached
from holdfast.health.bounds import Count, UnixS
from holdfast.health.breaker import BreakerClosed, BreakerOpened
from holdfast.health.device_faults import DeviceFault, Severity
from holdfast.health.liveness import LOST, Liveness, LivenessChanged
from holdfast.health.outliers import PaceClass, Paced

CANARY_FAILURES_MAX = 3  # one may be chance; three in a row, each with its own retries, are not
# How long a worker has half its traffic before the canary that restores full weight counts. Failed requests are known
# after this time: frontends report once a second and a breaker needs three failures.
PROVING_S = 5.0
# An ejection this soon after the last is flapping. As long as a breaker's longest pause, which must not reset the
# count.
FLAP_S = 600.0
OWED_MAX = (
    8  # canaries to pass after an ejection: 1, doubled if it follows another soon; 8 take four minutes (`OWED_S`)
)
UNCHECKED = "not checked since it was loaded"
LAST_RESORT = "it serves because too few others can"


class HealthStatus(OpenIntEnum):
    """The health of a worker. The numbers are the metric's values; `URGENCY` orders them from best to worst."""

    HEALTHY = 0
    SUSPICIOUS = 1  # half its traffic, streams stay
    UNHEALTHY = 2  # no traffic, streams are moved
    DRAINING = 3  # no new traffic, streams end or are handed over
    DEAD = 4


WEIGHTS = {
    HealthStatus.HEALTHY: 1.0,
    HealthStatus.SUSPICIOUS: 0.5,
    HealthStatus.DRAINING: 0.0,
    HealthStatus.UNHEALTHY: 0.0,
    HealthStatus.DEAD: 0.0,
}
URGENCY = (
    HealthStatus.HEALTHY,
    HealthStatus.SUSPICIOUS,
    HealthStatus.DRAINING,
    HealthStatus.UNHEALTHY,
    HealthStatus.DEAD,
)
EJECTED = frozenset({HealthStatus.UNHEALTHY, HealthStatus.DEAD})


class Lift(StrEnum):
    PASSED = "a canary passed"
    ANSWERED = "a canary was answered rightly, if slowly"
    LOADED = "a fresh load"
    ACQUITTED = "its weights are as they were written, and answer rightly"
    RESOLVED = "it is known which is right"
    SEEN = "its process is there"
    ALIVE = "its beats show that it is alive"
    BACK = "it came back, and is on probation"
    CLOSED = "its breaker closed"
    IN_PACE = "it is in pace with its set"
    CLEARED = "its device was reset or replaced"


class HealthCause(StrEnum):
    UNCHECKED = "unchecked"  # no right canary answer since it was loaded
    CANARY_FAILED = "canary-failed"
    CANARY_FAILING = "canary-failing"  # `CANARY_FAILURES_MAX` in a row
    CANARY_SLOW = "canary-slow"
    WRONG = "wrong-answer"  # the worker is quarantined
    DISPUTED = "disputed"  # other sets give different answers, and it is unknown which are right
    BREAKER = "breaker-open"
    LOST = "lost"  # stopped, wedged, or out of reach
    PROBATION = "probation"
    SLOW = "slow"
    CRAWLING = "crawling"
    DEVICE_SICK = "device-sick"  # its device needs a reset
    DEVICE_LOST = "device-lost"
    ENGINE = "engine-failed"  # the worker reported it
    GONE = "gone"  # its process ended


S, L = HealthStatus, Lift
_CANARY = frozenset({L.PASSED, L.ANSWERED, L.LOADED})

TABLE: dict[HealthCause, tuple[HealthStatus, frozenset[Lift]]] = {
    HealthCause.UNCHECKED: (S.UNHEALTHY, frozenset({L.PASSED, L.ANSWERED})),
    HealthCause.CANARY_FAILED: (S.SUSPICIOUS, _CANARY),
    HealthCause.CANARY_FAILING: (S.UNHEALTHY, _CANARY),
    HealthCause.CANARY_SLOW: (S.SUSPICIOUS, frozenset({L.PASSED, L.LOADED})),
    HealthCause.WRONG: (S.UNHEALTHY, frozenset({L.LOADED, L.ACQUITTED})),
    HealthCause.DISPUTED: (S.SUSPICIOUS, frozenset({L.RESOLVED, L.LOADED})),
    HealthCause.BREAKER: (S.UNHEALTHY, frozenset({L.CLOSED})),
    HealthCause.LOST: (S.UNHEALTHY, frozenset({L.BACK, L.ALIVE})),
    HealthCause.PROBATION: (S.SUSPICIOUS, frozenset({L.ALIVE})),
    HealthCause.SLOW: (S.SUSPICIOUS, frozenset({L.IN_PACE})),
    HealthCause.CRAWLING: (S.DRAINING, frozenset({L.IN_PACE})),
    HealthCause.DEVICE_SICK: (S.DRAINING, frozenset({L.CLEARED})),
    HealthCause.DEVICE_LOST: (S.UNHEALTHY, frozenset({L.CLEARED})),
    HealthCause.ENGINE: (S.UNHEALTHY, frozenset({L.LOADED})),
    HealthCause.GONE: (S.DEAD, frozenset({L.SEEN, L.LOADED})),
}


class CanaryFailing(StrEnum):
    """How a canary failed, after its retries."""

    NO_ANSWER = "no answer"
    SLOW = "slow"  # right, but late for this worker; not reported if its whole set is late (`Outliers`)
    WRONG = "wrong"  # different tokens, or logprobs outside the band


# -- events


@dataclass(frozen=True, slots=True)
class WorkerPresent:
    """The worker is present with weights of this load, a number above 0 that grows with every fresh load."""

    load: int  # of the weights: another process that maps them has the same number
    # It already has streams (it took over, or no control checked it); it keeps them unless evidence speaks against it.
    serving: bool = False


@dataclass(frozen=True, slots=True)
class WorkerGone:
    load: int
    reason: str


@dataclass(frozen=True, slots=True)
class CanaryPassed:
    load: int
    asked_at_s: float  # when it was sent
    right: bool = True  # it was compared with an expected answer, and no answer was wrong lately


@dataclass(frozen=True, slots=True)
class CanaryFailed:
    load: int
    asked_at_s: float
    failing: CanaryFailing
    reason: str
    moving: bool = False  # clients got tokens from this worker meanwhile: it is busy, not silent


@dataclass(frozen=True, slots=True)
class Disputed:
    reason: str  # why it is not known if its answers are right; empty: it is known


@dataclass(frozen=True, slots=True)
class WorkerAcquitted:
    """The worker's weights equal their source, and either another process gave the wrong answers with them, or the
    worker's own answers are right again."""


@dataclass(frozen=True, slots=True)
class LastResort:
    """`serves`: whether the worker must serve because no other worker of its set can."""

    serves: bool


@dataclass(frozen=True, slots=True)
class ReportedFatal:
    """The worker reports that its engine cannot continue."""

    load: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The worker's device reported a fault; None: it was reset or replaced."""

    fault: DeviceFault | None
    at_s: float


# Effects of the worker's breaker, of its `WorkerLiveness` and of `Outliers` are events here.
StandingEvent = (
    WorkerPresent | WorkerGone | CanaryPassed | CanaryFailed | Disputed | WorkerAcquitted | LastResort | ReportedFatal
    | DeviceReport | BreakerOpened | BreakerClosed | LivenessChanged | Paced | DeadlineReached
)  # fmt: skip


# -- effects


@dataclass(frozen=True, slots=True)
class SetWeight:
    """Give the worker this share of its normal traffic. This is written before other effects are carried out."""

    status: HealthStatus
    weight: float
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Flag the worker's answers since `right_s`: they cannot be trusted. Workers with the same weights are affected
    too."""

    reason: str
    right_s: float  # when it was last known to be right


@dataclass(frozen=True, slots=True)
class MoveEjectedStreams:
    """Resume the worker's streams elsewhere, now. Frontends that did so for this or a later ejection ignore it."""

    number: int  # of the ejection
    reason: str


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Let the worker's streams end or be handed over, as for a rollout. The worker is not killed."""

    reason: str


@dataclass(frozen=True, slots=True)
class CheckWorkerNow:
    """Send a canary now, not at the next interval."""

    reason: str


@dataclass(frozen=True, slots=True)
class HealthNote:  # a line for people to read; nothing follows from it
    reason: str


StandingEffect = SetWeight | Quarantine | MoveEjectedStreams | DrainWorker | CheckWorkerNow | HealthNote

# -- state


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """The verdict on one worker, initially UNCHECKED. Status, weight, quarantine and reason are derived from the other
    fields."""

    status: int = HealthStatus.UNHEALTHY
    weight: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    quarantined: bool = False
    reason: str = UNCHECKED
    since_s: UnixS = 0.0  # of this status
    fall: Count = 0  # number of its last ejection: how often its streams were moved
    causes: Mapping[str, str] = field(default_factory=lambda: {HealthCause.UNCHECKED: UNCHECKED})  # with their reasons
    load: Count = 0  # 0: none yet
    failures: Count = 0  # canaries in a row without an answer
    owed: Annotated[int, Meta(ge=0, le=OWED_MAX)] = 0  # canaries to pass to be HEALTHY again, besides the causes
    prove_s: UnixS = 0.0  # only a canary sent at this time or later counts as the last owed one
    asked: bool = False  # that last canary was requested
    heard_s: UnixS = 0.0  # when the latest canary with a result was sent
    good_s: UnixS = 0.0  # when the latest that passed was sent
    right_s: UnixS = 0.0  # when the latest that was known to be right was sent; a fresh load counts as right
    fell_s: UnixS = 0.0  # when it was last ejected
    fell_for: Mapping[str, str] = field(default_factory=dict)  # the causes at that time
    flaps: Count = 0  # ejections in a row that came soon after another
    cleared_s: UnixS = 0.0  # when its device was last reset or replaced
    last_resort: bool = False  # no other can serve: SUSPICIOUS at worst, and ejections are postponed

    def __str__(self) -> str:
        return f"{HealthStatus(self.status).name} ({self.reason})"


Outcome = tuple[WorkerStanding, tuple[StandingEffect, ...]]


def restore(written: WorkerStanding, now_s: float) -> WorkerStanding:
    """Return a standing that continues from another process's record. The other clock may have been ahead, so times are
    limited to now. An unknown cause (of a newer version) becomes UNCHECKED: a canary must pass before it gets traffic.
    """
    causes = {cause if cause in TABLE else HealthCause.UNCHECKED: why for cause, why in written.causes.items()}
    times = {
        name: min(getattr(written, name), now_s)
        for name in ("since_s", "heard_s", "good_s", "right_s", "fell_s", "cleared_s")
    }
    known = replace(written, causes=causes, prove_s=min(written.prove_s, now_s + PROVING_S), asked=False, **times)
    return _derive(known)


def next_deadline_s(standing: WorkerStanding) -> float | None:
    proving = standing.owed == 1 and standing.weight > 0 and not standing.asked
    return standing.prove_s if proving else None


# -- steps


def earned(standing: WorkerStanding) -> float:
    """Return the worker's weight by its causes and owed canaries, without the last-resort rule."""
    return WEIGHTS[_earned_status(standing)]


def step(standing: WorkerStanding, event: StandingEvent, now_s: float, *, last_resort: bool | None = None) -> Outcome:
    """Return the next standing, and the effects to carry out in order after it is written. `last_resort`: whether no
    other worker can serve after this event; None: unchanged."""
    taken, asks = _apply(standing, event, now_s)
    if last_resort is not None and last_resort is not taken.last_resort:
        taken = replace(taken, last_resort=last_resort)
    after, effects = _conclude(standing, taken, now_s)
    return after, effects + asks


def _apply(s: WorkerStanding, event: StandingEvent, now_s: float) -> Outcome:
    match event:
        case WorkerPresent():
            return _on_present(s, event, now_s)
        case CanaryPassed() | CanaryFailed() | WorkerGone() | ReportedFatal() if event.load != s.load:
            return s, ()  # about an earlier load
        case CanaryPassed():
            return _on_canary_passed(s, event), ()
        case CanaryFailed():
            return _on_canary_failed(s, event)
        case Disputed():
            return (
                _hold_cause(s, HealthCause.DISPUTED, event.reason) if event.reason else _lift_causes(s, Lift.RESOLVED)
            ), ()
        case WorkerAcquitted():
            return _acquit(s), ()
        case LastResort():
            return (s if event.serves is s.last_resort else replace(s, last_resort=event.serves)), ()
        case WorkerGone():
            return _hold_cause(s, HealthCause.GONE, event.reason), ()
        case ReportedFatal():
            return _hold_cause(s, HealthCause.ENGINE, event.reason), ()
        case DeviceReport():
            return _on_device_report(s, event)
        case BreakerOpened():
            return _hold_cause(s, HealthCause.BREAKER, f"its breaker is open: {event.reason}"), ()
        case BreakerClosed():
            return _lift_causes(s, Lift.CLOSED), ()
        case LivenessChanged():
            return _on_liveness(s, event), ()
        case Paced():
            return _on_pace(s, event), ()
        case DeadlineReached():
            due_s = next_deadline_s(s)
            if due_s is None or now_s < due_s:
                return s, ()
            return replace(s, asked=True), (CheckWorkerNow("it is back"),)


def _conclude(before: WorkerStanding, s: WorkerStanding, now_s: float) -> Outcome:
    """Derive the fields that depend on the causes, and return the effects of the change."""
    if s is before:
        return s, ()
    ejected = _taken_out(s) and not _taken_out(before) and (before.owed <= 1 or before.last_resort)
    found = [
        TABLE[HealthCause(cause)][0]
        for cause in s.causes
        if cause not in before.causes and cause != HealthCause.UNCHECKED
    ]
    if ejected:
        s = _become_ejected(s, now_s, anew=not (before.last_resort and s.causes.keys() <= s.fell_for.keys()))
    elif HealthStatus.DRAINING in found:
        s = replace(s, owed=max(s.owed, 1))
    s = _derive(s)
    if before.weight == 0 and s.weight > 0:
        s = replace(s, prove_s=now_s + PROVING_S, asked=False)
    effects: list[StandingEffect] = []
    if s.status != before.status or (before.load == 0 and s.load > 0):
        s = replace(s, since_s=now_s)
        effects.append(SetWeight(HealthStatus(s.status), s.weight, s.reason))
    else:
        effects += [HealthNote(why) for cause, why in s.causes.items() if cause not in before.causes]
    if s.quarantined and not before.quarantined:
        effects.append(Quarantine(s.causes[HealthCause.WRONG], s.right_s))
    if ejected:
        effects.append(MoveEjectedStreams(s.fall, s.reason))
    elif s.status == HealthStatus.DRAINING != before.status:
        effects.append(DrainWorker(s.reason))
    return s, tuple(effects)


# -- evidence


def _on_present(s: WorkerStanding, event: WorkerPresent, now_s: float) -> Outcome:
    asks = (CheckWorkerNow("a fresh load"),)
    if event.load < s.load:
        return s, ()
    if event.load == s.load:
        return _lift_causes(s, Lift.SEEN), asks if HealthCause.UNCHECKED in s.causes else ()
    trusted = event.serving and (s.load == 0 or s.status == HealthStatus.HEALTHY)
    left = {cause: why for cause, why in _lift_causes(s, Lift.LOADED).causes.items() if cause != HealthCause.UNCHECKED}
    fresh = replace(s, causes=left, load=event.load, failures=0, heard_s=0.0, good_s=now_s, right_s=now_s)
    # The old load's ejections do not count. With a cause that no load lifts, the worker returns at half weight later.
    fresh = replace(fresh, owed=0 if WEIGHTS[_worst(fresh)] > 0 else 1)
    return (fresh if trusted else _hold_cause(fresh, HealthCause.UNCHECKED, UNCHECKED)), asks


def _on_canary_passed(s: WorkerStanding, event: CanaryPassed) -> WorkerStanding:
    asked_at_s = event.asked_at_s
    if asked_at_s <= s.heard_s:
        return s
    good_s = s.good_s if s.quarantined else asked_at_s
    heard = replace(s, heard_s=asked_at_s, good_s=good_s, right_s=good_s if event.right else s.right_s, failures=0)
    lifted = _lift_causes(heard, Lift.PASSED)
    # A canary that lifted a cause, or was sent before the ejection, does not count as one that is owed.
    if lifted is not heard or asked_at_s <= s.fell_s:
        return lifted
    if s.owed > 1:
        return replace(heard, owed=s.owed - 1)
    proved = s.owed == 1 and s.weight > 0 and asked_at_s >= s.prove_s
    return replace(heard, owed=0) if proved else heard


def _on_canary_failed(s: WorkerStanding, event: CanaryFailed) -> Outcome:
    why = f"canary {event.failing}: {event.reason}"
    if event.failing is CanaryFailing.WRONG:
        return replace(_hold_cause(s, HealthCause.WRONG, why), heard_s=max(s.heard_s, event.asked_at_s)), ()
    if event.asked_at_s <= s.heard_s:
        return s, ()
    heard = replace(s, heard_s=event.asked_at_s)
    if event.failing is CanaryFailing.SLOW:
        return _hold_cause(_lift_causes(replace(heard, failures=0), Lift.ANSWERED), HealthCause.CANARY_SLOW, why), ()
    if event.moving:
        return heard, (HealthNote(f"{why}; but its clients have tokens"),)
    heard = replace(heard, failures=s.failures + 1)
    if heard.failures < CANARY_FAILURES_MAX:
        return _hold_cause(heard, HealthCause.CANARY_FAILED, why), (CheckWorkerNow(why),) if s.weight > 0 else ()
    return _hold_cause(heard, HealthCause.CANARY_FAILING, f"{heard.failures} canaries in a row; {why}"), ()


def _acquit(s: WorkerStanding) -> WorkerStanding:
    lifted = _lift_causes(s, Lift.ACQUITTED)
    if lifted is s or _grave(lifted):
        return lifted
    return replace(lifted, owed=0)  # this worker was not at fault for its ejection


def _on_liveness(s: WorkerStanding, event: LivenessChanged) -> WorkerStanding:
    """Apply a change of its liveness. Silence alone is not recorded: frontends with streams on the worker notice it
    first, and mostly it ends soon (facts 31)."""
    if event.after in LOST:
        return _hold_cause(s, HealthCause.LOST, f"{event.after}: {event.reason}")
    if event.after is Liveness.PROBATION:
        return _hold_cause(_lift_causes(s, Lift.BACK), HealthCause.PROBATION, f"on probation: {event.reason}")
    return _lift_causes(s, Lift.ALIVE) if event.after is Liveness.ALIVE else s


def _on_pace(s: WorkerStanding, event: Paced) -> WorkerStanding:
    cause = {PaceClass.CRAWLING: HealthCause.CRAWLING, PaceClass.SLOW: HealthCause.SLOW}.get(event.pace)
    return _hold_cause(s, cause, event.reason) if cause else _lift_causes(s, Lift.IN_PACE)


def _on_device_report(s: WorkerStanding, event: DeviceReport) -> Outcome:
    fault = event.fault
    if fault is None:
        return replace(_lift_causes(s, Lift.CLEARED), cleared_s=max(s.cleared_s, event.at_s)), ()
    if event.at_s <= s.cleared_s:
        return s, ()
    if fault.severity is Severity.IGNORABLE:
        return s, (HealthNote(fault.reason),)
    lost = fault.severity is Severity.FATAL
    return _hold_cause(s, HealthCause.DEVICE_LOST if lost else HealthCause.DEVICE_SICK, fault.reason), ()


# -- causes


def _hold_cause(s: WorkerStanding, cause: HealthCause, why: str) -> WorkerStanding:
    """Add a cause; one that is there already keeps its first reason."""
    return s if cause in s.causes else replace(s, causes={**s.causes, cause: why})


def _lift_causes(s: WorkerStanding, lift: Lift) -> WorkerStanding:
    """Remove the causes that this evidence lifts; return the same object if there is none."""
    left = {cause: why for cause, why in s.causes.items() if lift not in TABLE[HealthCause(cause)][1]}
    return s if len(left) == len(s.causes) else replace(s, causes=left)


def _worst(s: WorkerStanding) -> HealthStatus:
    """Return the most urgent status of its causes, ignoring owed canaries."""
    return max((TABLE[HealthCause(cause)][0] for cause in s.causes), key=URGENCY.index, default=HealthStatus.HEALTHY)


def _earned_status(s: WorkerStanding) -> HealthStatus:
    owing = HealthStatus.HEALTHY if not s.owed else HealthStatus.SUSPICIOUS if s.owed == 1 else HealthStatus.UNHEALTHY
    return max(_worst(s), owing, key=URGENCY.index)


def _grave(s: WorkerStanding) -> bool:
    """Return True if a cause other than UNCHECKED makes the worker lose its streams."""
    return any(TABLE[HealthCause(cause)][0] in EJECTED for cause in s.causes if cause != HealthCause.UNCHECKED)


def _taken_out(s: WorkerStanding) -> bool:
    """Return True if its streams must move. A process that ended cannot be the last resort."""
    return _grave(s) and not (s.last_resort and HealthCause.GONE not in s.causes)


def _become_ejected(s: WorkerStanding, now_s: float, *, anew: bool) -> WorkerStanding:
    """Count an ejection. `anew` is False if the worker was ejected for the same causes before and was the last resort
    since: that does not count as flapping."""
    soon = s.fall > 0 and now_s - s.fell_s <= FLAP_S
    flaps = s.flaps if not anew else s.flaps + 1 if soon else 0
    owed = min(2 ** min(flaps, OWED_MAX), OWED_MAX)
    return replace(s, fall=s.fall + 1, fell_s=now_s, fell_for=s.causes, flaps=flaps, owed=owed)


def _derive(s: WorkerStanding) -> WorkerStanding:
    """Set status, weight and reason from causes and owed canaries. The reason is that of the first cause with that
    status; a quarantine's reason goes first."""
    status = _earned_status(s)
    reasons = [why for cause, why in s.causes.items() if TABLE[HealthCause(cause)][0] is status]
    if HealthCause.WRONG in s.causes and status is not HealthStatus.DEAD:
        reasons.insert(0, s.causes[HealthCause.WRONG])
    if s.owed:
        reasons.append(f"it must pass {s.owed} more canaries" if s.owed > 1 else "it must pass a canary")
    reason = next(iter(reasons), "sound")
    if s.last_resort and not WEIGHTS[status] and status is not HealthStatus.DEAD:
        status, reason = HealthStatus.SUSPICIOUS, f"{LAST_RESORT}: {reason}"
    quarantined = HealthCause.WRONG in s.causes
    return replace(s, status=status, weight=WEIGHTS[status], quarantined=quarantined, reason=reason)
