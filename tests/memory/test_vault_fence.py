"""What ends an owner in the vault's eyes: its process's end or its own word, never the loss of its connection alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from vault_rig import Rig, descriptors_of, facts, until

from holdfast.testing.agents import Agent
from holdfast.testing.processes import fd_count

pytestmark = pytest.mark.processes


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with Rig() as started:
        yield started


async def owning(engine: Agent) -> None:
    await engine.do("open")
    assert await engine.do("own", epoch=10) is False
    await engine.do("make", text="pages")


async def back(engine: Agent) -> bool:
    return bool(await engine.do("lost")) and bool(await engine.do("connected"))


async def phase(rig: Rig) -> str:
    async with rig.client(9) as looker:
        return str((await facts(looker))["pool"])


@pytest.mark.parametrize("how", ["no_message", "no_frame", "no_descriptors", "hung_up"])
async def test_owner_that_lost_its_connection_and_lives_keeps_the_fence_closed(rig: Rig, how: str) -> None:
    """Cut off by the vault for what it sent, or by itself: it comes back to its pool, and only its death lets another
    one in."""
    async with rig.engine(0) as owner, rig.engine(1) as second:
        await owning(owner)
        await second.do("open")
        granted = second.order("own", epoch=11, timeout_ms=60_000)
        await owner.do("break_off", how=how)
        await until(lambda: back(owner), "it is back")
        assert await phase(rig) == "OWNED(10)"
        assert not granted.done()
        assert await owner.do("pool_text") == "pages"
        await owner.kill()
        assert await granted is True
        assert await second.do("map_pool") == "pages"


async def test_vault_out_of_descriptors_does_not_pass_a_living_owners_fence(rig: Rig) -> None:
    """What the owner sends is cut off on the way; it keeps its seat until the vault can have it back."""
    async with rig.engine(0) as owner, rig.engine(1) as second:
        await owning(owner)
        await second.do("open")
        granted = second.order("own", epoch=11, timeout_ms=60_000)
        await until(lambda: _somebody_waits(rig), "the second waits")
        vault = rig.pids("server")[0]
        with descriptors_of(vault, fd_count(vault)):
            await owner.do("send_descriptors")
            await until(lambda: _was_cut_off(owner), "it is cut off")
            assert not granted.done()
        await until(lambda: back(owner), "it is back")
        assert await phase(rig) == "OWNED(10)"
        await owner.kill()
        assert await granted is True


async def _somebody_waits(rig: Rig) -> bool:
    async with rig.client(9) as looker:
        return bool((await facts(looker))["waiting"])


async def _was_cut_off(engine: Agent) -> bool:
    return bool(await engine.do("lost"))


async def test_cut_off_owner_is_expected_back_by_the_next_vault_too(rig: Rig) -> None:
    """Its seat is in the keeper's records: a vault killed while the owner is cut off does not let another one in."""
    async with rig.engine(0) as owner, rig.engine(1) as second:
        await owning(owner)
        await second.do("open")
        await second.do("join", epoch=None)
        await asyncio.gather(owner.do("break_off", how="no_message"), asyncio.to_thread(rig.kill, "server"))
        granted = second.order("own", epoch=11, timeout_ms=60_000)
        await until(lambda: back(owner), "it is back")
        assert await phase(rig) == "OWNED(10)"
        assert not granted.done()
        await owner.kill()
        assert await granted is True


async def test_owner_that_leaves_while_the_vault_is_away_holds_nobody_up(rig: Rig) -> None:
    """A client of a process that lives on is closed just after the vault was killed: it takes its leave of the next
    vault, and the pool is another's for the asking."""
    async with rig.engine(0) as owner, rig.engine(1) as second:
        await owning(owner)
        rig.kill("server")
        await owner.do("hang_up")
        await second.do("open")
        assert await second.do("own", epoch=11, timeout_ms=10_000) is True
