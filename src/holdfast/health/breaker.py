"""The circuit breaker of one worker stops its traffic after too many failures, and admits it again once canaries pass.
Pure: no I/O, no clock (`now_s` is passed in, and never goes back), no randomness but what is injected.

Theory (facts 13). Only the worker's own faults count. `classify_failure` decides whether an attempt ended by such a
fault; a client's mistake, a refusal by a full worker or a cancelled request cannot open a breaker. It opens after
several failures in a row, or at a high failure rate: a worker that fails every fifth request has no failures in a row.
While the breaker is open, attempts are not counted, because they began before it opened. After a pause the breaker
requests exactly `canaries` canaries; clients' requests never test a worker. If all pass, it closes. If one fails or is
not answered, it opens again. Each opening soon after the last one doubles the pause.

Counts come from several frontends and without an order, so the caller passes the counts of one interval as one event.
A success in the interval ends a run of failures. So do tokens of a running attempt, because long streams rarely end. A
mix of failures and successes can still open the breaker by its rate. If a request fails on this worker and then on
another one too, the request was at fault, and its failure here is subtracted again.

Where no other worker serves, a pause would be an outage. The caller then sends `BreakerProbe` at once and every few
seconds; a failed probe does not lengthen the pause.

Always true:
- `TABLE` contains every change of state.
- Clients' requests are admitted in CLOSED only.
- HALF_OPEN requests exactly its number of canaries.
- An unrequested, repeated or late canary answer changes nothing.
- A breaker restored from its record admits no request that the old one did not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from holdfast.core.enums import OpenIntEnum
from holdfast.core.errors import Code
from holdfast.core.ports import DeadlineReached
from holdfast.health.bounds import Count, UnixS

# The rate rule counts failures in the last WINDOW_S: at least RATE_FAILURES_MIN of them, in at least RATE_ATTEMPTS_MIN
# attempts, and at least the share RATE_MIN. A healthy worker's share is about 0, because only its own failures count; a
# worker that fails every fifth request must be found. 0.1 is half of that, so that chance does not decide: at 1 in 5
# the rule misses 1 in 100 windows of 60 attempts and 2 in 1,000 of 100. With fewer than 20 attempts a minute only
# failures in a row open the breaker.
WINDOW_S = 60.0
WINDOW_SLOT_S = 5.0  # the window moves in steps: twelve pairs of numbers instead of every attempt
RATE_FAILURES_MIN = 5  # 2 of 20 would be a share of 0.1 too, but may be chance
RATE_ATTEMPTS_MIN = 20
RATE_MIN = 0.1

# Each opening soon after the last doubles the pause, up to ten minutes: a repaired worker is found within that.
OPEN_S_MAX = 600.0
# A pause is up to this share longer, never shorter, so that workers that failed together are not tested together.
JITTER_MAX = 0.2
# A canary without an answer after this time has failed: longer than a canary takes with its retries. Its sender may
# have exited.
CANARY_S = 60.0


class BreakerState(OpenIntEnum):
    """The breaker's state. The numbers are the metric's values."""

    CLOSED = 0  # clients' requests are admitted
    OPEN = 1  # no request is admitted
    HALF_OPEN = 2  # canaries were requested and are not yet answered


class BreakerCause(StrEnum):
    TOO_MANY = "too-many"  # failures in a row, or too large a share
    PAUSE_OVER = "pause-over"  # the pause is over
    PASSED = "passed"  # every canary passed
    NOT_PASSED = "not-passed"  # a canary failed, or was not answered
    RENEWED = "renewed"  # the worker is another process, or loaded its weights again


TABLE: dict[BreakerState, dict[BreakerCause, BreakerState]] = {
    BreakerState.CLOSED: {BreakerCause.TOO_MANY: BreakerState.OPEN, BreakerCause.RENEWED: BreakerState.CLOSED},
    BreakerState.OPEN: {BreakerCause.PAUSE_OVER: BreakerState.HALF_OPEN, BreakerCause.RENEWED: BreakerState.CLOSED},
    BreakerState.HALF_OPEN: {
        BreakerCause.PASSED: BreakerState.CLOSED,
        BreakerCause.NOT_PASSED: BreakerState.OPEN,
        BreakerCause.RENEWED: BreakerState.CLOSED,
    },
}


class FailureKind(StrEnum):
    """The ways in which a worker can fail an attempt by its own fault."""

    DISCONNECTED = "disconnected"
    TIMEOUT = "timed out"
    STALLED = "stalled"
    TRUNCATED = "truncated"
    ZERO_TOKENS = "zero tokens"
    ENGINE_ERROR = "engine error"


_KIND_OF_CODE: dict[str, FailureKind | None] = {
    Code.CANNOT_CONNECT: FailureKind.DISCONNECTED,
    Code.DISCONNECTED: FailureKind.DISCONNECTED,
    Code.CONNECTION_TIMEOUT: FailureKind.TIMEOUT,
    Code.RESPONSE_TIMEOUT: FailureKind.STALLED,
    Code.STREAM_INCOMPLETE: FailureKind.TRUNCATED,
    Code.EMPTY_ANSWER: FailureKind.ZERO_TOKENS,
    Code.ENGINE_SHUTDOWN: FailureKind.ENGINE_ERROR,
    Code.MOVED_BY_VERDICT: None,  # control has judged the worker already
    Code.WORKER_OVERLOADED: None,  # the worker is full
    Code.RESOURCE_EXHAUSTED: None,
    Code.NO_WORKER: None,
    Code.REPLACED: None,
    Code.MODEL_UNAVAILABLE: None,
    Code.PUSHED_OUT: None,  # by a request of higher priority
    Code.CANCELLED: None,  # the client left
    Code.INVALID_REQUEST: None,  # the client's mistake
    Code.POISONED: None,  # the request is at fault; the worker deaths that it caused were counted one by one
    Code.INTERNAL: None,  # the frontend's own bug
}


def classify_failure(
    code: str | None, *, tokens: int, finish: str | None, handed_back: bool = False
) -> FailureKind | None:
    """Return how the worker failed an attempt, or None if it is not at fault. `code`: the code of the failure, if any;
    `tokens`: made in this attempt, an end-of-text token included; `finish`: why the stream ended; `handed_back`: the
    worker returned the request because it was asked to stop. An unknown code counts as the worker's fault."""
    if handed_back:
        return None
    if code is not None:
        return _KIND_OF_CODE.get(code, FailureKind.ENGINE_ERROR)
    if finish is None:
        return FailureKind.TRUNCATED
    return None if tokens else FailureKind.ZERO_TOKENS


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    failures: int = 3  # in a row; one or two can be caused by another worker's failover
    open_s: float = 60.0  # the first pause, in seconds
    canaries: int = 1  # canaries that HALF_OPEN requests; all must pass


@dataclass(frozen=True, slots=True)
class Attempts:
    """The results of attempts since the last such event, summed over all frontends. Streams that failed by the same
    broken connection or stall count as one failure: sixteen at once are not sixteen in a row."""

    succeeded: int = 0
    failed: Mapping[FailureKind, int] = field(default_factory=dict)
    outlived: int = 0  # failures after which an attempt made tokens there
    excused: int = 0  # failures, counted before, that followed their request to another worker


@dataclass(frozen=True, slots=True)
class CanaryAnswered:
    number: int
    passed: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """The worker loaded its weights again: earlier failures no longer count."""


@dataclass(frozen=True, slots=True)
class BreakerProbe:
    """No other worker serves: request canaries now, even if the pause is not over."""


BreakerEvent = Attempts | CanaryAnswered | Renewed | BreakerProbe | DeadlineReached


@dataclass(frozen=True, slots=True)
class BreakerOpened:
    """The worker gets no more clients' requests; canaries are sent after `pause_s` at the earliest."""

    reason: str
    pause_s: float


@dataclass(frozen=True, slots=True)
class SendTrialCanary:
    """Send one canary at once, and report its result under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class BreakerClosed:
    reason: str


BreakerEffect = BreakerOpened | SendTrialCanary | BreakerClosed


@dataclass(frozen=True, slots=True)
class BreakerRecord:
    """The stored part of a breaker; plain data. Counts are not stored: frontends report them again."""

    state: int = BreakerState.CLOSED
    reason: str = ""
    until_s: UnixS = 0.0  # when the pause ends, if the breaker is open
    rest_s: Annotated[float, Meta(ge=0.0, le=OPEN_S_MAX)] = 0.0  # the last pause, without its jitter; 0: none yet
    closed_s: UnixS = 0.0  # when it closed last
    asked: Count = 0  # the last canary's number


class Breaker:
    """Counts one worker's failures and decides when it gets no traffic. `jitter` draws from [0, 1)."""

    def __init__(self, name: str, jitter: Callable[[], float], limits: BreakerLimits | None = None) -> None:
        self.name = name
        self.state = BreakerState.CLOSED
        self.reason = ""
        self._limits = limits or BreakerLimits()
        self._jitter = jitter
        self._run = 0  # failures in a row
        self._window: deque[list[int]] = deque()  # [slot of time, attempts, failures], oldest first
        self._until_s = 0.0  # OPEN: the end of the pause; HALF_OPEN: the deadline of the canaries
        self._pause_s = 0.0
        self._closed_s = 0.0
        self._asked = 0
        self._out: set[int] = set()  # canaries without an answer yet
        self._probed = False  # they were requested before the pause was over

    def __repr__(self) -> str:
        return f"{self.name}: {self.state.name.lower()}" + (f" ({self.reason})" if self.reason else "")

    @property
    def admits(self) -> bool:
        return self.state is BreakerState.CLOSED

    @property
    def next_deadline_s(self) -> float | None:
        return None if self.state is BreakerState.CLOSED else self._until_s

    def record(self) -> BreakerRecord:
        return BreakerRecord(self.state, self.reason, self._until_s, self._pause_s, self._closed_s, self._asked)

    def restore(self, record: BreakerRecord, now_s: float) -> None:
        """Continue from another process's record. A half-open breaker requests its own canaries and ignores those of
        the other process. The other clock may have differed, so no pause becomes longer than the maximum."""
        assert self.state is BreakerState.CLOSED, self
        self.reason, self._pause_s, self._asked = record.reason, record.rest_s, record.asked
        self._closed_s = min(record.closed_s, now_s)
        if record.state == BreakerState.CLOSED:
            return
        self.state = BreakerState.OPEN
        longest_s = now_s + OPEN_S_MAX * (1 + JITTER_MAX)
        self._until_s = now_s if record.state == BreakerState.HALF_OPEN else min(record.until_s, longest_s)

    def step(self, event: BreakerEvent, now_s: float) -> tuple[BreakerEffect, ...]:
        match event:
            case Attempts():
                return self._count(event, now_s)
            case CanaryAnswered():
                return self._on_canary_answer(event, now_s)
            case Renewed():
                return self._become_closed(BreakerCause.RENEWED, "a fresh load", now_s)
            case BreakerProbe():
                return self._become_half_open(now_s, probed=True) if self.state is BreakerState.OPEN else ()
            case DeadlineReached():
                return self._tick(now_s)

    def _count(self, event: Attempts, now_s: float) -> tuple[BreakerEffect, ...]:
        failures = sum(event.failed.values())
        if self.state is not BreakerState.CLOSED:
            return ()
        self._excuse(event.excused)
        self._run = 0 if event.succeeded or event.outlived else self._run + failures
        if event.succeeded + failures == 0:
            return ()
        self._remember(event.succeeded + failures, failures, now_s)
        if not failures:
            return ()
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(event.failed.items()) if count)
        if self._run >= self._limits.failures:
            return self._become_open(BreakerCause.TOO_MANY, f"{self._run} failures in a row, the last: {kinds}", now_s)
        attempts = sum(slot[1] for slot in self._window)
        failed = sum(slot[2] for slot in self._window)
        if failed >= RATE_FAILURES_MIN and attempts >= RATE_ATTEMPTS_MIN and failed >= RATE_MIN * attempts:
            why = f"{failed} of {attempts} attempts failed within {WINDOW_S:g} s, the last: {kinds}"
            return self._become_open(BreakerCause.TOO_MANY, why, now_s)
        return ()

    def _excuse(self, failures: int) -> None:
        self._run = max(0, self._run - failures)
        for slot in reversed(self._window):
            taken = min(failures, slot[2])
            slot[1], slot[2], failures = slot[1] - taken, slot[2] - taken, failures - taken

    def _remember(self, attempts: int, failures: int, now_s: float) -> None:
        slot = int(now_s // WINDOW_SLOT_S)
        while self._window and self._window[0][0] <= slot - WINDOW_S / WINDOW_SLOT_S:
            self._window.popleft()
        if not self._window or self._window[-1][0] < slot:
            self._window.append([slot, 0, 0])
        self._window[-1][1] += attempts
        self._window[-1][2] += failures

    def _on_canary_answer(self, event: CanaryAnswered, now_s: float) -> tuple[BreakerEffect, ...]:
        if event.number not in self._out:
            return ()
        self._out.discard(event.number)
        if not event.passed:
            return self._become_open(BreakerCause.NOT_PASSED, "it failed the canary that was to let it back", now_s)
        return () if self._out else self._become_closed(BreakerCause.PASSED, "it passed the canary", now_s)

    def _tick(self, now_s: float) -> tuple[BreakerEffect, ...]:
        if self.state is BreakerState.CLOSED or now_s < self._until_s:
            return ()
        if self.state is BreakerState.HALF_OPEN:
            return self._become_open(BreakerCause.NOT_PASSED, f"no answer to a canary within {CANARY_S:g} s", now_s)
        return self._become_half_open(now_s)

    # -- transitions, named by where they go

    def _change_state(self, cause: BreakerCause) -> None:
        self.state = TABLE[self.state][cause]
        self._run = 0
        self._window.clear()
        self._out.clear()

    def _become_open(self, cause: BreakerCause, why: str, now_s: float) -> tuple[BreakerEffect, ...]:
        # If it was closed for longer than the last pause, the pause starts from the minimum again; else it doubles.
        soon = cause is BreakerCause.NOT_PASSED or (self._pause_s > 0.0 and now_s - self._closed_s < self._pause_s)
        if not (cause is BreakerCause.NOT_PASSED and self._probed):
            self._pause_s = min(2 * self._pause_s if soon else self._limits.open_s, OPEN_S_MAX)
        self._change_state(cause)
        self.reason = why
        pause_s = self._pause_s * (1 + JITTER_MAX * self._jitter())
        self._until_s = now_s + pause_s
        return (BreakerOpened(why, pause_s),)

    def _become_half_open(self, now_s: float, *, probed: bool = False) -> tuple[BreakerEffect, ...]:
        self._change_state(BreakerCause.PAUSE_OVER)
        self._probed = probed
        self._until_s = now_s + CANARY_S
        first = self._asked + 1
        self._asked += self._limits.canaries
        numbers = range(first, self._asked + 1)
        self._out.update(numbers)
        return tuple(SendTrialCanary(number) for number in numbers)

    def _become_closed(self, cause: BreakerCause, why: str, now_s: float) -> tuple[BreakerEffect, ...]:
        was = self.state
        self._change_state(cause)
        self.reason = ""
        self._closed_s = now_s
        if cause is BreakerCause.RENEWED:
            self._pause_s = 0.0
        return () if was is BreakerState.CLOSED else (BreakerClosed(why),)
