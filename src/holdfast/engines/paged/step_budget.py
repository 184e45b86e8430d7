"""How long a step may take before it counts as stuck, said before it begins. Pure.

The theory: a decode is judged by the decodes before it, which the judge has anyway; a step with a piece of a prompt may
take far longer, and how long follows from the positions in its plan and from what such steps took here lately. Before
any was seen nothing is known, and all the time there may be is granted. Always true: a plan's budget depends on the
plan itself, never on what is left to do after it; of a step with fewer positions than one that was seen no less is
granted than for that one, of one with more as much more; errands between two steps (a canary, kernels that compile) are
granted all, and what one took is granted again to the step after it, which has been waited for as long. On a GPU the
first steps that draw tokens in a way that is new to this process may compile kernels, and are granted that time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from typing import Protocol

from holdfast.core.requests import Sampling

STEP_MS_MAX = 60_000.0  # the longest step there may be: a full one of a prompt, exact, on a small CPU
MARGIN = 30.0  # over what was seen, as the judge has it over a step's p99
ERRAND_MS_MAX = 600_000.0  # as for a load: kernels may compile in it
LEAST_MS = 1000.0  # and as the judge has it, at least
SEEN = 32  # steps with chunks: enough to have the large ones among them
# A sampling kernel of vLLM's took 6.4 s to compile on an H200 while three engines started beside it; a watchdog that
# allowed 1 s killed a new leader in it.
COMPILE_MS = 30_000.0
COMPILE_STEPS = 64  # from a request's arrival: its prompt's chunks come before its first token is drawn


class Planned(Protocol):
    """A step that is about to be made."""

    @property
    def token_count(self) -> int:
        """Positions that it computes."""

    @property
    def segments(self) -> Sized:
        """The streams' pieces: as many as positions, if each is one token."""


class StepBudget:
    """What steps with chunks took, and what the next ones may."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=SEEN)  # positions, milliseconds
        self._owed_ms = 0.0  # what an errand took since the last step
        self._drawn: set[str] = set()  # the ways of drawing that requests have asked for
        self._compile_steps = 0  # steps left in which kernels may compile

    def meets(self, sampling: Sampling) -> None:
        """A request came, on a device whose kernels are compiled at their first use."""
        new = ways_of(sampling) - self._drawn
        if new:
            self._drawn |= new
            self._compile_steps = COMPILE_STEPS

    def of(self, plan: Planned) -> float:
        """Milliseconds; 0: the judge's own bound will do."""
        budget_ms = self._of_chunks(plan.token_count) if has_chunk(plan) else 0.0
        budget_ms = max(budget_ms, COMPILE_MS) if self._compile_steps else budget_ms
        return budget_ms if not self._owed_ms else self._owed_ms + max(budget_ms, LEAST_MS)

    def _of_chunks(self, positions: int) -> float:
        if not self._seen:
            return STEP_MS_MAX
        slowest_ms = max(took_ms * max(1.0, positions / count) for count, took_ms in self._seen)
        return min(STEP_MS_MAX, max(LEAST_MS, MARGIN * slowest_ms))

    def took(self, plan: Planned, took_ms: float) -> None:
        """A step is over."""
        self._owed_ms = 0.0
        self._compile_steps = max(0, self._compile_steps - 1)
        if has_chunk(plan):
            self._seen.append((plan.token_count, took_ms))

    def errand_took(self, took_ms: float) -> float:
        """Something else is over; what may pass from its begin until the next step begins."""
        self._owed_ms += took_ms
        return self._owed_ms + LEAST_MS


def ways_of(sampling: Sampling) -> set[str]:
    """Return the parts of sampling that a request uses, each with kernels of its own."""
    used = {
        "greedy": sampling.temperature == 0.0,
        "random": sampling.temperature > 0.0,
        "top_p": sampling.top_p < 1.0,
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p > 0.0,
        "penalties": (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1),
        "logit_bias": bool(sampling.logit_bias),
        "logprobs": sampling.top_logprobs is not None,
        "min_tokens": sampling.min_tokens > 0,
    }
    return {way for way, is_used in used.items() if is_used}


def has_chunk(plan: Planned) -> bool:
    """By all segments: a text with one position left may stand behind another's chunk."""
    return plan.token_count > len(plan.segments)
