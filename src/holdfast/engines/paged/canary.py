"""Runs a canary: a fixed prompt, alone, in private blocks.

Always true: it writes private blocks only, so a standby may run it while an owner serves. It can be dropped between two
steps, so a takeover waits for at most one of its steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from holdfast.core.requests import GenerateRequest, Sampling, TokenLogprobs
from holdfast.engines.paged.blocks import PrivateBlocks
from holdfast.engines.paged.scheduler import Scheduler, SchedulerSettings
from holdfast.engines.paged.sequences import StepPlan

PROMPT_TOKENS = 24  # more than a block of 16: a block is filled
TOKENS = 8

# Computes a planned step; returns tokens by stream, and the logprobs that were asked for.
Compute: TypeAlias = Callable[[StepPlan], tuple[Mapping[int, int], Mapping[int, TokenLogprobs]]]


def canary_request(vocabulary: int) -> GenerateRequest:
    prompt = [(7919 * index + 1009) % vocabulary for index in range(PROMPT_TOKENS)]
    return GenerateRequest("canary", prompt, len(prompt), Sampling(TOKENS, 0, temperature=0.0, ignore_eos=True))


def canary_scheduler(settings: SchedulerSettings, blocks: range, block_tokens: int, *, filled: bool) -> Scheduler:
    """Return a scheduler for one canary. Each token of its answer is drawn by a step of one position, so that all runs
    use the same shapes. `filled`: an earlier run's KV of the prompt is still there, so only these steps are needed."""
    settings = replace(settings, concurrency=1, step_tokens_max=PROMPT_TOKENS - 1)
    return Scheduler(settings, PrivateBlocks(blocks, block_tokens, PROMPT_TOKENS - 1 if filled else 0))


class Dropped(Exception):
    """Raised when a check is dropped between two steps; it says nothing about the engine."""


def canary_steps(
    request: GenerateRequest,
    settings: SchedulerSettings,
    compute: Compute,
    blocks: range,
    block_tokens: int,
    dropped: Callable[[], bool],
) -> Iterator[tuple[int, ...]]:
    """Make the canary's steps one by one; after each, yield the tokens of its answer so far. Raise Dropped if
    `dropped()` is true after a step."""
    scheduler = canary_scheduler(settings, blocks, block_tokens, filled=False)
    scheduler.submit(0, request)
    tokens: tuple[int, ...] = ()
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.retire(plan, *compute(plan)):
            tokens += tuple(output.tokens)
        yield tokens
        if dropped():
            raise Dropped


async def run_canary_in_loop(steps: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
    """Make the steps in the event loop, which runs other tasks between them; return the whole answer."""
    made: tuple[int, ...] = ()
    for tokens in steps:
        made = tokens
        await asyncio.sleep(0)
    return made
