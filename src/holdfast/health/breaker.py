"""One worker's circuit breaker: when its own failures take it out of traffic, and how it is let back. Pure: no I/O, no
clock (`now_s` is passed in, and never goes back), no randomness but what is injected.

Theory (facts 13). Only what is the worker's fault is counted: `blame` says whether an attempt's end is, and there is no
event for anything else, so a client's mistake, a refusal for want of room or a cancelled request cannot open a breaker
in any order of events. A run of failures opens it, and so does a rate of them, for a worker that fails every fifth
request has no runs. While it is open nobody's word counts: what still ends then began before. It rests, longer each
time it opens again soon, and is then tried with canaries, never with customers: exactly `canaries` of them are
asked for, all must pass, and one that fails or stays away opens it again.

What is counted comes from several frontends, as counts and without an order. Whoever feeds it therefore tells what all
of them saw in an interval as one event; a success anywhere in it ends the run, and so do tokens that an attempt made
since the last failure (long streams end seldom); the rate speaks for the rest. A failure that follows its request to
another worker was the request's, and is taken back.

Where no other worker serves, a rest would be an outage: the breaker is probed (`Probe`) at once and every few seconds,
and a probe that fails makes no rest longer.

Always true: `TABLE` is every change of state; customers are admitted in CLOSED only; HALF_OPEN asks for exactly its
number of canaries; an answer that was not asked for, or comes twice or late, changes nothing; a breaker restored from
its record admits nobody whom the old one did not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated

from msgspec import Meta

from holdfast.core.errors import Code
from holdfast.health.bounds import Count, UnixS

# By rate: failures in the last WINDOW_S, at least so many, of at least so many attempts, and at least this share.
# A healthy worker's share is about 0, because only its own failures count; one that fails every fifth request must be
# found. 0.1 is half of that, so that chance does not decide it: at 1 in 5 the rule misses 1 in 100 windows of 60
# attempts and 2 in 1,000 of 100. Fewer than 20 attempts a minute make no rate: there the run must do.
WINDOW_S = 60.0
WINDOW_SLOT_S = 5.0  # the window moves in steps: twelve pairs of numbers instead of every attempt
RATE_FAILURES_MIN = 5  # 2 of 20 would be a share of 0.1 too, and chance
RATE_ATTEMPTS_MIN = 20
RATE_MIN = 0.1

# Each opening soon after the last doubles the rest, up to ten minutes: a mended worker is found within that.
OPEN_S_MAX = 600.0
# Up to this much longer, never shorter: workers that failed together are not tried together.
JITTER_MAX = 0.2
# A canary that is not answered by then has failed: longer than one takes with its retries; whoever sent it may be gone.
CANARY_S = 60.0


class State(IntEnum):
    """The numbers are those of the metric."""

    CLOSED = 0  # customers are admitted
    OPEN = 1  # nobody is
    HALF_OPEN = 2  # canaries are out


class Cause(StrEnum):
    TOO_MANY = "too-many"  # failures in a row, or too large a share
    RESTED = "rested"  # its time is over
    PASSED = "passed"  # every canary
    NOT_PASSED = "not-passed"  # a canary failed, or was not answered
    RENEWED = "renewed"  # another process, or a fresh load


TABLE: dict[State, dict[Cause, State]] = {
    State.CLOSED: {Cause.TOO_MANY: State.OPEN, Cause.RENEWED: State.CLOSED},
    State.OPEN: {Cause.RESTED: State.HALF_OPEN, Cause.RENEWED: State.CLOSED},
    State.HALF_OPEN: {
        Cause.PASSED: State.CLOSED,
        Cause.NOT_PASSED: State.OPEN,
        Cause.RENEWED: State.CLOSED,
    },
}


class Kind(StrEnum):
    """How a worker can fail an attempt: there is no name for what is not its fault."""

    DISCONNECTED = "disconnected"
    TIMEOUT = "timed out"
    STALLED = "stalled"
    TRUNCATED = "truncated"
    ZERO_TOKENS = "zero tokens"
    ENGINE_ERROR = "engine error"


_BLAME: dict[str, Kind | None] = {
    Code.CANNOT_CONNECT: Kind.DISCONNECTED,
    Code.DISCONNECTED: Kind.DISCONNECTED,
    Code.CONNECTION_TIMEOUT: Kind.TIMEOUT,
    Code.RESPONSE_TIMEOUT: Kind.STALLED,
    Code.STREAM_INCOMPLETE: Kind.TRUNCATED,
    Code.EMPTY_ANSWER: Kind.ZERO_TOKENS,
    Code.ENGINE_SHUTDOWN: Kind.ENGINE_ERROR,
    Code.WORKER_OVERLOADED: None,  # it is full
    Code.RESOURCE_EXHAUSTED: None,
    Code.NO_WORKER: None,
    Code.REPLACED: None,
    Code.MODEL_UNAVAILABLE: None,
    Code.PUSHED_OUT: None,  # for one that matters more
    Code.CANCELLED: None,  # its client left
    Code.INVALID_REQUEST: None,  # its client's mistake
    Code.POISONED: None,  # the request's; the deaths it caused were counted one by one
    Code.INTERNAL: None,  # the frontend's own bug
}


def blame(code: str | None, *, tokens: int, finish: str | None, handed_back: bool = False) -> Kind | None:
    """What the worker did wrong in an attempt that ended so, or None. `code`: of its failure, if it had one; `tokens`:
    made in this attempt, an end-of-text token among them; `finish`: why the stream ended, whoever ended it;
    `handed_back`: the worker gave it back because it was told to stop. A code nobody knows is the worker's own."""
    if handed_back:
        return None
    if code is not None:
        return _BLAME.get(code, Kind.ENGINE_ERROR)
    if finish is None:
        return Kind.TRUNCATED
    return None if tokens else Kind.ZERO_TOKENS


@dataclass(frozen=True, slots=True)
class Limits:
    """What a person may set."""

    failures: int = 3  # in a row; one or two happen to a worker beside a failover
    open_s: float = 60.0  # the first rest, in seconds
    canaries: int = 1  # that HALF_OPEN asks for, and that must all pass


@dataclass(frozen=True, slots=True)
class Attempts:
    """What became of attempts since the last such event, as all frontends saw it. The streams that one broken
    connection or one stall took are one failure: they have one cause, and sixteen at once are not sixteen in a row."""

    succeeded: int = 0
    failed: Mapping[Kind, int] = field(default_factory=dict)
    outlived: int = 0  # failures after which an attempt made tokens there
    excused: int = 0  # failures, counted before, that followed their request to another worker


@dataclass(frozen=True, slots=True)
class CanaryAnswered:
    """The canary of that number passed, or failed."""

    number: int
    passed: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """The worker loaded afresh: what its former self did is not held against it."""


@dataclass(frozen=True, slots=True)
class Probe:
    """No other worker serves: try it with canaries now, whatever is left of its rest."""


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline_s` has come."""


Event = Attempts | CanaryAnswered | Renewed | Probe | Tick


@dataclass(frozen=True, slots=True)
class Opened:
    """No customers from now on; canaries at the earliest after `rest_s`."""

    reason: str
    rest_s: float


@dataclass(frozen=True, slots=True)
class AskCanary:
    """Send one canary, at once, and tell how it went by this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Customers again."""

    reason: str


Effect = Opened | AskCanary | Closed


@dataclass(frozen=True, slots=True)
class Record:
    """What must outlive the process that keeps the breaker; plain data. Counts are not in it: they come again."""

    state: int = State.CLOSED
    reason: str = ""
    until_s: UnixS = 0.0  # of an open one
    rest_s: Annotated[float, Meta(ge=0.0, le=OPEN_S_MAX)] = 0.0  # the last rest, less its jitter; 0: none yet
    closed_s: UnixS = 0.0  # when it closed last
    asked: Count = 0  # the last canary's number


class Breaker:
    """One worker's. `jitter` draws from [0, 1)."""

    __slots__ = (
        "_asked", "_closed_s", "_jitter", "_limits", "_out", "_probed", "_rest_s", "_run", "_until_s", "_window",
        "name", "reason", "state",
    )  # fmt: skip

    def __init__(self, name: str, jitter: Callable[[], float], limits: Limits | None = None) -> None:
        self.name = name
        self.state = State.CLOSED
        self.reason = ""
        self._limits = limits or Limits()
        self._jitter = jitter
        self._run = 0  # failures in a row
        self._window: deque[list[int]] = deque()  # [slot of time, attempts, failures], oldest first
        self._until_s = 0.0  # OPEN: the end of its rest; HALF_OPEN: by when canaries must be back
        self._rest_s = 0.0
        self._closed_s = 0.0
        self._asked = 0
        self._out: set[int] = set()  # canaries that are not back
        self._probed = False  # they were asked for before its rest was over

    def __repr__(self) -> str:
        return f"{self.name}: {self.state.name.lower()}" + (f" ({self.reason})" if self.reason else "")

    @property
    def admits(self) -> bool:
        """Whether customers' requests may go there."""
        return self.state is State.CLOSED

    @property
    def next_deadline_s(self) -> float | None:
        """When a `Tick` is due, if nothing else happens before."""
        return None if self.state is State.CLOSED else self._until_s

    def record(self) -> Record:
        return Record(self.state, self.reason, self._until_s, self._rest_s, self._closed_s, self._asked)

    def restore(self, record: Record, now_s: float) -> None:
        """Go on from what another process wrote down. Canaries that it had out are not waited for: a half-open breaker
        asks for its own. Its clock may have been another: no rest becomes longer than the longest."""
        assert self.state is State.CLOSED, self
        self.reason, self._rest_s, self._asked = record.reason, record.rest_s, record.asked
        self._closed_s = min(record.closed_s, now_s)
        if record.state == State.CLOSED:
            return
        self.state = State.OPEN
        longest_s = now_s + OPEN_S_MAX * (1 + JITTER_MAX)
        self._until_s = now_s if record.state == State.HALF_OPEN else min(record.until_s, longest_s)

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Take what happened; what is to be done, in order."""
        match event:
            case Attempts():
                return self._count(event, now_s)
            case CanaryAnswered():
                return self._hear(event, now_s)
            case Renewed():
                return self._become_closed(Cause.RENEWED, "a fresh load", now_s)
            case Probe():
                return self._become_half_open(now_s, probed=True) if self.state is State.OPEN else ()
            case Tick():
                return self._tick(now_s)

    def _count(self, event: Attempts, now_s: float) -> tuple[Effect, ...]:
        failures = sum(event.failed.values())
        if self.state is not State.CLOSED:
            return ()
        self._excuse(event.excused)
        if event.succeeded or event.outlived:
            self._run = 0
        if event.succeeded + failures == 0:
            return ()
        self._run = 0 if event.succeeded or event.outlived else self._run + failures
        self._remember(event.succeeded + failures, failures, now_s)
        if not failures:
            return ()
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(event.failed.items()) if count)
        if self._run >= self._limits.failures:
            return self._become_open(Cause.TOO_MANY, f"{self._run} failures in a row, the last: {kinds}", now_s)
        attempts = sum(slot[1] for slot in self._window)
        failed = sum(slot[2] for slot in self._window)
        if failed >= RATE_FAILURES_MIN and attempts >= RATE_ATTEMPTS_MIN and failed >= RATE_MIN * attempts:
            why = f"{failed} of {attempts} attempts failed within {WINDOW_S:g} s, the last: {kinds}"
            return self._become_open(Cause.TOO_MANY, why, now_s)
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

    def _hear(self, event: CanaryAnswered, now_s: float) -> tuple[Effect, ...]:
        if event.number not in self._out:
            return ()
        self._out.discard(event.number)
        if not event.passed:
            return self._become_open(Cause.NOT_PASSED, "it failed the canary that was to let it back", now_s)
        return () if self._out else self._become_closed(Cause.PASSED, "it passed the canary", now_s)

    def _tick(self, now_s: float) -> tuple[Effect, ...]:
        if self.state is State.CLOSED or now_s < self._until_s:
            return ()
        if self.state is State.HALF_OPEN:
            return self._become_open(Cause.NOT_PASSED, f"no answer to a canary within {CANARY_S:g} s", now_s)
        return self._become_half_open(now_s)

    # -- transitions, named by where they go

    def _turn(self, cause: Cause) -> None:
        self.state = TABLE[self.state][cause]
        self._run = 0
        self._window.clear()
        self._out.clear()

    def _become_open(self, cause: Cause, why: str, now_s: float) -> tuple[Effect, ...]:
        # Closed for longer than it had rested, it has paid for that; sooner, it was let back too early.
        soon = cause is Cause.NOT_PASSED or (self._rest_s > 0.0 and now_s - self._closed_s < self._rest_s)
        if not (cause is Cause.NOT_PASSED and self._probed):
            self._rest_s = min(2 * self._rest_s if soon else self._limits.open_s, OPEN_S_MAX)
        self._turn(cause)
        self.reason = why
        rest_s = self._rest_s * (1 + JITTER_MAX * self._jitter())
        self._until_s = now_s + rest_s
        return (Opened(why, rest_s),)

    def _become_half_open(self, now_s: float, *, probed: bool = False) -> tuple[Effect, ...]:
        self._turn(Cause.RESTED)
        self._probed = probed
        self._until_s = now_s + CANARY_S
        first = self._asked + 1
        self._asked += self._limits.canaries
        numbers = range(first, self._asked + 1)
        self._out.update(numbers)
        return tuple(AskCanary(number) for number in numbers)

    def _become_closed(self, cause: Cause, why: str, now_s: float) -> tuple[Effect, ...]:
        was = self.state
        self._turn(cause)
        self.reason = ""
        self._closed_s = now_s
        if cause is Cause.RENEWED:
            self._rest_s = 0.0
        return () if was is State.CLOSED else (Closed(why),)
