"""The sim engine beyond the engine contract (test_engine_contract.py): its very tokens, its pace, its timers."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from engine_rig import request
from sim_rig import FAST, expected, rig

from holdfast.engines.sim import EOS_TOKEN_ID
from holdfast.spec.engines import SimSettings


async def test_batch_gives_each_stream_its_own_tokens() -> None:
    """Streams run together make what each makes alone, one output per stream and step, in one call per step."""
    async with rig(**FAST) as r:
        asked = {n: request([100 + n, 200], 40, top_logprobs=2 if n % 3 == 0 else None) for n in range(16)}
        for number, each in asked.items():
            r.engine.submit(number, each)
        await r.until(lambda: r.ended(*asked))
        for number, each in asked.items():
            assert r.tokens(number) == expected(each, 40)
            assert [output.finish for output in r.of(number)] == [None] * 39 + ["length"]
            assert all((output.logprobs is not None) == (number % 3 == 0) for output in r.of(number))
        assert len(r.batches) == 40
        assert all(len(batch) == 16 for batch in r.batches)


async def test_the_end_of_a_turn_ends_a_stream_and_is_included() -> None:
    """The end of the turn is the last id of a stream that finishes with "stop"."""
    async with rig(**FAST) as r:
        await r.run({2: request([5, 6, 7], 5000, ignore_eos=False)})
        assert r.tokens(2).index(EOS_TOKEN_ID) == len(r.tokens(2)) - 1
        assert r.of(2)[-1].finish == "stop"


async def test_pace_of_first_and_later_tokens() -> None:
    """On an idle engine the first token comes ttft after the request, later ones a step each; never sooner."""
    async with rig(ttft_ms=60, tpot_ms=20, jitter=0.0) as r:
        loop = asyncio.get_running_loop()
        times: list[float] = []
        r.on_batch = lambda outputs: times.append(loop.time())
        started = loop.time()
        r.engine.submit(1, request([1], 8))
        assert r.engine.progress().budget_ms >= 60
        await r.until(lambda: r.ended(1))
        for number, time in enumerate(times):  # a late step may be followed at once by the next, never by two
            assert time - started >= 0.06 + number * 0.02 - 0.001
        progress = r.engine.progress()
        assert progress.steps == 8
        assert progress.step_ms_p99 >= 17  # 140 ms over 8 steps: some step took at least that
        assert progress.budget_ms == 0
        assert progress.thread == (os.getpid(), threading.get_native_id())


async def test_first_token_does_not_wait_for_a_grid() -> None:
    """With a step of a minute, an idle engine's first token still comes after ttft."""
    async with rig(ttft_ms=5, tpot_ms=60_000, jitter=0.1) as r:
        r.engine.submit(1, request([1], 5))
        await r.until(lambda: len(r.tokens(1)) == 1)
        r.engine.cancel(1)
        r.engine.submit(2, request([2], 5))
        await r.until(lambda: len(r.tokens(2)) == 1)


async def test_idle_engine_arms_nothing() -> None:
    """Without streams there is no timer, at the start, after a stream's end and after a cancel."""
    async with rig(**FAST) as r:
        assert r.engine._timer is None
        r.engine.submit(1, request([1], 5))
        await r.until(lambda: r.ended(1))
        await asyncio.sleep(0)
        assert r.engine._timer is None
        r.engine.submit(2, request([1], 5))
        r.engine.cancel(2)
        assert r.engine._timer is None


@pytest.mark.parametrize("field", ["ttft_ms", "kv_blocks", "jitter"])
def test_settings_name_a_bad_field(field: str) -> None:
    """A negative setting is refused with its name."""
    with pytest.raises(ValueError, match=field):
        SimSettings(**{field: -1})
