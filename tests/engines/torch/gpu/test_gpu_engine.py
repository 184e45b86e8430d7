"""The torch engine on a real GPU: graphs and steps ahead change no token, and a standby's graphs survive a takeover."""

from __future__ import annotations

import pytest
import torch

from holdfast.core.requests import GenerateRequest
from tests.rigs.engines.gpu_engine import SETTINGS, Vault, awake, until
from tests.rigs.engines.torch_engine import Rig, request, rig

pytestmark = pytest.mark.gpu

TOKENS = 60


def asked(number: int, made: list[int] | None = None, **more: float) -> GenerateRequest:
    prompt = [(number * 31 + place * 7) % 5000 for place in range(20 + 37 * number)]
    more = {"seed": number, "temperature": 0.8 if number % 2 else 0.0, **more}
    return request([*prompt, *(made or [])], TOKENS, prompt_len=len(prompt), **more)


async def one_by_one(r: Rig, first: int) -> list[list[int]]:
    for number in range(1, 5):
        r.engine.submit(first + number, asked(number))
        await until(r, TOKENS, [first + number])
    return [r.tokens(first + number) for number in range(1, 5)]


async def test_graphs_and_steps_ahead_change_no_token() -> None:
    """A stream alone has the same tokens by graphs, a step ahead, as by plain steps one after the other."""
    async with awake() as r:
        assert await r.engine.check() == ""
        assert r.ready.computer.graphs is not None
        assert r.ready.computer.ahead == 1
        by_graph = await one_by_one(r, 0)
        await r.wake_again(graphs=None, ahead=0)
        assert await one_by_one(r, 10) == by_graph


async def test_streams_that_come_go_and_want_more() -> None:
    """Streams of unlike lengths, penalties and logprobs among them, all get every token; a cancelled one no more."""
    async with awake() as r:
        wants = {3: {"presence_penalty": 0.5}, 6: {"top_p": 0.9}, 9: {"top_logprobs": 2}}
        r.submit({number: asked(number, **wants.get(number, {})) for number in range(1, 13)})
        await until(r, 10, range(1, 13))
        r.engine.cancel(5)
        left = len(r.tokens(5))
        others = [number for number in range(1, 13) if number != 5]
        await r.until(lambda: r.ended(*others))
        assert [len(r.tokens(number)) for number in others] == [TOKENS] * 11
        assert not r.ended(5)
        assert len(r.tokens(5)) <= left + 2
        assert r.blocks.used == 0


async def test_a_takeover_captures_nothing() -> None:
    """What a standby captured beside a living owner serves after it: no kernel, graph or memory is made by the wake,
    and a resumed stream goes on from the blocks that are there."""
    streams = range(1, 9)
    with Vault() as vault:
        async with rig(vault, **SETTINGS) as first:
            second = Rig(vault, 1, **SETTINGS)
            await second.load()
            assert await second.engine.check() == ""
            first.submit({number: asked(number) for number in streams})
            await until(first, 30, streams)
            await first.engine.become_standby()
            said = {number: first.tokens(number)[:30] for number in streams}
            ready, before = second.ready, torch.cuda.memory_reserved()
            woken = await second.engine.wake(2000)
            assert woken.blocks > 0
            assert second.ready is ready
            second.submit({number: asked(number, said[number]) for number in streams})
            await until(second, TOKENS - 30, streams)
            assert torch.cuda.memory_reserved() == before
            assert second.engine.resumes.recomputed_tokens_max <= second.hosted.settings.block_tokens
            await second.engine.stop()
