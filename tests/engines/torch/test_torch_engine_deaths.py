"""A killed torch engine's streams go on in another, from the KV it left; what is damaged there is never believed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from torch_rig import BLOCK, Child, Vault, prompt, request, rig, running_vault

TOKENS = 120
PROMPTS = {number: prompt(20 + 23 * number, number) for number in range(1, 7)}
SAMPLING = {number: {"temperature": 0.8 if number % 2 else 0.0, "seed": number} for number in PROMPTS}


@pytest.fixture
def vault() -> Iterator[Vault]:
    with running_vault() as started:
        yield started


@pytest.fixture(scope="module")
def unbroken() -> dict[int, list[int]]:
    """What an engine says that nobody kills."""

    async def run() -> dict[int, list[int]]:
        with running_vault() as vault:
            async with rig(vault) as r:
                await r.run({n: request(text, TOKENS, **SAMPLING[n]) for n, text in PROMPTS.items()})
                return {number: r.tokens(number) for number in PROMPTS}

    return asyncio.run(run())


async def adopt(owner: Child, standby: Child) -> dict[str, object]:
    """Kill the owner, wake the standby that follows it."""
    await standby.until_facts(lambda facts: "None" not in facts["follower"])
    waking = standby.order("wake", epoch=1001)
    await owner.kill()
    async with asyncio.timeout(20):
        return await waking  # type: ignore[no-any-return]


async def run_to(owner: Child, tokens: int) -> None:
    await owner.do("wake", epoch=1000)
    for number, text in PROMPTS.items():
        await owner.submit(number, text, TOKENS, **SAMPLING[number])
    await owner.until(lambda: len(owner.said) == len(PROMPTS) and min(map(len, owner.said.values())) >= tokens)


async def resume(owner: Child, standby: Child) -> dict[int, list[int]]:
    """Go on with every stream; all that clients saw of each."""
    for number, text in PROMPTS.items():
        given = SAMPLING[number] | {"prompt_len": len(text)}
        await standby.submit(number, text + owner.said[number], TOKENS, **given)
    await standby.until(lambda: len(standby.finished) == len(PROMPTS))
    return {number: owner.said[number] + standby.said[number] for number in PROMPTS}


async def test_streams_go_on_where_the_killed_owner_ended(vault: Vault, unbroken: dict[int, list[int]]) -> None:
    """Kill -9 the owner in mid-stream: the standby adopts its blocks, every stream goes on token for token, and less
    than a block of any is computed again; what was open comes back at the GPU fence."""
    async with vault.pair() as (owner, standby):
        await run_to(owner, 30)
        woken = await adopt(owner, standby)
        assert not owner.finished, "the kill came too late to mean anything"
        assert woken["reason"] == ""
        whole = sum((len(text) + 29) // BLOCK for text in PROMPTS.values())
        assert isinstance(woken["blocks"], int)
        assert woken["blocks"] >= whole
        assert await resume(owner, standby) == unbroken
        facts = await standby.until_facts(lambda facts: facts["gpu_fence"] and not facts["quarantined"])
        assert facts["resumed"] == len(PROMPTS)
        assert facts["recomputed"] < BLOCK
        assert facts["found"] >= BLOCK * whole


async def test_tokens_depend_on_the_pages_that_were_adopted(vault: Vault, unbroken: dict[int, list[int]]) -> None:
    """Pages that changed under whole entries give other tokens to the engine that adopts them: they are really used."""
    async with vault.pair() as (owner, standby):
        await run_to(owner, TOKENS // 2)
        assert await owner.do("damage_pages") > len(PROMPTS)
        await adopt(owner, standby)
        said = await resume(owner, standby)
        assert all(said[number] != unbroken[number] for number in PROMPTS)


async def test_damaged_and_planted_entries_are_never_used(vault: Vault, unbroken: dict[int, list[int]]) -> None:
    """Entries that are torn, damaged, of another generation, moved or planted are not believed: all is computed again,
    and every token is right."""
    async with vault.pair() as (owner, standby):
        await owner.do("wake", epoch=1000)
        for number in (1, 2, 3, 4):
            await owner.submit(number, PROMPTS[number], TOKENS, **SAMPLING[number])
        await owner.until(lambda: len(owner.finished) == 4)
        assert await owner.do("damage_entries") > 16
        for number in (5, 6):
            assert await owner.do("plant", tokens=PROMPTS[number]) >= 8
        woken = await adopt(owner, standby)
        assert (woken["blocks"], woken["reason"]) == (0, "")
        for number, text in PROMPTS.items():
            await standby.submit(number, text, TOKENS, **SAMPLING[number])
        await standby.until(lambda: len(standby.finished) == len(PROMPTS))
        assert {number: standby.said[number] for number in PROMPTS} == unbroken
        assert (await standby.do("facts"))["found"] == 0
