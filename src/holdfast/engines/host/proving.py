"""The canary of an engine, and the proof after a takeover that the adopted KV is right.

- The canary runs in the first batch, or in steps without other streams if the engine's rounding depends on the batch.
- Streams' tokens are held until the canary's first token was right. A stream with adopted KV has less to compute than
  the canary, and may be some tokens ahead of it.
- After a wrong answer the canary runs again, and all output is held until that answer is known.
- After a second wrong answer the engine is disproved: output is held until the worker ends the engine or calls
  `release`.
- If answers may round (`tolerance_nats`), a token about as likely as the known one counts as right. The tokens after it
  cannot be compared, so the canary ends there.

A right answer alone does not clear the adopted KV: a request or a damaged block that kills engines may need more steps
than the canary has. So the adoption is declared good no earlier than `BELIEF_S` after the takeover, if the engine still
lives. If it dies before, the next owner starts with an empty pool; if that one dies too, the next reloads the weights.

Always true: no stream's token is sent before the canary's first token was right, or between a wrong answer and a right
one, unless `release` was called. An adoption is declared good at most once per leadership, after the whole canary, and
never after `end` or `release`.
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
# Tolerance for answers that may round: between batches bf16 moves a token's log-probability by tenths of a nat, damage
# moves it by several. The control plane chooses its questions by the same margin.
TOLERANCE_NATS = 1.0
# A request that kills engines does so within 0.2 s, or is tried alone later (`routing.table.YOUNG_S`). An engine killed
# by hand has usually led for longer than this, and its KV is worth adopting.
BELIEF_S = 1.0

log = logging.getLogger("holdfast.engine")


class Match(Enum):
    SAME = "same"
    NEAR = "near"  # another token, about as likely: different rounding may choose either
    OTHER = "other"


def match(expected: int, token: int, logprobs: TokenLogprobs | None, tolerance_nats: float) -> Match:
    """Compare one token of an answer with the known one; `logprobs`: the engine's, at that position."""
    if token == expected:
        return Match.SAME
    likely = dict(logprobs.top).get(expected) if logprobs is not None else None
    near = likely is not None and logprobs is not None and logprobs.logprob - likely < tolerance_nats
    return Match.NEAR if near else Match.OTHER


@dataclass(frozen=True, slots=True)
class Canary:
    """A request with a known answer: greedy, short, and the same on every engine with these weights."""

    request: GenerateRequest
    tokens: tuple[int, ...]
    known_from: str = ""  # the file that holds the answer; empty: it follows from the weights
    # Another token within so many nats of the known one counts as right, if `request` asks for logprobs; 0: never.
    tolerance_nats: float = 0.0

    @property
    def suspects(self) -> str:
        if not self.known_from:
            return "these weights or this device make other tokens"
        return f"{self.known_from} has another for such an engine; the weights, the device or that file is damaged"

    def fits(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> bool:
        """Return True if a whole answer counts as the known one."""
        for expected, token, said in zip_longest(self.tokens, tokens, logprobs[: len(tokens)]):
            if expected is None or token is None:
                return False
            how = match(expected, token, said, self.tolerance_nats)
            if how is not Match.SAME:
                return how is Match.NEAR
        return True


class Stage(Enum):
    NONE = "none"  # no proof is under way
    ASKED = "asked"
    DOUBTED = "doubted"  # the answer was wrong: the canary must run again
    ASKED_AGAIN = "asked again"
    DISPROVED = "disproved"  # wrong again
    RIGHT = "right"  # `passed` was called, or its timer runs


class Proving:
    """The proof of each takeover: `begin`, `filter_outputs` while `under_way`, `end`; any number of times. Calls
    `passed` to declare the adoption good."""

    def __init__(self, passed: Callable[[], None], belief_s: float = BELIEF_S) -> None:
        self._passed = passed
        self._belief_s = belief_s
        self._earliest_s = 0.0
        self._timer: asyncio.TimerHandle | None = None  # runs from a right answer until `passed` is called
        self._held: list[Output] = []  # output made while none may be sent
        self._canary: Canary | None = None
        self._left: list[int] = []  # the canary's tokens that the engine has yet to make
        self.stage = Stage.NONE
        self.over = False  # `passed` was called

    @property
    def under_way(self) -> bool:
        return self.stage not in (Stage.NONE, Stage.RIGHT)

    def begin(self, canary: Canary) -> None:
        """Note that the canary was submitted. After a wrong answer, all output waits for the whole second answer."""
        if self.stage is Stage.DOUBTED:
            self.stage = Stage.ASKED_AGAIN
        else:
            self._earliest_s = asyncio.get_running_loop().time() + self._belief_s
            self.stage, self.over = Stage.ASKED, False
        self._canary, self._left = canary, list(canary.tokens)

    def filter_outputs(self, outputs: list[Output]) -> list[Output]:
        """Return the outputs that may be sent now, never the canary's. `stage` tells how the canary did."""
        for output in outputs:
            if output.stream == CANARY and self.stage in (Stage.ASKED, Stage.ASKED_AGAIN):
                self._on_canary(output)
        self._held += [output for output in outputs if output.stream != CANARY]
        began = self.stage is Stage.ASKED and self._canary is not None and len(self._left) < len(self._canary.tokens)
        if not began and self.under_way:
            return []
        said, self._held = self._held, []
        return said

    def _on_canary(self, output: Output) -> None:
        assert self._canary is not None, "begin first"
        if output.failure is not None or len(output.tokens) > len(self._left):
            self.miss()
            return
        for index, token in enumerate(output.tokens):
            logprobs = output.logprobs[index] if output.logprobs else None
            how = match(self._left.pop(0), token, logprobs, self._canary.tolerance_nats)
            if how is Match.OTHER:
                self.miss()
                return
            if how is Match.NEAR:
                log.info("the canary's answer differs where two tokens are about as likely: it counts as right")
                self._left.clear()
                break
        if self._left and output.finish is not None:
            self.miss()  # the answer ended too soon: without this, all output would wait forever
        elif not self._left:
            self.stage = Stage.RIGHT
            self._timer = asyncio.get_running_loop().call_at(self._earliest_s, self._give_word)

    def miss(self) -> None:
        """Note that the answer was wrong, or that there is none."""
        self.stage = Stage.DISPROVED if self.stage is Stage.ASKED_AGAIN else Stage.DOUBTED
        self._left.clear()

    def release(self) -> list[Output]:
        """Serve on without a proof: return the held outputs. This leadership's adoption is never declared good."""
        self.stage = Stage.NONE
        said, self._held = self._held, []
        return said

    def end(self, *, alive: bool) -> None:
        """End the leadership. `alive`: the end is planned, so the adopted KV has not killed the engine."""
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
