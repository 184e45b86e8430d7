"""What every engine does: the sim with and without a vault, torch over the tiny model, and the example of the docs.

The first half holds for any engine, the second for those whose memory is in a vault. Tokens are compared with what the
same kind of engine says to the request alone, so nothing here knows a model.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER, GenerateRequest, Output
from holdfast.engines.paged.canary import Dropped
from holdfast.engines.sim.engine import SimEngine
from holdfast.memory.client.calls import demote, promote, vault_status
from holdfast.memory.client.pool import PoolClient
from holdfast.spec.engines import SimSettings
from holdfast.testing.processes import VAULT
from tests.rigs.engines.any_engine import (
    BOUND_S,
    EXAMPLES,
    TINY_BLOCK_GIB,
    VLLM_BLOCK_GIB,
    VLLM_OWN,
    Child,
    Rig,
    Vault,
    make_engine,
    request,
)

BLOCKS = {"vllm": 32}  # tokens in a block; all others have 16
PLAIN = "sim without a vault"
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (make test-vllm)")
# Two of them may live in one process; of vLLM, each in its own, the same is in stock_vllm/test_vllm_pairs.py.
TOGETHER = ["sim", pytest.param("torch", marks=needs_torch), "example"]
STOCK_VLLM = pytest.param("vllm", marks=needs_vllm)
FAILOVER_KINDS = [*TOGETHER, STOCK_VLLM]
FAILOVER_KINDS_LATER = ["sim", pytest.param("torch", marks=[needs_torch, pytest.mark.long]), "example", STOCK_VLLM]
KINDS = [PLAIN, *FAILOVER_KINDS]
EPOCHS: dict[Vault, Iterator[int]] = defaultdict(lambda: itertools.count(1000))  # of each vault
VOCABULARY = 1_000_000  # beyond any here
TOKENS = 60
SEEN = 30  # tokens of every stream that clients had for certain when its engine was killed
PROMPTS = {number: [100 + number * 7 + place * 3 for place in range(20 + 11 * number)] for number in range(1, 5)}


def settings(kind: str, blocks: int = 512, **given: int) -> dict[str, Any]:
    """In the words of its kind; concurrency, queue and context_tokens_max are called so by all."""
    if kind == "torch":
        return given | {"kv_gib": blocks * TINY_BLOCK_GIB}
    if kind == "vllm":  # which refuses a context that its pool cannot hold
        context = min(given.get("context_tokens_max", 2048), blocks * size_of(kind))
        return given | {"kv_gib": (blocks + VLLM_OWN) * VLLM_BLOCK_GIB, "context_tokens_max": context}
    return given | {"kv_blocks": blocks} | ({"ttft_ms": 0.0, "tpot_ms": 0.0} if kind == PLAIN else {})


def size_of(kind: str) -> int:
    return BLOCKS.get(kind, 16)


def prompt(length: int, number: int = 0) -> list[int]:
    return [(37 * number + 31 * place * place + 101 * place + 17) % 900 for place in range(length)]


@asynccontextmanager
async def standing_by(kind: str, vault: Vault, engine_id: int = 0, **given: int) -> AsyncIterator[Rig]:
    """A loaded engine in this process."""
    rig = Rig(make_engine(kind, settings(kind, **given), vault.failover(engine_id)))
    try:
        await rig.load()
        yield rig
    finally:
        await rig.engine.stop()
    assert not rig.heard("fatal"), rig.told


@asynccontextmanager
async def awake(kind: str, vault: Vault | None, **given: int) -> AsyncIterator[Rig]:
    """An engine in this process that takes work."""
    if kind == PLAIN:
        rig = Rig(SimEngine(SimSettings(**settings(kind, **given)), random.Random(1)))
        await rig.load()
        yield rig
        await rig.engine.stop()
        return
    assert vault is not None
    async with standing_by(kind, vault, **given) as rig:
        await rig.engine.wake(next(EPOCHS[vault]))
        yield rig


async def alone(r: Rig, asked: GenerateRequest, number: int = 900) -> list[int]:
    await r.run({number: asked})
    return r.tokens(number)


@pytest.fixture(scope="module")
def vaults() -> Iterator[Callable[[str], Vault]]:
    """One for each kind, started when the first test asks for it."""
    with ExitStack() as started:
        yield cache(lambda kind: started.enter_context(Vault()))


@pytest.fixture
def used_vault(kind: str, vaults: Callable[[str], Vault]) -> Vault | None:
    """A vault that engines of its kind, with as many blocks, have used before; none for the engine without one."""
    return None if kind == PLAIN else vaults(kind)


# -- any engine


@pytest.mark.parametrize("kind", KINDS)
async def test_a_steps_outputs_come_together(kind: str, used_vault: Vault | None) -> None:
    """One output per stream and step, all of a step in one call, tokens one by one, the last with its reason; streams
    that run together make what each makes alone; progress counts the steps and names who makes them."""
    async with awake(kind, used_vault) as r:
        asked = {number: request(prompt(5, number), 12) for number in range(1, 5)}
        right = {number: await alone(r, each, 900 + number) for number, each in asked.items()}
        before = len(r.batches)
        await r.run(asked)
        for number in asked:
            assert r.tokens(number) == right[number]
            assert [output.finish for output in r.of(number)] == [None] * 11 + ["length"]
            assert all(len(output.tokens) == 1 for output in r.of(number))
        batches = r.batches[before:]
        assert max(map(len, batches)) == 4
        assert len(batches) < 4 * 12
        assert all(len({output.stream for output in batch}) == len(batch) for batch in batches)
        progress = r.engine.progress()
        assert progress.steps >= 12
        assert progress.thread is not None
        assert progress.thread[0] == os.getpid()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_resumed_request_continues(kind: str, used_vault: Vault | None) -> None:
    """A request that brings 25 of its 40 tokens makes the other 15."""
    async with awake(kind, used_vault) as r:
        whole = await alone(r, request([5, 6, 7], 40))
        await r.run({1: request([5, 6, 7, *whole[:25]], 40, prompt_len=3)})
        assert r.tokens(1) == whole[25:]


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_left_to_make_finishes_at_once(kind: str, used_vault: Vault | None) -> None:
    """With max_tokens already there, or a full context, the answer is an empty last output, after submit returned."""
    async with awake(kind, used_vault, context_tokens_max=64) as r:
        r.engine.submit(1, request([5, 6, 7, 8, 9], 2, prompt_len=3))
        r.engine.submit(2, request([5] * 64, 100))
        r.engine.submit(3, request([5, 6], 0))
        assert r.batches == []
        await r.until(lambda: r.ended(1, 2, 3))
        assert {number: (r.tokens(number), r.of(number)[-1].finish) for number in (1, 2, 3)} == dict.fromkeys(
            (1, 2, 3), ([], "length")
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_context_end_finishes_with_length(kind: str, used_vault: Vault | None) -> None:
    """Prompt and answer together never pass the context."""
    async with awake(kind, used_vault, context_tokens_max=50) as r:
        await r.run({1: request([9] * 30, 1000)})
        assert (len(r.tokens(1)), r.of(1)[-1].finish) == (20, "length")
        assert r.engine.limits.context_tokens_max == 50


@pytest.mark.parametrize("kind", KINDS)
async def test_stop_tokens_end_a_stream_and_are_included(kind: str, used_vault: Vault | None) -> None:
    """A stop token id is the last id of a stream that finishes with "stop"."""
    async with awake(kind, used_vault) as r:
        whole = await alone(r, request(prompt(9), 30))
        stop = whole[9]
        await r.run({1: request(prompt(9), 30, stop_token_ids=[stop])})
        assert r.tokens(1) == whole[: whole.index(stop) + 1]
        assert r.of(1)[-1].finish == "stop"


@pytest.mark.parametrize("kind", KINDS)
async def test_cancel_silences_a_stream(kind: str, used_vault: Vault | None) -> None:
    """After cancel nothing is said of a stream, running or waiting; its place goes to the next; unknown ones pass."""
    async with awake(kind, used_vault, concurrency=1) as r:
        for number in (1, 2, 3):
            r.engine.submit(number, request(prompt(4, number), 3000 if number == 1 else 10))
        await r.until(lambda: len(r.tokens(1)) >= 3)
        for number in (1, 2, 99):
            r.engine.cancel(number)
        said = len(r.of(1))
        await r.until(lambda: r.ended(3))
        assert (len(r.of(1)), r.of(2)) == (said, [])


@pytest.mark.parametrize("kind", KINDS)
async def test_only_a_stream_that_has_not_begun_is_withdrawn(kind: str, used_vault: Vault | None) -> None:
    """One that waits is forgotten as if it was cancelled; one that runs goes on; unknown ones pass."""
    async with awake(kind, used_vault, concurrency=1) as r:
        right = await alone(r, request(prompt(4, 1), 20))
        for number, length in ((1, 20), (2, 10), (3, 10)):
            r.engine.submit(number, request(prompt(4, number), length))
        await r.until(lambda: len(r.tokens(1)) >= 3)
        assert [r.engine.withdraw(number) for number in (1, 2, 2, 99)] == [False, True, False, False]
        await r.until(lambda: r.ended(3))
        assert (r.tokens(1), r.of(2)) == (right, [])


@pytest.mark.parametrize("kind", KINDS)
async def test_cancel_inside_the_sink(kind: str, used_vault: Vault | None) -> None:
    """Who takes outputs may cancel and submit: the stream is silent from there on and the engine goes on."""
    async with awake(kind, used_vault) as r:
        right = await alone(r, request(prompt(6, 2), 5))

        def swap(outputs: list[Output]) -> None:
            r.on_batch = lambda outputs: None
            r.engine.cancel(1)
            r.engine.submit(2, request(prompt(6, 2), 5))

        r.on_batch = swap
        r.engine.submit(1, request(prompt(4), 3000))
        await r.until(lambda: r.ended(2))
        assert (len(r.of(1)), r.tokens(2)) == (1, right)


@pytest.mark.parametrize("kind", KINDS)
async def test_overload_is_refused_by_name(kind: str, used_vault: Vault | None) -> None:
    """Concurrency plus queue are taken, the next is WorkerOverloaded and leaves the others be."""
    async with awake(kind, used_vault, concurrency=2, queue=3) as r:
        for number in range(5):
            r.engine.submit(number + 1, request(prompt(5, number), 10))
        progress = r.engine.progress()
        assert progress.running + progress.waiting == 5
        with pytest.raises(HoldfastError) as caught:
            r.engine.submit(6, request([6], 10))
        assert caught.value.code == Code.WORKER_OVERLOADED
        await r.until(lambda: r.ended(*range(1, 6)))
        await r.run({7: request([6], 10)})


@pytest.mark.parametrize("kind", KINDS)
async def test_a_canary_has_a_place_of_its_own(kind: str, used_vault: Vault | None) -> None:
    """Where every place is taken a canary is answered all the same, ahead of whoever waits, as if it were alone; a
    second one beside it is refused, and nobody else's tokens change."""
    async with awake(kind, used_vault, concurrency=1, queue=1) as r:
        right = {number: await alone(r, request(prompt(5, number), 8), 900 + number) for number in (1, 2, 3)}
        canary = msgspec.structs.replace(request(prompt(5, 3), 8), tier=CANARY_TIER)
        r.submit({1: request(prompt(5, 1), 300), 2: request(prompt(5, 2), 8)})
        r.engine.submit(3, canary)
        for asked in (canary, request([6], 10)):
            with pytest.raises(HoldfastError) as caught:
                r.engine.submit(4, asked)
            assert caught.value.code == Code.WORKER_OVERLOADED
        await r.until(lambda: r.ended(3))
        assert not r.ended(1)
        assert r.of(2) == []
        await r.until(lambda: r.ended(1, 2))
        assert (r.tokens(1)[:8], r.tokens(2), r.tokens(3)) == tuple(right.values())
        r.engine.submit(5, canary)
        r.engine.cancel(5)
        await r.run({6: canary})
        assert r.tokens(6) == right[3]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_ping_is_answered_with_and_without_work(kind: str, used_vault: Vault | None) -> None:
    """By an idle engine, and by one that makes steps, between two of them; each ping once."""
    async with awake(kind, used_vault) as r:
        answered: list[str] = []

        def answer(which: str) -> Callable[[], None]:
            def say() -> None:
                answered.append(which)
                r.noticed()

            return say

        r.engine.ping(answer("idle"))
        await r.until(lambda: answered == ["idle"])
        r.engine.submit(1, request(prompt(5), 3000))
        await r.until(lambda: len(r.tokens(1)) >= 3)
        r.engine.ping(answer("busy"))
        await r.until(lambda: len(answered) == 2)
        assert not r.ended(1)
        assert answered == ["idle", "busy"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_says_what_its_answers_may_be_compared_with(kind: str, used_vault: Vault | None) -> None:
    """Build, dtype, kind of device and vocabulary; whose weights it reads, and which load of them."""
    async with awake(kind, used_vault) as r:
        said = r.engine.capabilities
        assert said.build
        assert said.dtype
        assert (said.device, said.failover) == ("cpu", kind != PLAIN)
        await alone(r, request([said.vocabulary - 1], 1))
        with pytest.raises(HoldfastError, match="tokens"):
            r.engine.submit(1, request([said.vocabulary], 1))
        assert bool(said.weights) is said.failover
        assert r.engine.progress().load >= 1


@pytest.mark.parametrize("kind", [PLAIN, *TOGETHER])
async def test_weights_are_verified_and_loaded_anew(kind: str, vault: Vault) -> None:
    """What is in a vault compares with what was written; loaded again, by who stands by, it has a larger load, for its
    standby too, and makes the same tokens; what was computed before is not believed."""
    async with awake(kind, vault) as r:
        right = await alone(r, request(prompt(40), 12))
        load = r.engine.progress().load
        assert bool(await r.engine.verify()) is (kind == PLAIN), "one alone has nothing to compare with"
        if kind == PLAIN:
            await r.engine.renew()
        else:
            async with standing_by(kind, vault, 1) as other:
                assert other.engine.progress().load == load
                await r.engine.become_standby(believed=False)
                await r.engine.renew()
                async with asyncio.timeout(BOUND_S):
                    while other.engine.progress().load == load:
                        await asyncio.sleep(0.01)
                assert other.engine.progress().load == r.engine.progress().load
                assert other.engine.capabilities.weights == r.engine.capabilities.weights
                assert await other.engine.check() == ""
            assert await r.engine.check() == ""
            woken = await r.engine.wake(1001)
            assert (woken.blocks, bool(woken.reason)) == (0, True)
            assert not await r.engine.verify()
        assert r.engine.progress().load > load
        assert await alone(r, request(prompt(40), 12), 901) == right


@pytest.mark.parametrize("kind", KINDS)
async def test_invalid_requests_name_the_field(kind: str, vault: Vault) -> None:
    """What cannot be run is InvalidRequest, says which field, and leaves no trace; so is a number in use, and a prompt
    that no pool of this size can ever take."""
    nan, context = float("nan"), 6 * size_of(kind)
    cases = [
        (request([], 10), "tokens"),
        (request([-1], 10), "tokens"),
        (request([2**40], 10), "tokens"),
        (request([VOCABULARY], 10), "tokens"),
        (request([1, 2], 10, prompt_len=3), "prompt_len"),
        (request([1, 2], 10, prompt_len=0), "prompt_len"),
        (request([1] * (context + 1), 10), "tokens"),
        (request([1] * (4 * size_of(kind)), 10), "tokens"),
        (request([1], 10, logit_bias={VOCABULARY: 1.0}), "logit_bias"),
        (request([1], 10, repetition_penalty=0.0), "repetition_penalty"),
        (request([1], 10, repetition_penalty=nan), "repetition_penalty"),
    ]
    async with awake(kind, vault, blocks=4, context_tokens_max=context) as r:
        for asked, word in cases:
            with pytest.raises(HoldfastError, match=word) as caught:
                r.engine.submit(1, asked)
            assert caught.value.code == Code.INVALID_REQUEST
            assert r.engine.progress().running == r.engine.progress().waiting == 0
        r.engine.submit(1, request([1], 40))
        with pytest.raises(HoldfastError, match="stream 1"):
            r.engine.submit(1, request([1], 10))


@pytest.mark.parametrize("kind", KINDS)
async def test_the_largest_prompt_that_fits_ends_where_blocks_end(kind: str, vault: Vault) -> None:
    """An answer that would outgrow the pool ends with "length" where blocks end."""
    async with awake(kind, vault, blocks=4) as r:
        room = 4 * size_of(kind)
        await r.run({2: request(prompt(40), 100), 3: request(prompt(room - 1, 1), 100)})
        assert (len(r.tokens(2)), r.of(2)[-1].finish) == (room - 40, "length")
        assert len(r.tokens(3)) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_beyond_the_pool_wait_and_keep_their_tokens(kind: str, vault: Vault) -> None:
    """With too few blocks for all, some wait and come back; everyone's tokens are as if alone, and no block stays
    held."""
    async with awake(kind, vault, blocks=20) as r:
        asked = {number: request(prompt(25, number), 60) for number in range(1, 7)}
        right = {number: await alone(r, each, 900 + number) for number, each in asked.items()}
        await r.run(asked)
        assert {number: r.tokens(number) for number in asked} == right
        assert r.engine.progress().kv.held == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_congested_receiver_eases_the_engine_and_gets_everything(kind: str, used_vault: Vault | None) -> None:
    """Who answers False gets a step in a millisecond at most, and still all of them."""
    async with awake(kind, used_vault) as r:
        r.willing = False
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await r.run({1: request([1], 30)})
        assert loop.time() - began_s >= 0.02
        assert len(r.tokens(1)) == 30


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_is_stopped_takes_nothing(kind: str, used_vault: Vault | None) -> None:
    """After the end a request is refused by name."""
    async with awake(kind, used_vault) as r:
        pass
    with pytest.raises(HoldfastError) as caught:
        r.engine.submit(2, request([1], 10))
    assert caught.value.code == Code.ENGINE_SHUTDOWN


# -- engines with their memory in a vault


@pytest.mark.parametrize("kind", TOGETHER)
async def test_first_writes_and_second_maps(kind: str, vault: Vault) -> None:
    """The first engine writes the weights, the second maps and verifies the same ones, both answer their canary, and
    neither takes work before it is woken."""
    async with standing_by(kind, vault) as first, standing_by(kind, vault, engine_id=1) as second:
        for each in (first, second):
            assert each.engine.capabilities.failover
            assert await each.engine.check() == ""
            with pytest.raises(HoldfastError) as caught:
                each.engine.submit(1, request([5], 3))
            assert caught.value.code == Code.ENGINE_SHUTDOWN
    assert vault.commits() == 1


@pytest.mark.parametrize("kind", TOGETHER)
async def test_rest_hands_every_stream_back_and_a_wake_finds_its_blocks(kind: str, vault: Vault) -> None:
    """At rest each stream was either told its end or is named as closed, nothing comes after that, and no work is
    taken; what was published is found by another engine, and by the first again after it."""
    async with awake(kind, vault, concurrency=4) as first, standing_by(kind, vault, engine_id=1) as second:
        whole = await alone(first, request(prompt(40), 90))
        asked = {number: request(prompt(40, number), 60) for number in range(1, 9)}
        first.submit(asked)
        await first.until(lambda: len(first.tokens(1)) >= 20)
        await first.engine.become_standby()
        said = len(first.batches)
        ended = {number for number in asked if first.ended(number)}
        assert sorted(ended | set(first.lost)) == sorted(asked)
        with pytest.raises(HoldfastError):
            first.engine.submit(99, request([5], 3))
        for epoch, (rig, made) in enumerate(((second, 30), (first, 60)), 1001):
            woken = await rig.engine.wake(epoch)
            assert (woken.reason, woken.blocks >= 4) == ("", True)
            rig.engine.on_proved()
            await rig.run({20: request(prompt(40) + whole[:made], made + 30, prompt_len=40)})
            assert rig.tokens(20) == whole[made : made + 30]
            assert rig.engine.resumes.recomputed_tokens_max <= size_of(kind)
            await rig.engine.become_standby()
        assert all(output.stream == 20 for batch in first.batches[said:] for output in batch)


@pytest.mark.parametrize("kind", FAILOVER_KINDS)
async def test_memory_that_was_let_go_of_may_be_moved_and_is_there_again(kind: str) -> None:
    """Two engines let go of the vault's memory: it leaves its device whole and comes back; each is right by its canary
    before it serves, and says the same as before."""
    with Vault(host_budget_bytes=2**31) as vault:
        others = [] if kind == "vllm" else [1]  # of which one process has one
        async with awake(kind, vault) as first, AsyncExitStack() as stack:
            whole = await alone(first, request(prompt(40), 30))
            await first.engine.become_standby()
            rigs = [first, *[await stack.enter_async_context(standing_by(kind, vault, at)) for at in others]]
            for epoch in (1001, 1002):
                for rig in rigs:
                    await rig.engine.unmap()
                    await rig.engine.unmap()
                    assert await rig.engine.check() == "", "the last outcome stands"
                await demote(vault.socket)
                assert (await vault_status(vault.socket, BOUND_S)).device_bytes == 0
                await promote(vault.socket)
                for rig in rigs:
                    assert await rig.engine.remap() == ""
                    assert not rig.engine.memory.asleep
                woken = await rigs[epoch % len(rigs)].engine.wake(epoch)
                assert woken.blocks == 0
                assert await alone(rigs[epoch % len(rigs)], request(prompt(40), 30), epoch) == whole
                await rigs[epoch % len(rigs)].engine.become_standby()


async def unbroken(kind: str) -> dict[int, list[int]]:
    """What an engine says that nobody kills."""
    with Vault() as vault:
        async with awake(kind, vault) as r:
            await r.run({number: request(text, TOKENS) for number, text in PROMPTS.items()})
            return {number: r.tokens(number) for number in PROMPTS}


async def run_to(owner: Child, tokens: int) -> None:
    await owner.do("wake", epoch=1000)
    for number, text in PROMPTS.items():
        await owner.submit(number, text, 3000)
    await owner.until(lambda: len(owner.said) == len(PROMPTS) and min(map(len, owner.said.values())) >= tokens)


async def adopt(owner: Child, standby: Child) -> dict[str, Any]:
    """Kill the owner, wake the standby that follows it."""
    await standby.follows()
    waking = standby.order("wake", epoch=1001)
    await owner.kill()
    async with asyncio.timeout(BOUND_S):
        return await waking


async def resume(owner: Child, standby: Child) -> dict[int, list[int]]:
    """Go on with every stream after what clients saw of it; all that they have in the end."""
    for number, text in PROMPTS.items():
        await standby.submit(number, text + owner.said[number][:SEEN], TOKENS, prompt_len=len(text))
    await standby.until(lambda: standby.finished.keys() >= PROMPTS.keys())
    return {number: owner.said[number][:SEEN] + standby.said[number] for number in PROMPTS}


@pytest.mark.parametrize("kind", FAILOVER_KINDS)
async def test_streams_go_on_where_the_killed_owner_ended(kind: str, vault: Vault) -> None:
    """Its vault dies and comes back: the owner serves on, and both say so and that the memory is right again. Then kill
    -9 the owner under streams: the standby, told of it, adopts its blocks, every stream goes on token for token, and
    less than a block of any is computed again; what was open comes back at the GPU fence. What was taken over proves
    itself beside them."""
    right = await unbroken(kind)
    async with vault.pair(kind, slow=True, **settings(kind, blocks=1024)) as (owner, standby):
        await run_to(owner, 5)
        vault.kill(VAULT)
        await owner.until(lambda: min(map(len, owner.said.values())) >= SEEN)
        for engine in (owner, standby):
            told = (await engine.until_facts(lambda facts: ["memory", ""] in facts["told"]))["told"]
            assert next(why for each, why in told if each == "memory").startswith("the vault is gone")
        woken = await adopt(owner, standby)
        await standby.do("prove")
        assert woken["reason"] == ""
        whole = sum((len(text) + SEEN - 1) // size_of(kind) for text in PROMPTS.values())
        assert woken["blocks"] >= whole
        assert await resume(owner, standby) == right
        facts = await standby.until_facts(
            lambda facts: facts["gpu_fence"] and not facts["quarantined"] and facts["proven"]
        )
        assert facts["resumed"] == len(PROMPTS)
        assert facts["recomputed"] <= size_of(kind)
        assert facts["found"] >= size_of(kind) * whole
        assert facts["last_epoch"] == 1001
        assert ["owner_gone", ""] in facts["told"]


@pytest.mark.parametrize("kind", FAILOVER_KINDS_LATER)
async def test_tokens_depend_on_the_pages_that_were_adopted(kind: str, vault: Vault) -> None:
    """Pages that changed under whole entries give other tokens to the engine that adopts them: they are really used."""
    right = await unbroken(kind)
    async with vault.pair(kind, slow=True, **settings(kind, blocks=1024)) as (owner, standby):
        await run_to(owner, SEEN)
        assert await owner.do("damage_pages") > len(PROMPTS)
        await adopt(owner, standby)
        said = await resume(owner, standby)
        assert all(said[number] != right[number] for number in PROMPTS)


@asynccontextmanager
async def heir_of(first: Rig, kind: str, vault: Vault) -> AsyncIterator[Rig]:
    """Another engine; of a kind that is alone in its process the first one, which stands by again."""
    if kind == "vllm":
        yield first
        return
    async with standing_by(kind, vault, engine_id=1) as heir:
        yield heir


@pytest.mark.parametrize("kind", FAILOVER_KINDS)
async def test_nothing_is_waited_for_between_the_grant_and_the_first_work(
    kind: str, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the vault's grant of a pool that is mapped already, to the wake's end, the proof's beginning and the first
    request taken, the event loop makes no turn: nothing is awaited, so nothing can delay it."""
    turns: list[str] = []
    acquire, loop = PoolClient.acquire, asyncio.get_running_loop()

    async def noted(self: PoolClient, *given: Any) -> Any:
        granted = await acquire(self, *given)
        loop.call_soon(turns.append, "a turn")
        return granted

    async with awake(kind, vault) as first, heir_of(first, kind, vault) as heir:
        right = await alone(first, request(prompt(40), 20))
        await first.engine.become_standby()
        async with asyncio.timeout(BOUND_S):
            while heir.engine.memory._follower is None or heir.engine.memory.still.locked():
                await asyncio.sleep(0.01)
        assert await heir.engine.check() == ""  # where the pool lies now
        monkeypatch.setattr(PoolClient, "acquire", noted)
        woken = await heir.engine.wake(1001)
        heir.engine.prove()
        heir.engine.submit(1, request(prompt(40), 20))
        assert (turns, woken.reason) == ([], "")
        await heir.until(lambda: heir.ended(1))
        assert heir.tokens(1) == right
        assert turns == ["a turn"]


@pytest.mark.parametrize("kind", TOGETHER)
async def test_a_pool_of_another_geometry_is_not_adopted(kind: str, vault: Vault) -> None:
    """An heir with other sizes drops what is there, makes its own pool, and says the right tokens."""
    async with awake(kind, vault) as r, standing_by(kind, vault, engine_id=1, blocks=256) as heir:
        right = await alone(r, request(prompt(40), 20))
        await r.engine.become_standby()
        woken = await heir.engine.wake(1001)
        assert woken.blocks == 0
        assert await alone(heir, request(prompt(40), 20)) == right


@pytest.mark.parametrize("kind", FAILOVER_KINDS)
async def test_a_wrong_canary_lets_nothing_through(kind: str, vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the known answer is right others' tokens come, and the word for the next adopter. Where it is wrong once it
    is asked for again, and nobody notices. Where it is wrong again the engine is disproved, gives no word, and says
    nothing of anybody until it is told to serve on. A check that is dropped says nothing, and leaves nothing behind."""
    async with standing_by(kind, vault) as r:
        mapping = r.engine.memory.pool.mapping
        with pytest.raises(Dropped):
            await r.engine.hosted.check(mapping, lambda: True)
        assert await r.engine.check() == ""
        await r.engine.wake(1000)
        known = r.engine.hosted.canary
        r.engine.prove()
        await r.run({1: request(prompt(40), 20)})
        assert len(r.tokens(1)) == 20
        async with asyncio.timeout(BOUND_S):
            while not r.engine.proven:
                await asyncio.sleep(0.01)
        assert not r.of(0), "the canary's tokens are nobody's"
        await r.engine.become_standby()
        await r.engine.wake(1001)
        wrong = replace(known, tokens=tuple(token + 1 for token in known.tokens), tolerance_nats=0.0)
        asked = [wrong]
        monkeypatch.setattr(type(r.engine.hosted), "canary", property(lambda self: asked.pop() if asked else known))
        r.engine.prove()
        await r.run({2: request(prompt(40, 1), 20)})
        assert (len(r.tokens(2)), r.heard("disproved"), asked) == (20, [], [])
        await r.engine.become_standby()
        await r.engine.wake(1002)
        monkeypatch.setattr(type(r.engine.hosted), "canary", property(lambda self: wrong))
        r.engine.prove()
        r.engine.submit(3, request(prompt(40, 2), 20))
        await r.until(lambda: bool(r.heard("disproved")))
        assert (r.of(3), r.engine.proven) == ([], False)
        r.engine.serve_on()
        await r.until(lambda: r.ended(3))
        assert (len(r.tokens(3)), r.engine.proven) == (20, False)


def test_the_docs_show_the_example_that_is_run() -> None:
    """The engine of the docs page is the one that passes here, to the letter, in 60 lines at most."""
    code = (EXAMPLES / "counting_engine.py").read_text()
    assert len(code.splitlines()) <= 60
    assert code.split('"""\n', 1)[1].strip() in (EXAMPLES.parent / "engines-of-your-own.md").read_text()


def test_the_face_loads_no_torch() -> None:
    """`holdfast.engines` has the names an adopter relies on, and looking at all of them loads no torch."""
    code = "import sys, holdfast.engines as e; [getattr(e, n) for n in e.__all__]; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "False"


def test_torch_is_here() -> None:
    """The torch engine is tested wherever torch is installed."""
    torch = pytest.importorskip("torch", reason="torch is not installed: tests/engines/torch was left out")
    assert torch.ones(2).sum().item() == 2
