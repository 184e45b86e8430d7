"""The sim engine's faults: what each does to running streams, and that clearing undoes it."""

from __future__ import annotations

import asyncio
import math

import pytest
from engine_rig import request
from sim_rig import FAST, expected, rig

from holdfast.core.errors import Code, HoldfastError
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.vocabulary import load


async def test_wedge_stops_steps_until_cleared() -> None:
    """A wedged engine takes requests and makes no step; cleared, it goes on with the right tokens."""
    async with rig(**FAST) as r:
        asked = request([1], 400)
        r.engine.submit(1, asked)
        await r.until(lambda: len(r.tokens(1)) >= 5)
        r.fault(fault="wedge")
        r.engine.submit(2, request([2], 10))
        r.engine.submit(3, request([2], 0))
        steps = r.engine.progress().steps
        assert r.engine._timer is None
        for _ in range(20):
            await asyncio.sleep(0)
        assert r.engine.progress().steps == steps
        assert r.engine.progress().running == 2
        assert not r.ended(3)
        r.fault(fault="clear")
        await r.until(lambda: r.ended(1, 2, 3))
        assert r.tokens(1) == expected(asked, 400)


async def test_slow_and_clear() -> None:
    """A slow factor stretches steps, and clearing it does not wait for the slow step's end."""
    async with rig(ttft_ms=1, tpot_ms=1, jitter=0.0) as r:
        loop = asyncio.get_running_loop()
        r.engine.submit(1, request([1], 1000))
        await r.until(lambda: len(r.tokens(1)) >= 2)
        r.fault(fault="slow", factor=30)
        count = len(r.tokens(1))
        await r.until(lambda: len(r.tokens(1)) > count)
        started = loop.time()
        await r.until(lambda: len(r.tokens(1)) > count + 3)
        assert loop.time() - started >= 0.075
        r.fault(fault="slow", factor=10_000)
        count = len(r.tokens(1))
        await r.until(lambda: len(r.tokens(1)) > count)
        r.fault(fault="clear")
        await r.until(lambda: len(r.tokens(1)) > count + 10)


async def test_wrong_tokens_and_drift() -> None:
    """Both faults show in the output and are gone once cleared."""
    async with rig(**FAST) as r:
        r.fault(fault="wrong_tokens")
        asked = request([1], 10)
        r.engine.submit(1, asked)
        await r.until(lambda: r.ended(1))
        assert r.tokens(1)[0] != expected(asked, 1)[0]
        r.fault(fault="clear")
        r.fault(fault="drift_logprobs", by=0.25)
        r.engine.submit(2, request([1], 10, top_logprobs=0))
        await r.until(lambda: r.ended(2))
        assert r.tokens(2) == expected(asked, 10)
        sequence = Sequence(load(), [1], 1, request([1], 10, top_logprobs=0).sampling)
        sequence.advance()
        logprobs = r.of(2)[0].logprobs
        assert sequence.logprobs is not None
        assert logprobs is not None
        assert math.isclose(sequence.logprobs.logprob - logprobs[0].logprob, 0.25)


async def test_cut_drops_running_streams_without_an_end() -> None:
    """Cut streams get no last output and are reported closed; those that waited run on."""
    async with rig(**FAST, concurrency=2) as r:
        for number in range(3):
            r.engine.submit(number, request([number + 1], 200))
        await r.until(lambda: len(r.tokens(0)) >= 5)
        r.fault(fault="cut")
        assert r.lost == [0, 1]
        await r.until(lambda: r.ended(2))
        assert not r.ended(0)
        assert not r.ended(1)


async def test_error_after_n_tokens() -> None:
    """Each running stream makes N more tokens and then fails as EngineShutdown; later streams are spared."""
    async with rig(**FAST) as r:
        for number in range(3):
            r.engine.submit(number, request([number + 1], 2000))
        await r.until(lambda: len(r.tokens(0)) >= 5)
        before = len(r.tokens(0))
        r.fault(fault="error_after", tokens=4)
        r.engine.submit(9, request([9], 20))
        await r.until(lambda: r.ended(0, 1, 2, 9))
        for number in range(3):
            last = r.of(number)[-1]
            assert last.failure is not None
            assert (last.failure.code, last.tokens) == (Code.ENGINE_SHUTDOWN, [])
            assert len(r.tokens(number)) == before + 4
        assert r.of(9)[-1].finish == "length"


async def test_reset_needs_the_workers_hook() -> None:
    """Reset calls what the worker installed, and says so when there is nothing."""
    async with rig(**FAST) as r:
        with pytest.raises(HoldfastError, match="reset"):
            r.fault(fault="reset")
        called: list[bool] = []
        r.engine.faults.on_reset = lambda: called.append(True)
        r.fault(fault="reset")
        assert called == [True]
