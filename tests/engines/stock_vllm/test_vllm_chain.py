"""vLLM engines killed one after the other under streams, greedy and seeded: what clients have in the end is what an
engine says that nobody kills."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.core.tasks import beside
from tests.rigs.engines.any_engine import Child, Vault
from tests.rigs.engines.vllm_models import made

pytest.importorskip("vllm.version", reason="vllm is not installed here: make test-vllm")
pytestmark = pytest.mark.processes

BLOCK = 32
TOKENS = 160
KILLS = 2  # each is followed by another engine's start, of some 20 s
FIRST_EPOCH = 100


@dataclass
class Asked:
    """One stream: what is asked, and what its client has so far."""

    prompt: list[int]
    sampling: dict[str, Any]
    said: list[int] = field(default_factory=list)

    async def submit(self, engine: Child, number: int) -> None:
        tokens = self.prompt + self.said
        await engine.submit(number, tokens, TOKENS, prompt_len=len(self.prompt), **self.sampling)


def streams() -> dict[int, Asked]:
    rng = random.Random(4)
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 11, "top_k": 40},
        {"temperature": 1.0, "seed": 12, "top_p": 0.9, "frequency_penalty": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ]
    return {
        number: Asked([rng.randrange(2, 1000) for _ in range(20 + 17 * number)], samplings[number % len(samplings)])
        for number in range(1, 9)
    }


async def unbroken(family: str, asked: dict[int, Asked]) -> dict[int, list[int]]:
    with Vault() as vault:
        async with vault.engine(0, "vllm", family=family) as engine:
            await engine.do("wake", epoch=FIRST_EPOCH)
            await go_on(engine, asked)
            await engine.until(lambda: engine.finished.keys() >= asked.keys())
            return {number: engine.said[number] for number in asked}


async def go_on(engine: Child, asked: dict[int, Asked]) -> None:
    for number, each in asked.items():
        await each.submit(engine, number)


async def all_said(engine: Child, asked: dict[int, Asked], count: int) -> None:
    await engine.until(lambda: all(len(engine.said.get(number, ())) >= count for number in asked))


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.long)])
async def test_streams_outlive_a_chain_of_engines(family: str, vault: Vault) -> None:
    """Each engine is killed in the middle of every stream; its standby adopts what was whole, and less than a block of
    any stream is computed again. Nothing is lost or said twice, and every token is the unbroken run's."""
    made(family)
    asked, rng = streams(), random.Random(5)
    async with beside(unbroken(family, streams()), "the unbroken run") as right, AsyncExitStack() as engines:
        pair = vault.pair("vllm", slow=True, family=family)
        active, standby = await engines.enter_async_context(pair)
        await active.do("wake", epoch=FIRST_EPOCH)
        for kill in range(1, KILLS + 1):
            await go_on(active, asked)
            await active.do("vouch")
            await all_said(active, asked, rng.randrange(10, 40))
            await active.kill()
            for number, each in asked.items():
                each.said += active.said[number]
            woken = await standby.do("wake", epoch=FIRST_EPOCH + kill)
            assert woken["reason"] == ""
            active = standby
            if kill < KILLS:
                following = vault.engine((kill + 1) % 2, "vllm", slow=True, family=family)
                standby = await engines.enter_async_context(following)
        await go_on(active, asked)
        await active.until(lambda: active.finished.keys() >= asked.keys())
        facts = await active.do("facts")
        assert {number: each.said + active.said[number] for number, each in asked.items()} == await right
    assert facts["resumed"] == len(asked)
    assert facts["recomputed"] <= BLOCK
