"""Computes, before a step begins, how long it may take before the watchdog counts it as stuck. Pure.

- Decodes get no budget (0): the watchdog compares them with earlier decodes.
- A step with a chunk of a prompt may take far longer. Its budget follows from its number of positions and from the
  duration of recent steps with chunks. Before the first of these it is the maximum, `STEP_MS_MAX`.
- An errand between two steps (a canary, compiling kernels) gets `ERRAND_MS_MAX`. Its duration is added to the budget of
  the next step, which had to wait for it.
- On a GPU, the first steps that use a new way of sampling may compile kernels, and get time for that.

Always true: a budget depends on the plan itself, never on later work. A step with fewer positions than a recent one
gets no less than that one; a step with more gets proportionally more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from typing import Protocol

from holdfast.core.requests import Sampling

STEP_MS_MAX = 60_000.0  # the longest possible step: a full chunk of a prompt, exact arithmetic, on a small CPU
MARGIN = 30.0  # factor over recent durations, like the watchdog's over a step's p99
ERRAND_MS_MAX = 600_000.0  # as for a load: kernels may compile in it
LEAST_MS = 1000.0  # the smallest budget, also like the watchdog's
SEEN = 32  # recent steps with chunks: enough to include large ones
# One of vLLM's sampling kernels took 6.4 s to compile on an H200 while three other engines started; a watchdog that
# allowed 1 s killed a new leader meanwhile.
COMPILE_MS = 30_000.0
COMPILE_STEPS = 64  # from a request's arrival: its prompt's chunks come before its first token is drawn


class PlannedStep(Protocol):
    """A planned step."""

    @property
    def token_count(self) -> int:
        """Return the number of positions it computes."""

    @property
    def segments(self) -> Sized:
        """Return the streams' segments: as many as positions, if each is one token."""


class StepBudget:
    """The budgets of one engine's steps, from the durations of recent ones."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=SEEN)  # positions, milliseconds
        self._owed_ms = 0.0  # duration of the errands since the last step
        self._drawn: set[str] = set()  # the ways of sampling that requests have used
        self._compile_steps = 0  # steps left in which kernels may compile

    def note_request(self, sampling: Sampling) -> None:
        """Note a request on a device that compiles kernels at their first use."""
        new = ways_of(sampling) - self._drawn
        if new:
            self._drawn |= new
            self._compile_steps = COMPILE_STEPS

    def of(self, plan: PlannedStep) -> float:
        """Return the step's budget in milliseconds; 0 if the watchdog's own bound is enough."""
        budget_ms = self._of_chunks(plan.token_count) if has_chunk(plan) else 0.0
        budget_ms = max(budget_ms, COMPILE_MS) if self._compile_steps else budget_ms
        return budget_ms if not self._owed_ms else self._owed_ms + max(budget_ms, LEAST_MS)

    def _of_chunks(self, positions: int) -> float:
        if not self._seen:
            return STEP_MS_MAX
        slowest_ms = max(took_ms * max(1.0, positions / count) for count, took_ms in self._seen)
        return min(STEP_MS_MAX, max(LEAST_MS, MARGIN * slowest_ms))

    def took(self, plan: PlannedStep, took_ms: float) -> None:
        """Note how long a step took."""
        self._owed_ms = 0.0
        self._compile_steps = max(0, self._compile_steps - 1)
        if has_chunk(plan):
            self._seen.append((plan.token_count, took_ms))

    def errand_took(self, took_ms: float) -> float:
        """Note how long an errand took; return the time allowed from its start until the next step begins."""
        self._owed_ms += took_ms
        return self._owed_ms + LEAST_MS


def ways_of(sampling: Sampling) -> set[str]:
    """Return the parts of sampling that a request uses; each has its own kernels."""
    used = {
        "greedy": sampling.temperature == 0.0,
        "random": sampling.temperature > 0.0,
        "top_p": sampling.top_p < 1.0,
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p > 0.0,
        "penalties": sampling.has_penalties,
        "logit_bias": bool(sampling.logit_bias),
        "logprobs": sampling.top_logprobs is not None,
        "min_tokens": sampling.min_tokens > 0,
    }
    return {way for way, is_used in used.items() if is_used}


def has_chunk(plan: PlannedStep) -> bool:
    """Return True if any segment has several positions; the last segment may be a chunk of one."""
    return plan.token_count > len(plan.segments)
