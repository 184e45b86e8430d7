"""A killed torch engine's streams go on in another, from the KV it left; what is damaged there is never believed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from engine_rig import Child, Vault, running_vault
from torch_rig import prompt, request, rig

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
    await standby.follows()
    waking = standby.order("wake", epoch=1001)
    await owner.kill()
    async with asyncio.timeout(20):
        return await waking  # type: ignore[no-any-return]


async def test_damaged_and_planted_entries_are_never_used(vault: Vault, unbroken: dict[int, list[int]]) -> None:
    """Entries that are torn, damaged, of another generation, moved or planted are not believed: all is computed again,
    and every token is right."""
    async with vault.pair("torch") as (owner, standby):
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
