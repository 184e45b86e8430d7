"""The ledger of one stream: every token it has shown, under which attempt, and what to do when an attempt fails. Pure.

Theory. A stream's truth is prompt + emitted tokens. Each attempt to make more of them has a number; output of any
attempt but the latest is dropped, so a worker that wakes up after its streams have moved can repeat nothing.
A stream ends exactly once. Slotted and mutable because it is stepped for every token (facts 33); no I/O, no clock.

An engine's death takes all its streams with it, and one of them may be the cause. Who makes a token after a
death is not it: the count of *barren deaths* (the connection broke before the attempt made a token) starts anew. Who
has two in a row is a suspect and is tried alone, on an engine that has lived for a while (`routing.table`), so that the
third, if it comes, convicts one stream and no bystander, and nobody because somebody kills every engine that begins.

Always true: the prompt never changes (so all choices of a request share one list); tokens are only appended, only by
the current attempt, and never after the end. Attempts in a row without a token are bounded: a death counts as a death
only, every other failure that is somebody's fault as a barren attempt only; each count has its own bound, and a token
clears both. A request that a full worker turned away has not failed; one that a worker gave back when it was told to
stop is nobody's fault, and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import RESUMABLE, Code
from holdfast.core.requests import Failure, GenerateRequest, Sampling
from holdfast.routing.table import Standing


class Ledger:
    """What one stream has shown."""

    __slots__ = (
        "attempt",
        "barren",
        "deaths",
        "ended",
        "inexact",
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
        self.resumed = 0  # attempts begun after tokens had been shown or an earlier attempt had failed
        self.barren = 0  # attempts in a row that failed without adding a token
        self.deaths = 0  # attempts in a row whose engine died before they added a token
        self.mark = len(self.made)  # tokens made when the current attempt began
        self.inexact = ""  # why its tokens may differ from those of an unbroken run on sound workers
        self.ended = False

    def begin_attempt(self) -> int:
        """A new attempt; whatever the old one still says is void."""
        assert not self.ended, "an ended stream is never attempted again"
        self.attempt += 1
        self.mark = len(self.made)
        return self.attempt

    def void_attempt(self) -> None:
        """The current attempt never ran: it counts as none, and nothing may come of it."""
        self.attempt += 1

    def fail_attempt(self, *, died: bool = False) -> None:
        """The current attempt is over without an end; its later output is void too."""
        if died:
            self.deaths += 1
        else:
            self.barren += 1
        self.hand_back()

    def hand_back(self) -> None:
        """The current attempt is over because its worker was told to stop: nobody's fault."""
        if len(self.made) > self.mark:
            self.barren = self.deaths = 0
        self.resumed += 1
        self.attempt += 1

    def accept(self, attempt: int, tokens: list[int]) -> bool:
        """Write down tokens of an attempt; False if they must be dropped."""
        if attempt != self.attempt or self.ended:
            return False
        self.made += tokens
        return True

    def cut_short(self, tokens: list[int], finish: str) -> Failure | None:
        """Why what a worker calls the end, with these last tokens, is none; None: it may be. Which token stopped it is
        the engine's to say; a length without any may be its own limit, which is not known here."""
        if finish == "length":
            return None
        if not tokens and len(self.made) <= self.mark:
            return Failure(Code.EMPTY_ANSWER, f"the worker says {finish} and made no token")
        known = finish == "stop"
        return None if known else Failure(Code.STREAM_INCOMPLETE, f"the worker ended it with {finish[:40]!r}")

    def doubt(self, why: str) -> None:
        """Note why its tokens may not be exact; the first reason stays."""
        self.inexact = self.inexact or why

    def end(self) -> bool:
        """End the stream; True only the first time."""
        if self.ended:
            return False
        self.ended = True
        return True

    @property
    def exact(self) -> bool:
        return not self.inexact

    @property
    def emitted(self) -> int:
        return len(self.made)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.made)

    def request(self) -> GenerateRequest:
        """What to send to the engine that goes on from here."""
        tokens = self.prompt + self.made if self.made else self.prompt
        return GenerateRequest(self.request_id, tokens, len(self.prompt), self.sampling, self.stop_token_ids, self.tier)

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"attempt {self.attempt}"
        return f"<Ledger {self.request_id} {len(self.prompt)}+{self.emitted} tokens, resumed {self.resumed}, {state}>"


# Its engine is gone, and the stream with it.
DEATHS = frozenset({Code.DISCONNECTED})
# One death is anybody's; a bystander of two in a row pays with a short wait, not with its life.
SUSPECT_DEATHS = 2
# The first two, and the one in which it was alone.
POISON_DEATHS = SUSPECT_DEATHS + 1
# A request whose attempts fail this often in a row without one new token is itself the cause.
BARREN_ATTEMPTS_MAX = 5


@dataclass(frozen=True, slots=True)
class Resume:
    """Send prompt + emitted tokens to another worker of the same set."""

    avoid_worker: bool  # set the failed worker aside for a while


@dataclass(frozen=True, slots=True)
class Fail:
    code: Code
    message: str
    barren: bool = False  # no attempt made a token; by itself that does not tell the request's fault from its engine's


def standing_of(resumed: int, deaths: int) -> Standing:
    """How a stream is placed next, from its failed attempts in all and its barren deaths in a row."""
    if deaths >= SUSPECT_DEATHS:
        return Standing.SUSPECT
    return Standing.RESUMED if resumed else Standing.FRESH


def after_failure(code: str, message: str, barren: int, deaths: int = 0) -> Resume | Fail:
    """Decide from the failure's name and how many attempts in a row were fruitless, or ended in a barren death."""
    try:
        name = Code(code)
    except ValueError:
        return Fail(Code.ENGINE_SHUTDOWN, f"worker failed with unknown code {code!r}: {message}")
    if name not in RESUMABLE:
        return Fail(name, message)
    if deaths >= POISON_DEATHS:
        why = f"{deaths} engines died while they worked on this request, the last time it was tried alone"
        return Fail(Code.POISONED, why)
    if name not in DEATHS and barren >= BARREN_ATTEMPTS_MAX:
        return Fail(name, f"gave up after {barren} attempts without a token; the last: {message}", barren=True)
    return Resume(avoid_worker=True)
