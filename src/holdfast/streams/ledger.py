"""Keeps the ledger of one stream: every token shown to its client; and decides what follows a failed attempt. Pure.

Theory. A stream is fully described by prompt + emitted tokens. Each attempt to make more tokens has a number. Output of
any attempt but the latest is dropped, so a worker that wakes up after its streams have moved can repeat nothing. A
stream ends exactly once. Slotted and mutable because it is stepped for every token (facts 33); no I/O, no clock.

When an engine dies, one of its streams may be the cause. A stream that makes a token after a death is not the cause:
its count of deaths without a token returns to 0. A stream with two in a row is a suspect and is tried alone, on an
engine that has lived for a while (`routing.table`). So a third death convicts one stream and no bystander, even if
something else kills every engine that starts.

Always true:
- The prompt never changes (so all choices of a request share one list).
- Tokens are only appended, only by the current attempt, and never after the end.
- Attempts in a row without a token are bounded. A death counts only as a death, every other counted failure only as an
  empty attempt; each count has its own bound, and a token clears both.
- A request that a full worker turned away has not failed. An attempt that was stopped by decision is not counted: its
  worker drains, a verdict or a rollout moves it, or its leader was superseded.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import RESUMABLE, Code
from holdfast.core.requests import Failure, GenerateRequest, Sampling
from holdfast.routing.table import PriorityClass


class Ledger:
    """The tokens and attempts of one stream."""

    __slots__ = (
        "attempt",
        "deaths",
        "empty_attempts",
        "ended",
        "inexact_reason",
        "made",
        "mark",
        "prompt",
        "request_id",
        "resumed",
        "sampling",
        "stop_token_ids",
        "tier",
    )

    def __init__(self, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        whole = request.prompt_len == len(request.tokens)
        self.prompt = request.tokens if whole else request.tokens[: request.prompt_len]
        self.made = request.tokens[request.prompt_len :]
        self.sampling: Sampling = request.sampling
        self.stop_token_ids = request.stop_token_ids
        self.tier = request.tier
        self.attempt = 0  # 0: none begun
        self.resumed = 0  # attempts that were taken back or failed; turned-away ones do not count
        self.empty_attempts = 0  # attempts in a row that failed without adding a token
        self.deaths = 0  # attempts in a row that ended with their engine's death before they added a token
        self.mark = len(self.made)  # tokens made when the current attempt began
        self.inexact_reason = ""  # why its tokens may differ from those of an unbroken run on sound workers
        self.ended = False

    def begin_attempt(self) -> int:
        """Begin a new attempt; later output of the old one is dropped."""
        assert not self.ended, "an ended stream is never attempted again"
        self.attempt += 1
        self.mark = len(self.made)
        return self.attempt

    def void_attempt(self) -> None:
        """Cancel the current attempt, which never ran: no count changes, and late output is dropped."""
        self.attempt += 1

    def fail_attempt(self, *, died: bool = False) -> None:
        """Count the current attempt as failed; its later output is dropped."""
        if died:
            self.deaths += 1
        else:
            self.empty_attempts += 1
        self.hand_back()

    def hand_back(self) -> None:
        """End the current attempt without counting a failure: it was stopped by decision."""
        if len(self.made) > self.mark:
            self.empty_attempts = self.deaths = 0
        self.resumed += 1
        self.attempt += 1

    def accept(self, attempt: int, tokens: list[int]) -> bool:
        """Append tokens of an attempt; return False if they must be dropped."""
        if attempt != self.attempt or self.ended:
            return False
        self.made += tokens
        return True

    def cut_short(self, tokens: list[int], finish: str) -> Failure | None:
        """Return a failure if the end that a worker reports, with these last tokens, cannot be a real end; else None.
        Only the engine knows which token stops a stream. A `length` end without tokens may come from the engine's own
        limit, which is not known here."""
        if finish == "length":
            return None
        if not tokens and len(self.made) <= self.mark:
            return Failure(Code.EMPTY_ANSWER, f"the worker says {finish} and made no token")
        known = finish == "stop"
        return None if known else Failure(Code.STREAM_INCOMPLETE, f"the worker ended it with {finish[:40]!r}")

    def mark_inexact(self, why: str) -> None:
        """Note why its tokens may not be exact; the first reason is kept."""
        self.inexact_reason = self.inexact_reason or why

    def end(self) -> bool:
        """End the stream; return True only the first time."""
        if self.ended:
            return False
        self.ended = True
        return True

    @property
    def exact(self) -> bool:
        return not self.inexact_reason

    @property
    def emitted(self) -> int:
        return len(self.made)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.made)

    def request(self) -> GenerateRequest:
        """Return the request for an engine that continues the stream."""
        tokens = self.prompt + self.made if self.made else self.prompt
        return GenerateRequest(self.request_id, tokens, len(self.prompt), self.sampling, self.stop_token_ids, self.tier)

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"attempt {self.attempt}"
        return f"<Ledger {self.request_id} {len(self.prompt)}+{self.emitted} tokens, resumed {self.resumed}, {state}>"


# Failures that mean the engine died.
DEATHS = frozenset({Code.DISCONNECTED})
# Any stream can see one death by chance. A bystander of two in a row waits a little longer, but is not ended.
SUSPECT_DEATHS = 2
# The first two, and the one in which it was alone.
POISON_DEATHS = SUSPECT_DEATHS + 1
# A request with attempts that fail this often in a row without one new token is itself the cause.
EMPTY_ATTEMPTS_MAX = 5


@dataclass(frozen=True, slots=True)
class ResumeElsewhere:
    """Send prompt + emitted tokens to another worker of the same set."""


@dataclass(frozen=True, slots=True)
class EndStream:
    code: Code
    message: str
    # The last attempts made no token: the request may be to blame, or its engine.
    no_token: bool = False


def priority_of(resumed: int, deaths: int) -> PriorityClass:
    """Return a stream's priority class from its ended attempts and its deaths in a row without a token."""
    if deaths >= SUSPECT_DEATHS:
        return PriorityClass.ON_TRIAL
    return PriorityClass.RESUMED if resumed else PriorityClass.FRESH


def after_failure(code: Code, message: str, empty_attempts: int, deaths: int = 0) -> ResumeElsewhere | EndStream:
    """Return whether to resume or end a stream, from the failure's code and the attempts in a row that made no token or
    ended in a death without a token."""
    if code not in RESUMABLE:
        return EndStream(code, message)
    if deaths >= POISON_DEATHS:
        why = f"{deaths} engines died while they worked on this request, the last time it was tried alone"
        return EndStream(Code.POISONED, why)
    if code not in DEATHS and empty_attempts >= EMPTY_ATTEMPTS_MAX:
        why = f"gave up after {empty_attempts} attempts without a token; the last: {message}"
        return EndStream(code, why, no_token=True)
    return ResumeElsewhere()
