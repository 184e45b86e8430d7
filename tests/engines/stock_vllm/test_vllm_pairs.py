"""Two vLLM engines at one vault, each in a process of its own: what the contract of all engines says of two in one
process, a standby that has given its memory back, and weights that were found damaged."""

from __future__ import annotations

import pytest

from tests.rigs.agents import OrderFailed
from tests.rigs.engines.any_engine import VLLM_BLOCK_GIB, Child, Vault
from tests.rigs.engines.vllm_models import made

pytest.importorskip("vllm.version", reason="vllm is not installed here: make test-vllm")
pytestmark = pytest.mark.processes

BLOCK = 32
TOKENS = 60
SEEN = 20  # of every stream, when its engine is stopped
PROMPTS = {n: [2 + (37 * n + 31 * at * at + 101 * at) % 900 for at in range(40 + 13 * n)] for n in (1, 2, 3)}
POOL_BYTES = 20 * 1024 * 1024


@pytest.fixture(autouse=True)
def model() -> None:
    """Made once, before several processes want it."""
    made("llama")


async def submit(engine: Child, said: dict[int, list[int]], tokens: int = TOKENS) -> None:
    for number, prompt in PROMPTS.items():
        text = prompt + said.get(number, [])
        await engine.submit(number, text, tokens, prompt_len=len(prompt), temperature=0.0 if number == 1 else 0.7)


async def to_the_end(engine: Child, said: dict[int, list[int]]) -> dict[int, list[int]]:
    engine.said.clear()
    engine.finished.clear()
    await submit(engine, said)
    await engine.until(lambda: engine.finished.keys() >= PROMPTS.keys())
    return {number: said.get(number, []) + engine.said[number] for number in PROMPTS}


async def begun(engine: Child) -> dict[int, list[int]]:
    """Streams under way, and what they said so far."""
    engine.said.clear()
    engine.finished.clear()
    await submit(engine, {}, 1500)
    await engine.until(lambda: all(len(engine.said.get(number, ())) >= SEEN for number in PROMPTS))
    return {number: engine.said[number][:SEEN] for number in PROMPTS}


async def test_the_second_maps_what_the_first_wrote_and_finds_its_blocks(vault: Vault) -> None:
    """Weights are written once, both answer their canary, and neither takes work before it is woken. At rest each
    stream is named as closed, and no work is taken; what was published is found by the other engine, and by the first
    again after it."""
    async with vault.pair("vllm", slow=True) as (first, second):
        assert vault.commits() == 1
        for each in (first, second):
            assert await each.do("check") == ""
            with pytest.raises(OrderFailed, match="not awake"):
                await each.submit(9, [5], 3)
        await first.do("wake", epoch=100)
        right = await to_the_end(first, {})
        await begun(first)
        await first.do("become_standby")
        await first.until(lambda: sorted(first.said.get(0, ())) == sorted(PROMPTS))
        with pytest.raises(OrderFailed, match="not awake"):
            await first.submit(9, [5], 3)
        for epoch, (engine, seen) in enumerate(((second, 30), (first, 50)), 101):
            woken = await engine.do("wake", epoch=epoch)
            assert (woken["reason"], woken["blocks"] >= 4) == ("", True)
            await engine.do("vouch")
            said = {number: tokens[:seen] for number, tokens in right.items()}
            assert await to_the_end(engine, said) == right
            assert (await engine.do("facts"))["recomputed"] <= BLOCK
            await engine.do("become_standby")


async def test_a_pool_of_another_geometry_is_not_adopted(vault: Vault) -> None:
    """An heir with fewer blocks, which stands by beside them with memory of its own, drops what is there, makes its own
    pool, and says the same tokens."""
    first, heir = (Child(vault, at, "vllm", kv_gib=blocks * VLLM_BLOCK_GIB) for at, blocks in ((0, 300), (1, 120)))
    async with vault.children(first, heir):
        await first.do("wake", epoch=100)
        right = await to_the_end(first, {})
        assert await heir.do("check") == ""
        await first.do("become_standby")
        assert (await heir.do("wake", epoch=101))["blocks"] == 0
        assert await to_the_end(heir, {}) == right


async def test_a_standby_without_its_memory_wakes_by_mapping_it_again(vault: Vault) -> None:
    """Standing by it has nothing of the vault's mapped, and less in memory; woken it has weights and pool where they
    were, adopts what was whole, and every stream goes on. At rest it gives all of it back."""
    async with vault.pair("vllm", slow=True, standby="unmapped") as (owner, standby):
        before, ready = await standby.do("mapped"), await standby.do("facts")
        assert (before["mapped"], ready["asleep"]) == (0, True)
        await owner.do("wake", epoch=100)
        right = await to_the_end(owner, {})
        await owner.do("vouch")
        said = await begun(owner)
        await owner.kill()
        woken = await standby.do("wake", epoch=101)
        assert (woken["reason"], woken["blocks"] >= 4) == ("", True)
        await standby.do("vouch")
        awake, facts = await standby.do("mapped"), await standby.do("facts")
        assert awake["mapped"] > POOL_BYTES
        assert (facts["asleep"], facts["address"]) == (False, ready["address"])
        assert await to_the_end(standby, said) == right
        assert (await standby.do("facts"))["recomputed"] <= BLOCK
        await standby.do("become_standby")
        asleep = await standby.do("mapped")
        assert asleep["mapped"] == 0
        print(f"\nbytes mapped and resident: asleep {before}, awake {awake}, asleep again {asleep}")
        assert (await standby.do("wake", epoch=102))["reason"] == ""
        assert await to_the_end(standby, {}) == right


async def test_an_engine_with_damaged_weights_ends_and_the_next_one_has_them_right(vault: Vault) -> None:
    """A flipped bit is found when the weights are compared, and named. The engine cannot load them anew while it lives:
    it says so, and has to end; what it computed is not believed. Its standby goes on with every stream. An engine that
    starts and finds them damaged loads them anew beside what the leader reads, and the leader reads the new ones once
    it has stepped back."""
    async with vault.pair("vllm", slow=True) as (owner, standby):
        await owner.do("wake", epoch=100)
        right = await to_the_end(owner, {})
        assert await owner.do("verify") == ""
        said = await begun(owner)
        flipped = {flip.partition(": ")[0] for flip in await owner.do("flip", seed=3)}
        assert (await owner.do("verify")).removesuffix(" is not what was written") in flipped
        with pytest.raises(OrderFailed, match="cannot load its weights again: it must be restarted"):
            await owner.do("renew")
        assert sorted(owner.said[0]) == sorted(PROMPTS), "its streams were given back"
        await owner.kill()
        woken = await standby.do("wake", epoch=101)
        assert (woken["blocks"], bool(woken["reason"])) == (0, True)
        assert await to_the_end(standby, said) == right
        await standby.do("vouch")
        await after_damage(vault, standby, right)


async def after_damage(vault: Vault, leader: Child, right: dict[int, list[int]]) -> None:
    fresh = Child(vault, 0, "vllm")
    await fresh.start()
    try:
        await fresh.do("damage")
        await fresh.do("load")
        assert (vault.commits(), await fresh.do("check")) == (2, "")
        assert await to_the_end(leader, {}) == right
        load = (await leader.do("facts"))["load"]
        await leader.do("become_standby")
        await leader.until_facts(lambda facts: facts["load"] > load and facts["weights_ready"])
        assert await leader.do("check") == ""
        assert (await fresh.do("wake", epoch=102))["reason"] == ""
        assert await to_the_end(fresh, {}) == right
    finally:
        await fresh.kill()
