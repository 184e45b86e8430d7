"""The known question of an engine, and the first moments of a leadership, in which it shows that what it took over is
right.

The question is asked in steps of its own where an engine rounds, and rides in the first batch where it does not. Until
its first token was right, others' tokens wait here: a stream whose KV was taken over has less to compute than the
canary, and may be quicker than it by some tokens. A wrong answer is asked for again, and everything waits until that
one is known; if it is wrong too, the engine is disproved, and everything waits until whoever runs the engine ends it or
has it serve on (`release`). Where answers may round (`tolerance_nats`) a token that is about as likely as the known one
is no wrong answer: what would follow it cannot be compared, so the question ends there.

A right answer is not yet a word for the next adopter: what kills an engine, a request or a damaged block, needs some
steps to do it, and the canary's few may be over first. So the word is given `BELIEF_S` after the takeover at the
earliest, by whoever still lives then. A death before it makes the next adopter start with an empty pool, another one
reload the weights.

Always true: no stream's token leaves here before the canary's first one was right, or while the engine is in doubt,
unless `release` was called; the word is given at most once per leadership, after the whole canary, and never after
`end` or `release`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

from holdfast.core.requests import GenerateRequest, Output, TokenLogprobs

# The canary's stream; a worker's streams count from 1.
CANARY = 0
# Answers are compared within this where they may round: from one batch to another bf16 moves a token's log-probability
# by tenths of a nat, damage by several. Control's questions are chosen by the same margin.
TOLERANCE_NATS = 1.0
# A request that kills engines has done it within 0.2 s, or is tried alone later (`routing.table.YOUNG_S`); an engine
# that is killed by hand has as a rule led for longer than this, and what it leaves is worth believing.
BELIEF_S = 1.0

log = logging.getLogger("holdfast.engine")


class Match(Enum):
    """How a token compares with the known one."""

    SAME = "same"
    NEAR = "near"  # another, about as likely: what rounds otherwise may say either
    OTHER = "other"


def match(expected: int, token: int, logprobs: TokenLogprobs | None, tolerance_nats: float) -> Match:
    """Compare one token of an answer with the known one; `logprobs`: what this engine says of that place."""
    if token == expected:
        return Match.SAME
    likely = dict(logprobs.top).get(expected) if logprobs is not None else None
    near = likely is not None and logprobs is not None and logprobs.logprob - likely < tolerance_nats
    return Match.NEAR if near else Match.OTHER


@dataclass(frozen=True, slots=True)
class Canary:
    """A request whose answer is known: greedy, short, and the same on every engine of these weights."""

    request: GenerateRequest
    tokens: tuple[int, ...]
    known_from: str = ""  # the file the answer is written down in; empty: it follows from the weights
    # Another token within so many nats of the known one is no wrong answer, if `request` asks for logprobs; 0: it is.
    tolerance_nats: float = 0.0

    @property
    def suspects(self) -> str:
        """What is to blame for a wrong answer."""
        if not self.known_from:
            return "these weights or this device make other tokens"
        return f"{self.known_from} has another for such an engine; the weights, the device or that file is damaged"

    def fits(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> bool:
        """Return whether a whole answer may be taken for the known one."""
        for expected, token, said in zip_longest(self.tokens, tokens, logprobs[: len(tokens)]):
            if expected is None or token is None:
                return False
            how = match(expected, token, said, self.tolerance_nats)
            if how is not Match.SAME:
                return how is Match.NEAR
        return True


class Stage(Enum):
    """Where a leadership is with its proof."""

    NONE = "none"  # no proof is under way
    ASKED = "asked"
    DOUBTED = "doubted"  # the answer was wrong: to be asked again
    ASKED_AGAIN = "asked again"
    DISPROVED = "disproved"  # wrong again
    RIGHT = "right"  # the word is given, or to come


class Proving:
    """`begin`, `judge` while `under_way`, `end`; any number of times. `passed` gives the word."""

    def __init__(self, passed: Callable[[], None], belief_s: float = BELIEF_S) -> None:
        self._passed = passed
        self._belief_s = belief_s
        self._earliest_s = 0.0
        self._timer: asyncio.TimerHandle | None = None  # the canary was right, the word is to come
        self._held: list[Output] = []  # said while nothing may be sent
        self._canary: Canary | None = None
        self._left: list[int] = []  # of the canary's tokens, those not seen yet
        self.stage = Stage.NONE
        self.over = False  # the word was given

    @property
    def under_way(self) -> bool:
        return self.stage not in (Stage.NONE, Stage.RIGHT)

    def begin(self, canary: Canary) -> None:
        """The question is asked; the second time, after a wrong answer, everything waits for the whole answer."""
        if self.stage is Stage.DOUBTED:
            self.stage = Stage.ASKED_AGAIN
        else:
            self._earliest_s = asyncio.get_running_loop().time() + self._belief_s
            self.stage, self.over = Stage.ASKED, False
        self._canary, self._left = canary, list(canary.tokens)

    def judge(self, outputs: list[Output]) -> list[Output]:
        """Return what may be sent now, which is never the canary's. `stage` says what its answer was."""
        for output in outputs:
            if output.stream == CANARY and self.stage in (Stage.ASKED, Stage.ASKED_AGAIN):
                self._hear(output)
        self._held += [output for output in outputs if output.stream != CANARY]
        began = self.stage is Stage.ASKED and self._canary is not None and len(self._left) < len(self._canary.tokens)
        if not began and self.under_way:
            return []
        said, self._held = self._held, []
        return said

    def _hear(self, output: Output) -> None:
        assert self._canary is not None, "begin first"
        if output.failure is not None or len(output.tokens) > len(self._left):
            self.miss()
            return
        for place, token in enumerate(output.tokens):
            logprobs = output.logprobs[place] if output.logprobs else None
            how = match(self._left.pop(0), token, logprobs, self._canary.tolerance_nats)
            if how is Match.OTHER:
                self.miss()
                return
            if how is Match.NEAR:
                log.info("the canary's answer differs where two tokens are about as likely: it counts as right")
                self._left.clear()
                break
        if self._left and output.finish is not None:
            self.miss()  # an answer that ends too soon: without this, everything would wait for the rest of it
        elif not self._left:
            self.stage = Stage.RIGHT
            self._timer = asyncio.get_running_loop().call_at(self._earliest_s, self._give_word)

    def miss(self) -> None:
        """The answer was wrong, or there is none."""
        self.stage = Stage.DISPROVED if self.stage is Stage.ASKED_AGAIN else Stage.DOUBTED
        self._left.clear()

    def release(self) -> list[Output]:
        """Serve on without a proof: return what was held. No word is given for this leadership."""
        self.stage = Stage.NONE
        said, self._held = self._held, []
        return said

    def end(self, *, alive: bool) -> None:
        """The leadership is over. `alive`: as planned, so nothing that was taken over has killed anybody."""
        timer, self._timer = self._timer, None
        self.stage, self._left, self._held = Stage.NONE, [], []
        if timer is not None:
            timer.cancel()
            if alive:
                self._passed()

    def _give_word(self) -> None:
        self._timer = None
        self._passed()
        self.over = True
