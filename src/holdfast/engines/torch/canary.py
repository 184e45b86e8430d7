"""The torch engine's canary: a fixed prompt, alone, in private blocks, and what it was answered the first time.

Always true: it writes private blocks only, so a standby may run it beside an owner; the answer that counts is that of
the first engine with these weights and this arithmetic on this machine.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.kv_blocks import PrivateBlocks
from holdfast.engines.torch.scheduler import Scheduler, SchedulerSettings

PROMPT_TOKENS = 24
TOKENS = 8


def canary_request(vocabulary: int) -> GenerateRequest:
    prompt = [(7919 * place + 1009) % vocabulary for place in range(PROMPT_TOKENS)]
    return GenerateRequest("canary", prompt, len(prompt), Sampling(TOKENS, 0, temperature=0.0, ignore_eos=True))


def private_blocks(block_tokens: int) -> int:
    """Three more than its text needs: the slab need not start or end at a whole block, and the last one is filler."""
    return -(-(PROMPT_TOKENS + TOKENS) // block_tokens) + 3


def canary_scheduler(settings: SchedulerSettings, blocks: range, block_tokens: int, *, filled: bool) -> Scheduler:
    """For one canary. Every token of its answer is drawn by a step of one position, so that all runs draw by the same
    shapes; `filled`: an earlier run's KV of the prompt is still there, and those are all the steps there are."""
    settings = replace(settings, concurrency=1, step_tokens_max=PROMPT_TOKENS - 1)
    return Scheduler(settings, PrivateBlocks(blocks, block_tokens, PROMPT_TOKENS - 1 if filled else 0))


def run_canary(
    request: GenerateRequest, settings: SchedulerSettings, computer: Computer, blocks: range, block_tokens: int
) -> tuple[int, ...]:
    scheduler = canary_scheduler(settings, blocks, block_tokens, filled=False)
    scheduler.submit(0, request)
    tokens: list[int] = []
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.retire(plan, *computer.compute(plan)):
            tokens += output.tokens
    return tuple(tokens)


def known_answer(folder: Path, kind: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """What the first engine of this kind answered; `tokens`, if this is the first."""
    path = folder / "canaries.json"
    known: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
    if kind not in known:
        known[kind] = list(tokens)
        whole = path.with_name(f".canaries.{os.getpid()}")
        whole.write_text(json.dumps(known))
        whole.replace(path)
    return tuple(known[kind])
