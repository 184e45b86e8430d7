"""The torch engine against the engine contract: ends, limits, refusals, cancellation, and stepping back."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator

import pytest
import torch
from torch_rig import BLOCK, BLOCK_GIB, Rig, Vault, prompt, request, rig, running_vault

from holdfast.core.errors import Code, HoldfastError, UserError
from holdfast.core.requests import GenerateRequest, Output
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.files.tiny import TINY
from holdfast.engines.torch.settings import TorchSettings
from holdfast.kv.index import FREE


@pytest.fixture
def vault() -> Iterator[Vault]:
    with running_vault() as started:
        yield started


async def alone(r: Rig, asked: GenerateRequest, number: int = 900) -> list[int]:
    await r.run({number: asked})
    return r.tokens(number)


async def test_outputs_of_a_step_come_together(vault: Vault) -> None:
    """One output per stream and step, all of a step in one call, tokens one by one, the last one with its reason."""
    async with rig(vault) as r:
        asked = {n: request(prompt(5, n), 12, top_logprobs=2 if n % 2 else None) for n in range(4)}
        await r.run(asked)
        for number in asked:
            assert [output.finish for output in r.of(number)] == [None] * 11 + ["length"]
            assert all(len(output.tokens) == 1 for output in r.of(number))
            assert all((output.logprobs is not None) == bool(number % 2) for output in r.of(number))
        assert max(map(len, r.batches)) == 4
        assert len(r.batches) < 4 * 12
        progress = r.engine.progress()
        assert progress.steps >= 12
        assert progress.step_ms_p99 > 0
        assert progress.thread not in (0, threading.get_native_id())


async def test_nothing_left_to_make_finishes_at_once(vault: Vault) -> None:
    """With max_tokens already there, or a full context, the answer is an empty last output, after submit returned."""
    async with rig(vault, context_tokens_max=64) as r:
        r.engine.submit(1, request([5, 6, 7, 8, 9], 2, prompt_len=3))
        r.engine.submit(2, request([5] * 64, 100))
        r.engine.submit(3, request([5, 6], 0))
        assert r.batches == []
        await r.until(lambda: r.ended(1, 2, 3))
        assert {number: (r.tokens(number), r.of(number)[-1].finish) for number in (1, 2, 3)} == dict.fromkeys(
            (1, 2, 3), ([], "length")
        )


async def test_context_end_finishes_with_length(vault: Vault) -> None:
    """Prompt and answer together never pass the context, nor the pool."""
    async with rig(vault, context_tokens_max=50) as r:
        await r.run({1: request([9] * 30, 1000)})
        assert len(r.tokens(1)) == 20
        assert r.of(1)[-1].finish == "length"
        assert r.engine.limits.context_tokens_max == 50


async def test_stop_tokens_end_a_stream_and_are_included(vault: Vault) -> None:
    """A stop id or the end of the turn is the last id of a stream that finishes with "stop", and comes not
    before min_tokens; an ignored end of the turn ends nothing."""
    async with rig(vault) as r:
        whole = await alone(r, request(prompt(9), 30))
        stop = whole[9]
        first = whole.index(stop)
        eos = TINY.eos_token_ids[0]
        to_eos = {"logit_bias": {eos: 100.0}, "ignore_eos": False}
        await r.run(
            {
                1: request(prompt(9), 30, stop_token_ids=[stop]),
                2: request(prompt(9), 30, stop_token_ids=[stop], min_tokens=first + 1),
                3: request(prompt(9), 30, stop_token_ids=[stop], min_tokens=first),
                4: request(prompt(9), 30, **to_eos),
                5: request(prompt(9), 8, **(to_eos | {"ignore_eos": True})),
            }
        )
        assert r.tokens(1) == r.tokens(3) == whole[: first + 1]
        assert r.of(1)[-1].finish == r.of(3)[-1].finish == "stop"
        assert r.tokens(2)[:first] == whole[:first]
        assert stop not in r.tokens(2)[: first + 1], "before its time it is not even drawn"
        assert len(r.tokens(2)) > first + 1
        assert (r.tokens(4), r.of(4)[-1].finish) == ([eos], "stop")
        assert (r.tokens(5), r.of(5)[-1].finish) == ([eos] * 8, "length")


async def test_cancel_silences_a_stream(vault: Vault) -> None:
    """After cancel nothing is said of a stream, running or waiting; its place goes to the next; unknown ones pass."""
    async with rig(vault, concurrency=1) as r:
        for number in (1, 2, 3):
            r.engine.submit(number, request(prompt(4, number), 3000 if number == 1 else 10))
        await r.until(lambda: len(r.tokens(1)) >= 3)
        r.engine.cancel(1)
        r.engine.cancel(2)
        r.engine.cancel(99)
        said = len(r.of(1))
        await r.until(lambda: r.ended(3))
        assert len(r.of(1)) == said
        assert r.of(2) == []


async def test_what_was_made_before_a_cancel_is_not_said_after_it(vault: Vault) -> None:
    """A step's tokens that wait for the loop when a stream is cancelled are dropped, and are not the next stream's of
    the same number."""
    async with rig(vault) as r:
        right = await alone(r, request(prompt(6, 2), 5))
        r.engine.submit(1, request(prompt(4), 3000))
        await r.until(lambda: len(r.tokens(1)) >= 2)
        made = r.engine.progress().steps
        while r.engine.progress().steps < made + 3:  # bounded by the test's own timeout: the loop must not turn here
            pass
        r.engine.cancel(1)
        before = len(r.of(1))
        r.engine.submit(1, request(prompt(6, 2), 5))
        await r.until(lambda: r.ended(1))
        assert [token for output in r.of(1)[before:] for token in output.tokens] == right


async def test_cancel_inside_the_sink(vault: Vault) -> None:
    """A sink may cancel and submit: the stream is silent from there on and the engine goes on."""
    async with rig(vault) as r:
        right = await alone(r, request(prompt(6, 2), 5))

        def swap(outputs: list[Output]) -> None:
            r.on_batch = lambda outputs: None
            r.engine.cancel(1)
            r.engine.submit(2, request(prompt(6, 2), 5))

        r.on_batch = swap
        r.engine.submit(1, request(prompt(4), 3000))
        await r.until(lambda: r.ended(2))
        assert len(r.of(1)) == 1
        assert r.tokens(2) == right


async def test_overload_is_refused_by_name(vault: Vault) -> None:
    """Concurrency plus queue are taken, the next is WorkerOverloaded and leaves the others be."""
    async with rig(vault, concurrency=2, queue=3) as r:
        for number in range(5):
            r.engine.submit(number, request(prompt(5, number), 10))
        progress = r.engine.progress()
        assert progress.running + progress.waiting == 5
        with pytest.raises(HoldfastError) as caught:
            r.engine.submit(5, request([6], 10))
        assert caught.value.code == Code.WORKER_OVERLOADED
        await r.until(lambda: r.ended(*range(5)))
        await r.run({6: request([6], 10)})


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (request([], 10), "tokens"),
        (request([-1], 10), "tokens"),
        (request([2**40], 10), "tokens"),
        (request([TINY.vocabulary], 10), "tokens"),
        (request([1, 2], 10, prompt_len=3), "prompt_len"),
        (request([1, 2], 10, prompt_len=0), "prompt_len"),
        (request([1] * 101, 10), "tokens"),
        (request([1], 10, logit_bias={TINY.vocabulary: 1.0}), "logit_bias"),
        (request([1], 10, repetition_penalty=0.0), "repetition_penalty"),
        (request([1], 10, repetition_penalty=math.nan), "repetition_penalty"),
    ],
)
def test_invalid_requests_name_the_field(asked: GenerateRequest, word: str, awake: Rig) -> None:
    """What cannot be run is InvalidRequest, says which field, and leaves no trace."""
    with pytest.raises(HoldfastError, match=word) as caught:
        awake.engine.submit(1, asked)
    assert caught.value.code == Code.INVALID_REQUEST
    assert awake.engine.progress().running == awake.engine.progress().waiting == 0


@pytest.fixture(scope="module")
def awake() -> Iterator[Rig]:
    """One engine for all that is refused."""
    with running_vault() as vault, asyncio.Runner() as runner:
        manager = rig(vault, context_tokens_max=100)
        yield runner.run(manager.__aenter__())
        runner.run(manager.__aexit__(None, None, None))


async def test_only_an_awake_engine_takes_work(vault: Vault) -> None:
    """A number in use is refused by name; before a wake, at rest and after the end nothing is taken."""
    made = Rig(vault)
    await made.engine.load()
    await made.engine.start(made.sink, made.on_closed)
    refused: list[str] = []

    def try_it() -> None:
        with pytest.raises(HoldfastError) as caught:
            made.engine.submit(2, request([1], 10))
        refused.append(caught.value.code)

    try_it()
    await made.engine.wake(1000)
    made.engine.submit(1, request([1], 3000))
    with pytest.raises(HoldfastError, match="stream 1"):
        made.engine.submit(1, request([1], 10))
    await made.engine.rest()
    try_it()
    await made.engine.wake(1001)
    await made.run({3: request([1], 5)})
    await made.engine.stop()
    try_it()
    assert refused == [Code.ENGINE_SHUTDOWN] * 3
    assert made.fatal == []


async def test_rest_hands_every_stream_back(vault: Vault) -> None:
    """At rest each stream was either told its end or is named as closed, nothing comes after that, no block stays
    open, and what was published is found again at the next wake."""
    async with rig(vault, concurrency=4) as r:
        asked = {n: request(prompt(40, n), 60) for n in range(8)}
        r.submit(asked)
        await r.until(lambda: len(r.tokens(0)) >= 20)
        index = r.blocks.pool.index
        await r.engine.rest()
        said = len(r.batches)
        ended = {number for number in asked if r.ended(number)}
        assert sorted(ended | set(r.closed)) == sorted(asked)
        woken = await r.engine.wake(1001)
        assert woken.blocks >= 4 * (60 // BLOCK)
        assert {index.state(block) for block in range(index.geometry.block_count)} - {FREE}
        made = r.tokens(0)
        await r.run({10: request(prompt(40) + made, 60, prompt_len=40)})
        assert r.engine.resumes.recomputed_tokens_max < BLOCK
        assert len(made) + len(r.tokens(10)) == 60
        assert all(output.stream == 10 for batch in r.batches[said:] for output in batch)


async def test_a_stream_that_ends_as_the_engine_rests_is_told(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step under way when a rest begins is the last, and what it made is said, a stream's end too; so is the end
    of one that had nothing left to make."""
    async with rig(vault) as r:
        at_last, go_on = threading.Event(), threading.Event()
        real, steps = Computer.launch, iter(range(4))

        def gated(self: Computer, plan: object) -> object:
            if next(steps, None) is None:
                at_last.set()
                assert go_on.wait(20)
            return real(self, plan)  # type: ignore[arg-type]

        monkeypatch.setattr(Computer, "launch", gated)
        r.submit({1: request(prompt(3), 5), 2: request(prompt(3, 1), 50)})
        await asyncio.to_thread(at_last.wait, 20)
        r.engine.submit(3, request(prompt(3), 0))
        resting = asyncio.create_task(r.engine.rest())
        async with asyncio.timeout(20):
            while r.engine._stepper.scheduler is not None:
                await asyncio.sleep(0)
        go_on.set()
        await resting
        assert (len(r.tokens(1)), r.of(1)[-1].finish) == (5, "length")
        assert (r.tokens(3), r.of(3)[-1].finish) == ([], "length")
        assert r.closed == [2]


async def test_prompt_that_never_fits_is_refused_and_the_largest_that_does_ends(vault: Vault) -> None:
    """A prompt over the block budget is refused; one within it ends with "length" where blocks end."""
    async with rig(vault, kv_gib=4 * BLOCK_GIB) as r:
        assert r.engine.limits.context_tokens_max == 4 * BLOCK
        with pytest.raises(HoldfastError) as caught:
            r.engine.submit(1, request(prompt(4 * BLOCK), 10))
        assert caught.value.code == Code.INVALID_REQUEST
        await r.run({2: request(prompt(40), 100), 3: request(prompt(4 * BLOCK - 1, 1), 100)})
        assert len(r.tokens(2)) == 24
        assert len(r.tokens(3)) == 1
        assert r.of(2)[-1].finish == "length"


async def test_congested_sink_eases_the_engine(vault: Vault) -> None:
    """A sink that answers False gets at most a step in two milliseconds, and still everything."""
    async with rig(vault) as r:
        r.willing = False
        began_s = asyncio.get_running_loop().time()
        await r.run({1: request([1], 30)})
        assert asyncio.get_running_loop().time() - began_s >= 0.05
        assert len(r.tokens(1)) == 30


async def test_an_idle_engine_makes_no_step(vault: Vault) -> None:
    """Without streams no step is made: at the start, after a stream's end and after a cancel."""
    async with rig(vault) as r:
        assert r.engine.progress().steps == 0
        await r.run({1: request(prompt(3), 5)})
        steps = r.engine.progress().steps
        assert steps == 5
        r.engine.submit(2, request(prompt(3), 3000))
        await r.until(lambda: len(r.tokens(2)) >= 1)
        r.engine.cancel(2)
        settled = await _settled_steps(r)
        await asyncio.sleep(0.05)
        assert r.engine.progress().steps == settled


async def _settled_steps(r: Rig) -> int:
    """Once the step under way at a cancel is over."""
    await asyncio.to_thread(r.engine._stepper._idle.wait, 10)
    await asyncio.sleep(0.01)
    return r.engine.progress().steps


async def test_a_failed_step_ends_the_engine(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device is fatal, says what it was, and no token of that step or after it is said."""
    made = Rig(vault)
    fatal = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_fatal(why: str) -> None:
        made.fatal.append(why)
        loop.call_soon_threadsafe(fatal.set)

    made.engine.on_fatal = on_fatal
    await made.engine.load()
    await made.engine.start(made.sink, made.on_closed)
    await made.engine.wake(1000)
    real, steps = Computer.launch, iter(range(5))

    def failing(self: Computer, plan: object) -> object:
        if next(steps, None) is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Computer, "launch", failing)
    made.engine.submit(1, request([1], 30))
    async with asyncio.timeout(20):
        await fatal.wait()
    assert "illegal memory access" in made.fatal[0]
    assert len(made.tokens(1)) == 5
    await made.engine.stop()


async def test_a_standby_checks_itself_beside_the_pool(vault: Vault) -> None:
    """An engine that stands by runs its canary right, in memory of its own: the owner's pages do not change, and the
    owner's own canary is right while it works."""
    async with rig(vault) as r:
        await r.run({1: request(prompt(100), 20)})
        ready = r.engine._readiness.ready
        assert ready is not None

        def pages() -> torch.Tensor:
            return ready.computer.kv[: r.engine.geometry.block_count].clone()

        before = pages()
        standby = Rig(vault, engine_id=1)
        await standby.engine.load()
        assert standby.engine.canary.tokens == r.engine.canary.tokens
        assert await standby.engine.check()
        assert torch.equal(pages(), before)
        assert before.any()
        r.engine.submit(2, request(prompt(50, 1), 40))
        assert await r.engine.check()
        await r.until(lambda: r.ended(2))
        await standby.engine.stop()


@pytest.mark.parametrize("field", ["block_tokens", "concurrency", "queue", "kv_gib", "threads", "step_tokens_max"])
def test_settings_name_a_bad_field(field: str) -> None:
    """A negative setting is refused with its name."""
    with pytest.raises(ValueError, match=field):
        TorchSettings(**{field: -1})  # type: ignore[arg-type]


def test_a_pool_of_no_block_is_refused(vault: Vault) -> None:
    """A pool too small for two blocks is refused in words a person can act on."""
    with pytest.raises(UserError, match="kv_gib"):
        Rig(vault, kv_gib=BLOCK_GIB)
