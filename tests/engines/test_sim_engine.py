"""The sim engine against the engine contract: batching, limits, preemption and pace."""

from __future__ import annotations

import asyncio
import threading

import pytest
from sim_rig import FAST, expected, request, rig

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import Output
from holdfast.engines.sim import EOS_TOKEN_ID, SimSettings


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


async def test_resumed_request_continues() -> None:
    """A request that brings 25 of its 40 tokens makes the other 15."""
    async with rig(**FAST) as r:
        asked = request([5, 6, 7], 40)
        whole = expected(asked, 40)
        r.engine.submit(1, request([5, 6, 7, *whole[:25]], 40, prompt_len=3))
        await r.until(lambda: r.ended(1))
        assert r.tokens(1) == whole[25:]


async def test_nothing_left_to_make_finishes_at_once() -> None:
    """With max_tokens already there, or a full context, the answer is an empty last output, after submit returned."""
    async with rig(**FAST, context_tokens_max=64) as r:
        r.engine.submit(1, request([5, 6, 7, 8, 9], 2, prompt_len=3))
        r.engine.submit(2, request([5] * 64, 100))
        r.engine.submit(3, request([5, 6], 0))
        r.engine.submit(4, request([5, 6], 0))
        assert r.batches == []
        r.engine.cancel(4)
        await r.until(lambda: r.ended(1, 2, 3))
        assert [(output.stream, output.tokens, output.finish) for output in r.batches[0]] == [
            (number, [], "length") for number in (1, 2, 3)
        ]
        assert r.of(4) == []


async def test_stop_tokens_end_a_stream_and_are_included() -> None:
    """A stop token id, or the end of the turn, is the last id of a stream that finishes with "stop"."""
    async with rig(**FAST) as r:
        plain = request([5, 6, 7], 60, temperature=0.0)
        stop = expected(plain, 60)[9]
        first = expected(plain, 60).index(stop)
        r.engine.submit(1, request([5, 6, 7], 60, temperature=0.0, stop_token_ids=[stop]))
        r.engine.submit(2, request([5, 6, 7], 5000, ignore_eos=False))
        await r.until(lambda: r.ended(1, 2))
        assert r.tokens(1) == expected(plain, 60)[: first + 1]
        assert r.of(1)[-1].finish == "stop"
        assert r.tokens(2).index(EOS_TOKEN_ID) == len(r.tokens(2)) - 1
        assert r.of(2)[-1].finish == "stop"


async def test_cancel_silences_a_stream() -> None:
    """After cancel nothing is said of a stream, running or waiting; its place goes to the next; unknown ones pass."""
    async with rig(**FAST, concurrency=1) as r:
        for number in (1, 2, 3):
            r.engine.submit(number, request([number], 10_000 if number == 1 else 20))
        await r.until(lambda: len(r.tokens(1)) >= 3)
        r.engine.cancel(1)
        r.engine.cancel(2)
        r.engine.cancel(99)
        said = len(r.of(1))
        await r.until(lambda: r.ended(3))
        assert len(r.of(1)) == said
        assert r.of(2) == []


async def test_cancel_inside_the_sink() -> None:
    """A sink may cancel and submit: the stream is silent from there on and the engine goes on."""
    async with rig(**FAST) as r:

        def swap(outputs: list[Output]) -> None:
            r.on_batch = lambda outputs: None
            r.engine.cancel(1)
            r.engine.submit(2, request([8], 5))

        r.on_batch = swap
        r.engine.submit(1, request([7], 1000))
        await r.until(lambda: r.ended(2))
        assert len(r.of(1)) == 1
        assert r.tokens(2) == expected(request([8], 5), 5)


async def test_overload_is_refused_by_name() -> None:
    """Concurrency plus queue are taken, the next is WorkerOverloaded and leaves the others be."""
    async with rig(**FAST, concurrency=2, queue=3) as r:
        for number in range(5):
            r.engine.submit(number, request([number + 1], 10))
        assert (r.engine.progress().running, r.engine.progress().waiting) == (2, 3)
        with pytest.raises(HoldfastError) as caught:
            r.engine.submit(5, request([6], 10))
        assert caught.value.code == Code.WORKER_OVERLOADED
        await r.until(lambda: r.ended(*range(5)))
        r.engine.submit(6, request([6], 10))
        await r.until(lambda: r.ended(6))


async def test_duplicate_number_and_stopped_engine_are_refused() -> None:
    """A number in use is refused by name; before start and after stop nothing is taken."""
    async with rig(**FAST) as r:
        r.engine.submit(1, request([1], 1000))
        with pytest.raises(HoldfastError, match="stream 1"):
            r.engine.submit(1, request([1], 10))
    with pytest.raises(HoldfastError) as caught:
        r.engine.submit(2, request([1], 10))
    assert caught.value.code == Code.ENGINE_SHUTDOWN


async def test_preemption_keeps_every_token() -> None:
    """With too few blocks for all, the youngest wait and come back; everyone's tokens are as if alone."""
    async with rig(**FAST, block_size=4, kv_blocks=20) as r:
        asked = {number: request([number + 1] * 6, 50) for number in range(8)}
        for number, each in asked.items():
            r.engine.submit(number, each)
        used: list[int] = []
        r.on_batch = lambda outputs: used.append(r.engine.progress().kv.held)
        await r.until(lambda: r.ended(*asked))
        for number, each in asked.items():
            assert r.tokens(number) == expected(each, 50)
        assert r.engine._serving is not None
        assert r.engine._serving.scheduler.preemptions > 0
        assert max(used) <= 20
        assert r.engine.progress().kv.held == 0


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
        assert progress.thread == threading.get_native_id()


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


async def test_congested_sink_eases_the_engine() -> None:
    """A sink that answers False gets at most a step a millisecond, and still everything."""
    async with rig(**FAST) as r:
        r.willing = False
        loop = asyncio.get_running_loop()
        started = loop.time()
        r.engine.submit(1, request([1], 30))
        await r.until(lambda: r.ended(1))
        assert loop.time() - started >= 0.028
        assert len(r.tokens(1)) == 30


@pytest.mark.parametrize("field", ["ttft_ms", "kv_blocks", "jitter"])
def test_settings_name_a_bad_field(field: str) -> None:
    """A negative setting is refused with its name."""
    with pytest.raises(ValueError, match=field):
        SimSettings(**{field: -1})
