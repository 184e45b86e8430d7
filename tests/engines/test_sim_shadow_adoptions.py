"""What adopters make of it when those before them died: of the pool, of the weights, and of the count itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_rig import SETTINGS, Child, Vault, request
from sim_rig import expected

PROMPT = [100 + place for place in range(70)]
RIGHT = expected(request(PROMPT, 20), 20)
BLOCKS = 5  # whole ones of that stream
TIGHT_MIB = 24  # weights and pool


@pytest.fixture
def vault() -> Iterator[Vault]:
    with Vault() as started:
        yield started


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    """A vault with room for weights, pool and the pool's index, and none for the weights once more."""
    monkeypatch.setitem(SETTINGS["sim"], "vault_gib", TIGHT_MIB / 1024)
    with Vault(budget_bytes=(TIGHT_MIB + 4) * 1024**2) as started:
        yield started


async def served(engine: Child, number: int) -> None:
    """A stream through it, with the right tokens."""
    await engine.submit(number, PROMPT, 20)
    await engine.until(lambda: number in engine.finished)
    assert engine.said[number] == RIGHT


def vouches(facts: dict[str, Any]) -> bool:
    """Whether its last word on its memory is that it was verified."""
    return [why for kind, why in facts["told"] if kind == "memory"][-1:] == [""]


async def deaths(vault: Vault, count: int, epoch: int = 1000) -> None:
    """So many leaders, one after the other, each killed before its canary's word."""
    for place in range(count):
        async with vault.engine(place + 1) as engine:
            await engine.do("wake", epoch=epoch + place)
            await served(engine, 1)


async def test_deaths_after_adoptions_empty_the_pool_then_doubt_the_weights(vault: Vault) -> None:
    """The first adopter believes the pool, the second (no canary since) believes nothing, the third verifies the
    weights, which are right and stay; with nothing left to doubt the count begins anew: the next one believes again."""
    rungs = [(0, "", False), (BLOCKS, "", False), (0, "no canary", False), (0, "no canary", True), (BLOCKS, "", False)]
    for epoch, (blocks, reason, doubted) in enumerate(rungs, 1000):
        async with vault.engine(epoch - 999) as engine:
            woken = await engine.do("wake", epoch=epoch)
            assert (woken["blocks"], reason in woken["reason"]) == (blocks, True)
            assert bool(woken["reason"]) is bool(reason)
            facts = await engine.do("facts")
            assert bool([why for kind, why in facts["told"] if kind == "loading"]) is doubted
            assert facts["reloaded"] is False
            await served(engine, 1)
    assert "generation 2" not in vault.log.read_text()


async def test_any_number_of_deaths_is_survived_where_two_copies_do_not_fit(tight: Vault) -> None:
    """Nine leaders die one after the other, three times as many as it takes to doubt the weights, in a vault with room
    for one copy of them: every adopter wakes and serves, and a standby that watched it all does so at the end."""
    async with tight.engine(0) as watcher:
        await deaths(tight, 9)
        await watcher.do("wake", epoch=2000)
        await served(watcher, 2)
    assert "writes generation 2" not in tight.log.read_text()


async def test_damaged_weights_are_replaced_in_place_where_two_copies_do_not_fit(tight: Vault) -> None:
    """The third adopter finds its weights damaged and no room beside them: standbys are asked to let go, the weights
    are dropped and written anew, everybody maps the new ones, and the next death is one like any other."""
    async with tight.engine(0) as watcher:
        await deaths(tight, 3)
        async with tight.engine(8) as adopter:
            await adopter.do("damage")
            await adopter.do("wake", epoch=1500)
            assert (await adopter.do("facts"))["reloaded"] is True
            await served(adopter, 1)
        told = (await watcher.until_facts(vouches))["told"]
        assert ["memory", "the weights were replaced"] in told
        assert await watcher.do("check") == ""
        woken = await watcher.do("wake", epoch=1501)
        assert (woken["blocks"], woken["reason"]) == (BLOCKS, "")
        await served(watcher, 2)
    log = tight.log.read_text()
    assert log.index("generation 1 is dropped") < log.index("committed generation 3")


async def test_damaged_weights_are_replaced_beside_where_both_fit(vault: Vault) -> None:
    """With room for both nobody is asked to let go: a standby keeps its own until the new ones are committed."""
    async with vault.engine(0) as watcher:
        await deaths(vault, 3)
        async with vault.engine(8) as adopter:
            await adopter.do("damage")
            await adopter.do("wake", epoch=1500)
            await watcher.until_facts(lambda facts: ["memory", "the weights were replaced"] in facts["told"])
            await served(adopter, 1)
        await watcher.until_facts(vouches)
        await watcher.do("wake", epoch=1501)
        await served(watcher, 2)
    log = vault.log.read_text()
    assert log.index("committed generation 2") < log.index("generation 1 is dropped")
