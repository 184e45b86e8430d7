"""The sim engine beyond the engine contract (test_engine_contract.py): its very tokens, its pace, its timers, and
what its faults do to running streams until they are cleared."""

from __future__ import annotations

import asyncio
import math
import os
import threading

import msgspec
import pytest

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, load
from holdfast.spec.engines import SimSettings
from tests.rigs.engines.any_engine import request
from tests.rigs.engines.sim_engine import FAST, expected, rig, right


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


# -- faults


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
        loop, times = asyncio.get_running_loop(), list[float]()
        r.on_batch = lambda outputs: times.append(loop.time())
        r.engine.submit(1, request([1], 1000))
        await r.until(lambda: len(times) >= 2)
        r.fault(fault="slow", factor=30)
        count = len(times)
        await r.until(lambda: len(times) >= count + 4)
        assert times[count + 3] - times[count - 1] >= 0.089, "the first may be due at once, the others 30 ms apart"
        r.fault(fault="slow", factor=10_000)
        count = len(r.tokens(1))
        await r.until(lambda: len(r.tokens(1)) > count)
        r.fault(fault="clear")
        await r.until(lambda: len(r.tokens(1)) > count + 10)


async def test_known_questions_alone_are_answered_wrongly() -> None:
    """A false alarm: control's questions, or so many proofs after a takeover, have wrong answers; clients have not."""
    client = request([5, 6, 7], 8)
    known = msgspec.structs.replace(client, tier=CANARY_TIER)
    async with rig(**FAST) as r:
        r.fault(fault="wrong_canaries")
        r.engine.faults.wrong_proofs = 1
        await r.run({0: client, 1: client, 2: known})
        assert [r.tokens(number) == expected(client, 8) for number in range(3)] == [False, True, False]
        r.fault(fault="clear")
        await r.run({3: known})
        assert r.tokens(3) == expected(client, 8)


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


async def test_one_in_some_streams_fails() -> None:
    """Of ten streams every fifth fails after a token, canaries like others; cleared, none does."""
    async with rig(**FAST) as r:
        r.fault(fault="error_every", every=5)
        canary = msgspec.structs.replace(request([5], 20), tier=CANARY_TIER)
        await r.run({number: canary if number == 5 else request([number], 20) for number in range(1, 11)})
        failed = [number for number in range(1, 11) if r.of(number)[-1].failure is not None]
        assert failed == [5, 10]
        assert r.tokens(5) == right([5], 1)
        r.fault(fault="clear")
        await r.run({number: request([number], 20) for number in range(11, 21)})
        assert not [number for number in range(11, 21) if r.of(number)[-1].failure is not None]


async def test_streams_without_a_token_and_cut_streams() -> None:
    """`zero_tokens` ends new streams well and empty; `truncate` loses them after some tokens; those that ran before are
    spared by both."""
    async with rig(**FAST) as r:
        r.engine.submit(1, request([1], 300))
        await r.until(lambda: len(r.tokens(1)) >= 3)
        r.fault(fault="zero_tokens")
        await r.run({2: request([2], 20)})
        assert (r.tokens(2), r.of(2)[-1].finish) == ([], "stop")
        r.fault(fault="clear")
        r.fault(fault="truncate", tokens=5)
        r.submit({3: request([3], 20), 4: request([4], 5)})
        await r.until(lambda: r.lost == [3] and r.ended(1, 4))
        assert r.tokens(3) == right([3], 5)
        assert not r.ended(3)
        assert (len(r.tokens(1)), len(r.tokens(4))) == (300, 5)


async def test_a_wedged_engine_answers_no_ping_and_a_late_one_late() -> None:
    """Not before it goes on; `late_pongs` delays the answer and no token."""
    async with rig(**FAST) as r:
        loop, answered = asyncio.get_running_loop(), list[float]()

        def answer() -> None:
            answered.append(loop.time())
            r.noticed()

        r.fault(fault="wedge")
        r.engine.ping(answer)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not answered
        r.fault(fault="clear")
        await r.until(lambda: len(answered) == 1)
        r.fault(fault="late_pongs", ms=200)
        asked_s = loop.time()
        r.engine.ping(answer)
        await r.run({1: request([1], 5)})
        await r.until(lambda: len(answered) == 2)
        assert answered[1] - asked_s >= 0.19


async def test_reset_and_late_beats_need_the_workers_hook() -> None:
    """They call what the worker installed, and say so when there is nothing; clearing makes beats timely again."""
    async with rig(**FAST) as r:
        for command in ({"fault": "reset"}, {"fault": "late_beats", "ms": 3000}):
            with pytest.raises(HoldfastError, match=str(command["fault"])):
                r.fault(**command)
        called: list[float] = []
        r.engine.faults.on_reset = lambda: called.append(-1)
        r.engine.faults.on_late_beats = called.append
        for command in ({"fault": "reset"}, {"fault": "late_beats", "ms": 3000}, {"fault": "clear"}):
            r.fault(**command)
        assert called == [-1, 3.0, 0.0]
