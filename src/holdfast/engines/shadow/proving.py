"""The known question of an engine, and the first moments of a leadership, in which it shows that what it took over is
right.

The question rides in the first batch, or in steps of its own between the others'. A wrong token of it means that nobody
may be sent anything; until its first one was seen, others' tokens wait here: a stream whose KV was taken over has less
to compute than the canary, and may be quicker than it by some tokens. All of them right is not yet a word for the next
adopter: what kills an engine, a request or a damaged block, needs some steps to do it, and the canary's few may be over
first. So the word is given `BELIEF_S` after the takeover at the earliest, by whoever still lives then. A death before
it makes the next adopter start with an empty pool, another one reload the weights.

Always true: nobody's token leaves here before the canary's first one was right; the word is given at most once per
leadership, after the whole canary, and never after `end`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.requests import GenerateRequest, Output

# The canary's stream; a worker's streams count from 1.
CANARY = 0
# A request that kills engines has done it within 0.2 s, or is tried alone later (`routing.table.YOUNG_S`); an engine
# that is killed by hand has as a rule led for longer than this, and what it leaves is worth believing.
BELIEF_S = 1.0


@dataclass(frozen=True, slots=True)
class Canary:
    """A request whose answer is known: greedy, short, and the same on every engine of these weights."""

    request: GenerateRequest
    tokens: tuple[int, ...]
    known_from: str = ""  # the file the answer is written down in; empty: it follows from the weights

    @property
    def suspects(self) -> str:
        """What is to blame for a wrong answer."""
        if not self.known_from:
            return "these weights or this device make other tokens"
        return f"{self.known_from} has another for such an engine; the weights, the device or that file is damaged"


class Proving:
    """`begin`, `judge` while `left`, `end`; any number of times. `passed` gives the word."""

    def __init__(self, passed: Callable[[], None], belief_s: float = BELIEF_S) -> None:
        self._passed = passed
        self._belief_s = belief_s
        self._earliest_s = 0.0
        self._timer: asyncio.TimerHandle | None = None  # the canary was right, the word is to come
        self._held: list[Output] = []  # said before the canary's first token
        self._whole = 0  # how many tokens the canary has
        self.left: list[int] = []  # of the canary's tokens, those not seen yet
        self.over = False  # the word was given

    def begin(self, canary: Canary) -> None:
        self._earliest_s = asyncio.get_running_loop().time() + self._belief_s
        self.left, self._whole = list(canary.tokens), len(canary.tokens)
        self.over = False

    def judge(self, outputs: list[Output]) -> list[Output] | None:
        """What may be sent now, which is never the canary's; None: its answer was wrong."""
        for output in outputs:
            if output.stream == CANARY:
                expected = self.left[: len(output.tokens)]
                del self.left[: len(output.tokens)]
                if output.failure is not None or output.tokens != expected:
                    return None
                if not self.left:
                    self._timer = asyncio.get_running_loop().call_at(self._earliest_s, self._give_word)
        self._held += [output for output in outputs if output.stream != CANARY]
        if len(self.left) == self._whole:
            return []
        said, self._held = self._held, []
        return said

    def end(self, *, alive: bool) -> None:
        """The leadership is over. `alive`: as planned, so nothing that was taken over has killed anybody."""
        timer, self._timer = self._timer, None
        self.left, self._held = [], []
        if timer is not None:
            timer.cancel()
            if alive:
                self._passed()

    def _give_word(self) -> None:
        self._timer = None
        self._passed()
        self.over = True
