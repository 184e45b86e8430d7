"""A canary's run: a fixed prompt, alone, in private blocks.

Always true: it writes private blocks only, so a standby may run it beside an owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from holdfast.core.requests import GenerateRequest, Sampling, TokenLogprobs
from holdfast.engines.paged.blocks import PrivateBlocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.paged.settings import SchedulerSettings

PROMPT_TOKENS = 24  # more than a block of 16: a block is filled
TOKENS = 8

# What makes a plan's step: tokens by stream, and the logprobs that were asked for.
Compute: TypeAlias = Callable[[StepPlan], tuple[Mapping[int, int], Mapping[int, TokenLogprobs]]]


def canary_request(vocabulary: int) -> GenerateRequest:
    prompt = [(7919 * place + 1009) % vocabulary for place in range(PROMPT_TOKENS)]
    return GenerateRequest("canary", prompt, len(prompt), Sampling(TOKENS, 0, temperature=0.0, ignore_eos=True))


def canary_scheduler(settings: SchedulerSettings, blocks: range, block_tokens: int, *, filled: bool) -> Scheduler:
    """For one canary. Every token of its answer is drawn by a step of one position, so that all runs draw by the same
    shapes; `filled`: an earlier run's KV of the prompt is still there, and those are all the steps there are."""
    settings = replace(settings, concurrency=1, step_tokens_max=PROMPT_TOKENS - 1)
    return Scheduler(settings, PrivateBlocks(blocks, block_tokens, PROMPT_TOKENS - 1 if filled else 0))


def run_canary(
    request: GenerateRequest, settings: SchedulerSettings, compute: Compute, blocks: range, block_tokens: int
) -> tuple[int, ...]:
    scheduler = canary_scheduler(settings, blocks, block_tokens, filled=False)
    scheduler.submit(0, request)
    tokens: list[int] = []
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.retire(plan, *compute(plan)):
            tokens += output.tokens
    return tuple(tokens)
