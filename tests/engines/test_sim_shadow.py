"""The sim engine with its memory in a real vault: roles, adoption after SIGKILL, and what its tokens depend on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from shadow_rig import Failed, Vault
from sim_rig import expected, request

BLOCK = 16
PROMPTS = {number: [100 + number * 7 + place for place in range(20 + 11 * number)] for number in range(1, 7)}


@pytest.fixture
def vault() -> Iterator[Vault]:
    with Vault() as started:
        yield started


async def test_first_writes_and_second_maps(vault: Vault) -> None:
    """Engine 0 writes the weights, engine 1 maps and verifies the same ones, both pass their canary, and neither
    serves before it is woken."""
    async with vault.engine(0) as first, vault.engine(1) as second:
        assert await first.do("check")
        assert await second.do("check")
        with pytest.raises(Failed, match="stands by"):
            await second.submit(1, [5], 3)
    assert vault.log.read_text().count("committed generation") == 1


async def test_other_weights_are_replaced(vault: Vault) -> None:
    """An engine that finds other weights than its own loads its own beside them, and serves; who has the old ones
    mapped keeps them, and does not put them back."""
    async with vault.engine(0) as first, vault.engine(1, vault_gib=0.008) as other:
        await other.do("wake", epoch=1000)
        await other.submit(1, PROMPTS[1], 20)
        await other.until(lambda: 1 in other.finished)
        assert other.said[1] == expected(request(PROMPTS[1], 20), 20)
        assert await first.do("check")
        assert not any(kind == "memory" for kind, _ in (await first.do("facts"))["told"])
    assert vault.log.read_text().count("committed generation") == 2


async def test_streams_go_on_where_the_killed_owner_ended(vault: Vault) -> None:
    """Kill -9 the owner under load: a standby adopts its blocks, every stream goes on token for token, and less than a
    block of any is computed again."""
    async with vault.engine(0, tpot_ms=1.0) as owner, vault.engine(1) as standby:
        assert (await owner.do("wake", epoch=1000))["blocks"] == 0
        for number, prompt in PROMPTS.items():
            await owner.submit(number, prompt, 200)
        await owner.until(lambda: len(owner.said) == len(PROMPTS) and min(map(len, owner.said.values())) >= 40)
        await standby.until_facts(lambda facts: "None" not in facts["follower"])
        waking = standby.order("wake", epoch=1001)
        await owner.kill()
        async with asyncio.timeout(20):
            woken = await waking
        assert woken["reason"] == ""
        assert woken["blocks"] >= sum((len(prompt) + 40 - 1) // BLOCK for prompt in PROMPTS.values())
        for number, prompt in PROMPTS.items():
            await standby.submit(number, prompt + owner.said[number], 200, len(prompt))
        await standby.until(lambda: len(standby.finished) == len(PROMPTS))
        for number, prompt in PROMPTS.items():
            assert owner.said[number] + standby.said[number] == expected(request(prompt, 200), 200)
        facts = await standby.until_facts(lambda facts: facts["gpu_fence"] and not facts["quarantined"])
        assert facts["resumed"] == len(PROMPTS)
        assert facts["recomputed"] < BLOCK
        assert ["owner_gone", ""] in facts["told"]
        assert facts["last_epoch"] == 1001


async def test_a_lost_pool_is_computed_again(vault: Vault) -> None:
    """What is not in the pool is counted as computed again: the whole text but its last position."""
    async with vault.engine(0) as engine:
        await engine.do("wake", epoch=1000)
        prompt = PROMPTS[3]
        text = expected(request(prompt, 80), 80)
        await engine.submit(1, prompt + text[:50], 80, len(prompt))
        await engine.until(lambda: 1 in engine.finished)
        assert engine.said[1] == text[50:]
        assert (await engine.do("facts"))["recomputed"] == len(prompt) + 50 - 1


async def test_tokens_depend_on_the_pages(vault: Vault) -> None:
    """A page whose bytes changed gives other tokens to whoever believes it."""
    async with vault.engine(0) as engine:
        await engine.do("wake", epoch=1000)
        prompt = PROMPTS[4]
        right = expected(request(prompt, 30), 30)
        for number in (1, 2):
            await engine.submit(number, prompt, 30)
            await engine.until(lambda number=number: number in engine.finished)
            assert engine.said[number] == right
        await engine.do("corrupt")
        await engine.submit(3, prompt, 30)
        await engine.until(lambda: 3 in engine.finished)
        assert engine.said[3] != right


async def test_flipped_weights_make_wrong_tokens_and_fail_the_canary(vault: Vault) -> None:
    """Weights that do not read as they should show in streams and in the canary, until the fault is cleared."""
    async with vault.engine(0) as engine:
        await engine.do("wake", epoch=1000)
        right = expected(request([5, 6, 7], 20), 20)
        for number, (fault, good) in enumerate(((None, True), ("memory_flip", False), ("clear", True))):
            if fault:
                await engine.do("fault", fault=fault)
            await engine.submit(number, [5, 6, 7], 20)
            await engine.until(lambda number=number: number in engine.finished)
            assert (engine.said[number] == right) is good
            assert await engine.do("check") is good
        await engine.do("fault", fault="wrong_tokens")
        assert not await engine.do("check")


async def test_streams_beyond_the_pool_wait_and_keep_their_tokens(vault: Vault) -> None:
    """With too few blocks for all, the youngest wait and come back; everyone's tokens are as if alone."""
    async with vault.engine(0, kv_blocks=24, block_size=4) as engine:
        await engine.do("wake", epoch=1000)
        for number in range(6):
            await engine.submit(number, [number + 1] * 6, 60)
        await engine.until(lambda: len(engine.finished) == 6)
        for number in range(6):
            assert engine.said[number] == expected(request([number + 1] * 6, 60), 60)


async def test_rest_then_wake_again(vault: Vault) -> None:
    """A planned handover: what was published is adopted by the other, and by the first again after it, each time with
    nothing recomputed that was whole."""
    async with vault.engine(0) as first, vault.engine(1) as second:
        prompt, text = PROMPTS[5], expected(request(PROMPTS[5], 90), 90)
        await first.do("wake", epoch=1000)
        await first.submit(1, prompt, 30)
        await first.until(lambda: 1 in first.finished)
        await first.do("rest")
        with pytest.raises(Failed, match="stands by"):
            await first.submit(9, [5], 3)
        for epoch, (engine, made) in enumerate(((second, 30), (first, 60)), 1001):
            woken = await engine.do("wake", epoch=epoch)
            assert woken["reason"] == ""
            await engine.do("passed")
            await engine.submit(2, prompt + text[:made], made + 30, len(prompt))
            await engine.until(lambda engine=engine: 2 in engine.finished)
            assert engine.said[2] == text[made : made + 30]
            facts = await engine.do("facts")
            assert facts["recomputed"] < BLOCK
            assert await engine.do("check")
            await engine.do("rest")
