"""Requests to the sim engine whose answers are known before they are asked: its language is a function of prompt and
seed, so an unbroken run is not needed to know what a broken one must say."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.core.requests import Sampling
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.vocabulary import load
from holdfast.testing.clients import Received, ask, read_answer
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread

TEMPERATURE = 0.8


def prompt(number: int) -> list[int]:
    """More than two blocks of 16, and each number's differs from the first token on."""
    return [100 + number, *range(40, 80)]


def answer_to(number: int, tokens: int) -> list[int]:
    """What an unbroken engine says."""
    sampling = Sampling(tokens, number, TEMPERATURE, ignore_eos=True)
    sequence = Sequence(load(), prompt(number), len(prompt(number)), sampling)
    return [sequence.advance() for _ in range(tokens)]


async def streams(up: Supervised, numbers: range, tokens: int) -> list[asyncio.Task[Received]]:
    """Start one of each number, and return when every one has tokens."""
    before = await in_thread(up.tokens_total)
    running = [asyncio.create_task(ask_number(up.port, number, tokens)) for number in numbers]
    enough = before + len(numbers) * 20
    await in_thread(up.wait_until, lambda: up.tokens_total() > enough, "streams under way")
    return running


async def are_unbroken(running: list[asyncio.Task[Received]], expected: dict[int, list[int]]) -> list[float]:
    """Each stream was resumed and ended as if nothing had happened; its worst gap, seconds."""
    gaps_s = []
    for number, received in enumerate(await asyncio.gather(*running)):
        answer = read_answer(received)
        assert (answer.error, answer.done, answer.exact) == (None, True, True), number
        assert answer.tokens == expected[number], number
        assert answer.resumed, "the engine died too late to mean anything"
        gaps_s.append(max(answer.gaps_s))
    return gaps_s


async def ask_number(port: int, number: int, tokens: int) -> Received:
    return await ask_tokens(port, prompt(number), number, tokens)


async def ask_tokens(port: int, asked: list[int], seed: int, tokens: int) -> Received:
    body: dict[str, Any] = {"model": "holdfast-sim", "prompt": asked, "max_tokens": tokens, "seed": seed}
    body |= {"temperature": TEMPERATURE, "stream": True, "ignore_eos": True, "return_token_ids": True}
    return await ask(port, "/v1/completions", body)
