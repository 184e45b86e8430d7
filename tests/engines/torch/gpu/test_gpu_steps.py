"""A GPU's steps under pressure: preempted for real, broken on purpose, and with streams that want more than a token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.core.requests import GenerateRequest
from holdfast.engines.paged.canary import canary_scheduler
from holdfast.engines.paged.sequences import Segment
from holdfast.engines.torch.files.resolve import TINY
from holdfast.engines.torch.gpu.graphs import GraphInputs
from holdfast.engines.torch.launched import NotFiniteError
from tests.rigs.engines.any_engine import BOUND_S
from tests.rigs.engines.gpu_engine import SETTINGS, Vault, awake, until
from tests.rigs.engines.torch_engine import doomed, request
from tests.rigs.engines.torch_graphs import counted_by_hand

pytestmark = pytest.mark.gpu

BLOCK = 16
BLOCK_GIB = 2 * TINY.layers * TINY.kv_heads * TINY.head_size * BLOCK * 2 / 2**30  # in bf16
WANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalised": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.0, "top_logprobs": 3},
    "nudged": {"temperature": 0.7, "min_tokens": 5, "logit_bias": {3: 2.0}},
}


def asked(tokens: int, max_tokens: int, seed: int, made: Sequence[int] = (), **wants: Any) -> GenerateRequest:
    prompt = [(seed // 100 * 977 + place * 7) % 5000 for place in range(tokens)]
    return request([*prompt, *made], max_tokens, prompt_len=len(prompt), seed=seed, **wants)


async def test_a_preempted_streams_tables_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool of 30 blocks streams are preempted and come back with other blocks: what lies on the device for a step
    is the step's own block tables, row by row, and every stream gets all its tokens."""
    wrong: list[str] = []
    steps = 0
    real = GraphInputs.fill_tables

    def checked(self: GraphInputs, segments: Sequence[Segment], size: int) -> None:
        nonlocal steps
        real(self, segments, size)
        steps += 1
        tables = self.tables.tolist()
        for row, segment in enumerate(segments):
            used = -(-segment.position // BLOCK)
            if tables[row][:used] != segment.blocks[:used]:
                wrong.append(f"step {steps}, row {row}: {tables[row][:used]} for {segment.blocks[:used]}")

    async with awake(kv_gib=30 * BLOCK_GIB) as r:
        monkeypatch.setattr(GraphInputs, "fill_tables", checked)
        streams = range(1, 11)
        # One prompt: what is given up is found again at once in another's blocks.
        r.submit({number: asked(70, 90, number, temperature=0.8) for number in streams})
        await until(r, 90, streams)
        assert r.scheduler.preemptions > 0
        assert steps > 90
        assert not wrong, f"{len(wrong)} wrong tables: {wrong[:3]}"


@pytest.mark.parametrize("graphs", [True, False])
async def test_numbers_that_are_not_finite_are_an_error(graphs: bool) -> None:
    """A broken number in a text's KV raises at the next step, whatever the stream wants; by graph or by hand."""
    async with awake() as r:
        ready, computer = r.ready, r.ready.computer
        assert computer.kv.shape[0] > r.hosted.geometry.block_count, "made for another range"
        assert computer.graphs is not None
        if not graphs:
            computer.graphs = None

        def broken(wants: dict[str, Any]) -> str:
            kv = computer.kv[ready.blocks.start, 1, 1, 3, 0]
            settings = r.hosted._readiness.settings_for(computer)
            scheduler = canary_scheduler(settings, ready.blocks, BLOCK, filled=False)
            scheduler.submit(0, asked(20, 8, 1, **wants))
            for _ in range(3):
                plan = scheduler.plan()
                assert plan is not None
                scheduler.retire(plan, *computer.compute(plan))
            whole = kv.clone()
            kv[0] = math.nan
            plan = scheduler.plan()
            assert plan is not None
            try:
                computer.compute(plan)
            except NotFiniteError as error:
                return str(error)
            finally:
                kv.copy_(whole)
            return "nothing was noticed"

        for name, wants in WANTS.items():
            told = await asyncio.wrap_future(r.hosted._stepper.run(lambda wants=wants: broken(wants)))
            assert "not finite" in told, f"{name}: {told}"


async def test_an_engine_whose_numbers_break_ends() -> None:
    """Two steps in flight, graphs, ten streams: the engine ends with the error's words."""
    streams = range(1, 11)
    with Vault() as vault:
        async with doomed(vault, "not finite", **SETTINGS) as r:
            wants = list(WANTS.values())
            r.submit({number: asked(40, 3000, number * 100, **wants[number % len(WANTS)]) for number in streams})
            await until(r, 20, streams)

            def work() -> str:
                block = r.scheduler.running[7].blocks[0]
                r.ready.computer.kv[block, 1, 1, 3, 0, 0] = math.nan
                return f"block {block}: {r.ready.computer.kv[block, 1, 1, 3, 0].tolist()}"

            async with asyncio.timeout(BOUND_S):
                broken = await asyncio.wrap_future(r.hosted._stepper.run(work))
            try:
                await r.until(lambda: bool(r.heard("fatal")))
            except TimeoutError:
                told = {number: len(r.tokens(number)) for number in streams}
                raise AssertionError(f"{broken}; {r.engine!r}; {told}") from None


def all_wants(first: int, tokens: int, step: int, max_tokens: int) -> dict[int, GenerateRequest]:
    """A stream for each of them, `tokens` and as often `step` more long."""
    wants = enumerate(WANTS.values(), 1)
    return {first + at: asked(tokens + step * at, max_tokens, at * 100, **each) for at, each in wants}


async def test_exact_says_the_same_in_any_batch() -> None:
    """Alone, together, or resumed in the middle: every stream's tokens are the same, whatever it wants."""
    async with awake(exact=True) as r:
        for number, each in all_wants(0, 10, 7, 30).items():
            r.engine.submit(number, each)
            await until(r, 30, [number])
        together = all_wants(20, 10, 7, 30)
        r.submit(together)
        await until(r, 30, together)
        for number, (name, wants) in enumerate(WANTS.items(), 1):
            assert r.tokens(20 + number) == r.tokens(number), name
            made = r.tokens(number)[:12]
            r.engine.submit(40 + number, asked(10 + 7 * number, 30, number * 100, made, **wants))
        await until(r, 18, [20 + number for number in together])
        for number, name in enumerate(WANTS, 1):
            assert r.tokens(40 + number) == r.tokens(number)[12:], name


async def test_streams_that_want_more_stay_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of theirs is laid out by hand, alone they say what they say without graphs, and together all get all."""
    async with awake() as r:
        by_hand = counted_by_hand(monkeypatch)
        for number, each in all_wants(0, 30, 11, 60).items():
            r.engine.submit(number, each)
            await until(r, 60, [number])
        together = all_wants(20, 30, 11, 60)
        r.submit(together)
        await until(r, 60, together)
        assert not by_hand
        logprobs = [output.logprobs for output in r.of(5)]
        assert all(each is not None and len(each) == 1 and len(each[0].top) == 3 for each in logprobs)
        await r.wake_again(graphs=None, ahead=0)
        for number, each in all_wants(40, 30, 11, 60).items():
            r.engine.submit(number, each)
            await until(r, 60, [number])
            assert r.tokens(number) == r.tokens(number - 40), each.sampling
        assert by_hand
        assert not r.lost
