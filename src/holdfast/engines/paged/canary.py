"""A canary's run: a fixed prompt, alone, in private blocks.

Always true: it writes private blocks only, so a standby may run it beside an owner; between two of its steps it can be
dropped, so that a takeover waits for one step of it at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
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


class Dropped(Exception):
    """A check was dropped between two of its steps: it says nothing about the engine."""


def canary_steps(
    request: GenerateRequest, settings: SchedulerSettings, compute: Compute, blocks: range, block_tokens: int
) -> Iterator[tuple[int, ...]]:
    """Make the canary's steps one by one; after each, yield the tokens of its answer so far."""
    scheduler = canary_scheduler(settings, blocks, block_tokens, filled=False)
    scheduler.submit(0, request)
    tokens: tuple[int, ...] = ()
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.retire(plan, *compute(plan)):
            tokens += tuple(output.tokens)
        yield tokens


def run_canary(steps: Iterator[tuple[int, ...]], dropped: Callable[[], bool]) -> tuple[int, ...]:
    """Return the whole answer. Raise Dropped as soon as `dropped` says so, asked after each step."""
    made: tuple[int, ...] = ()
    for tokens in steps:
        made = tokens
        if dropped():
            raise Dropped
    return made


async def run_canary_in_loop(steps: Iterator[tuple[int, ...]], dropped: Callable[[], bool]) -> tuple[int, ...]:
    """As `run_canary`, where steps are made in the event loop: everything else there has its turn between two."""
    made: tuple[int, ...] = ()
    for tokens in steps:
        made = tokens
        await asyncio.sleep(0)
        if dropped():
            raise Dropped
    return made
