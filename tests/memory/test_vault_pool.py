"""The KV pool over real processes: who may own it, when its predecessors are fenced, what survives whom."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from vault_rig import Rig, facts, until

from holdfast.memory.client.calls import MemoryLost
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.devices import open_device
from holdfast.memory.errors import VaultRefused
from holdfast.memory.protocol import PoolGranted, PoolNews
from holdfast.testing.agents import Agent, OrderFailed

pytestmark = pytest.mark.processes
MIB = 1024 * 1024


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with Rig() as started:
        yield started


async def owner_of(engine: Agent, epoch: int, text: str = "pages") -> None:
    await engine.do("open")
    assert await engine.do("own", epoch=epoch) is False
    await engine.do("make", text=text)


async def test_pool_of_a_killed_owner_is_adopted_with_its_pages(rig: Rig) -> None:
    """Pages and index survive SIGKILL; the next epoch gets them, past both fences."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await owner_of(first, 10)
        await second.do("open")
        await first.kill()
        assert await second.do("own", epoch=11) is True
        assert await second.do("map_pool") == "pages"
        await until(lambda: _fenced(second), "both fences pass")


async def _fenced(engine: Agent) -> bool:
    return await engine.do("fences") == [True, True]


async def test_frozen_owner_keeps_the_pool_until_it_is_killed(rig: Rig) -> None:
    """SIGSTOP: it is still connected, so the newcomer times out; after SIGKILL it is granted."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await owner_of(first, 10)
        await second.do("open")
        first.signal(signal.SIGSTOP)
        with pytest.raises(OrderFailed, match="TimeoutError"):
            await second.do("own", epoch=11, timeout_ms=300)
        granted = second.order("own", epoch=12)
        await asyncio.sleep(0)
        assert not granted.done()
        await first.kill()
        assert await granted is True


async def test_rank_of_the_old_epoch_that_lives_keeps_the_fence_closed(rig: Rig) -> None:
    """The parent is dead, its second process is not: nobody else may touch the pages yet."""
    async with rig.engine(0) as parent, rig.engine(0) as rank, rig.engine(1) as second:
        await owner_of(parent, 10)
        await asyncio.gather(rank.do("open"), second.do("open"))
        await rank.do("join", epoch=10)
        await parent.kill()
        with pytest.raises(OrderFailed, match="TimeoutError"):
            await second.do("own", epoch=11, timeout_ms=300)
        granted = second.order("own", epoch=12)
        await rank.kill()
        assert await granted is True


async def test_gpu_fence_waits_for_the_process_not_for_the_connection(rig: Rig) -> None:
    """Connection closed, process alive: the CPU fence has passed, the GPU fence only when the pidfd says so."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await owner_of(first, 10)
        await second.do("open")
        await first.do("hang_up")
        assert await second.do("own", epoch=11) is True
        assert await second.do("fences") == [True, False]
        rig.kill("server")  # and a new vault knows it too
        await until(lambda: _reconnected(second, rig), "it is back")
        assert await second.do("fences") == [True, False]
        await first.kill()
        await until(lambda: _fenced(second), "the GPU fence passes")


async def test_gpu_fence_is_not_passed_with_somebody_elses_pidfd(rig: Rig) -> None:
    """A process that sends the pidfd of one that is over is known by the kernel's word for who connected."""
    async with rig.engine(0) as liar, rig.engine(1) as second:
        await liar.do("open_as_the_dead")
        assert await liar.do("own", epoch=10) is False
        await liar.do("make", text="pages")
        await second.do("open")
        await liar.do("hang_up")
        assert await second.do("own", epoch=11) is True
        assert await second.do("fences") == [True, False]
        await liar.kill()
        await until(lambda: _fenced(second), "the GPU fence passes")


async def _lost(engine: Agent, times: int) -> bool:
    return len(await engine.do("lost")) >= times


async def _reconnected(engine: Agent, rig: Rig) -> bool:
    return bool(await engine.do("lost")) and await engine.do("connected")


async def test_planned_handover_needs_nobodys_death(rig: Rig) -> None:
    """Quiesced: the next owner gets pages and both fences while the last one lives on."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await owner_of(first, 10)
        await second.do("open")
        granted = second.order("own", epoch=11)
        await first.do("quiesce")
        assert await granted is True
        assert await second.do("map_pool") == "pages"
        await until(lambda: _fenced(second), "both fences pass")
        with pytest.raises(OrderFailed, match="stale_epoch"):
            await first.do("own", epoch=10)


async def test_other_geometry_drops_the_pool(rig: Rig) -> None:
    """Pages of another shape are no use to anyone: the new owner makes its own."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await owner_of(first, 10)
        await second.do("open")
        await first.kill()
        assert await second.do("own", epoch=11, geometry="other") is False
        assert (await second.do("facts"))["pool_bytes"] == 0
        await second.do("make", text="fresh")
        assert (await second.do("facts"))["pool_bytes"] > 0


async def test_stale_epoch_is_refused_also_by_a_restarted_vault(rig: Rig) -> None:
    """Only larger epochs are ever granted, whoever of the vaults is asked."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await owner_of(first, 10)
        await first.kill()
        await second.do("open")
        for kills in (1, 2):
            for epoch in (9, 10):
                with pytest.raises(OrderFailed, match="stale_epoch"):
                    await second.do("own", epoch=epoch)
            rig.kill("server")
            await until(lambda: _lost(second, kills), "it notices")  # noqa: B023
            await second.do("open")
        assert await second.do("own", epoch=11) is True


async def test_vault_killed_while_it_is_owned_changes_nothing_for_the_owner(rig: Rig) -> None:
    """It reattaches, still owns the pool, and the newcomer still waits for it."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await owner_of(first, 10)
        rig.kill("server")
        await until(lambda: _reconnected(first, rig), "the owner is back")
        await second.do("open")
        with pytest.raises(OrderFailed, match="TimeoutError"):
            await second.do("own", epoch=11, timeout_ms=300)
        await first.kill()
        assert await second.do("own", epoch=12) is True
        assert await second.do("map_pool") == "pages"


async def test_vault_killed_between_grant_and_use_leaves_the_owner_its_pool(rig: Rig) -> None:
    """The owner has not made its pages when the vault dies: it comes back owning, makes them, and they are adopted."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await asyncio.gather(first.do("open"), second.do("open"))
        assert await first.do("own", epoch=10) is False
        rig.kill("server")
        await until(lambda: _reconnected(first, rig), "the owner is back")
        await first.do("make", text="later")
        assert await first.do("pool_text") == "later"
        await first.kill()
        await until(lambda: second.do("lost"), "it notices")
        await second.do("open")
        assert await second.do("own", epoch=11) is True
        assert await second.do("map_pool") == "later"
        await second.do("hang_up")


async def test_owner_killed_before_its_pool_is_complete_leaves_none(rig: Rig) -> None:
    """Granted and never made: the next one is told to make its own."""
    async with rig.engine(0) as first, rig.client(1) as client:
        await first.do("open")
        assert await first.do("own", epoch=10) is False
        await first.kill()
        pool = PoolClient(client, open_device("host-0"))
        assert not (await pool.acquire(11, "g", 2000)).adopt
        assert (await facts(client))["pool"] == "OWNED(11)"


async def test_answer_lost_with_the_vault_is_given_up(rig: Rig) -> None:
    """Granted, but the vault died before the answer arrived: the asker owns nothing, and may ask with a new epoch."""
    async with rig.client(0) as client:
        news: list[PoolNews] = []
        pool = PoolClient(client, open_device("host-0"), on_news=news.append)
        await client.register_mapping(None)
        keeper = rig.pids("keeper")[0]
        os.kill(keeper, signal.SIGSTOP)  # no answer before it knows
        asking = asyncio.ensure_future(pool.acquire(10, "g", 5000))
        await until(lambda: PoolNews("granted", 10) in news, "the vault has granted it")
        rig.kill("server")
        os.kill(keeper, signal.SIGCONT)
        with pytest.raises(ConnectionError):
            await asking
        assert client.connected
        assert client.last_epoch == 10
        assert not (await pool.acquire(11, "g", 2000)).adopt


async def test_pool_comes_back_from_its_owner_after_vault_and_keeper_died(rig: Rig) -> None:
    """The owner gives index and pages back and goes on owning; the next epoch adopts them."""
    noticed: list[object] = []
    async with rig.engine(1) as second, rig.client(0, on_notice=noticed.append) as client:
        pool = PoolClient(client, open_device("host-0"))
        assert not (await pool.acquire(10, "g", 2000)).adopt
        mapping = await pool.make(MIB, [2 * MIB])
        client.device.write(mapping.pages_address, b"alive")
        rig.kill("keeper", "server")
        await until(lambda: rig.vaults["host-0"].gone() and not client.connected, "both are gone")
        assert rig.vaults["host-0"].ensure()
        await until(lambda: client.connected, "it is back")
        assert (await facts(client))["pool"] == "OWNED(10)"
        assert client.device.read(mapping.pages_address, 5) == b"alive"
        assert not [notice for notice in noticed if isinstance(notice, MemoryLost)]
        await second.do("open")
        granted = second.order("own", epoch=11)
        await pool.quiesce()
        assert await granted is True
        assert await second.do("map_pool") == "alive"
        pool.unmap()


async def test_pool_that_was_not_lost_cannot_be_donated(rig: Rig) -> None:
    """Giving back is for after a total loss; else it would be a way around the election."""
    async with rig.client(0) as client, rig.client(1) as other:
        pool, thief = PoolClient(client, open_device("host-0")), PoolClient(other, open_device("host-0"))
        await pool.acquire(10, "g", 2000)
        await pool.make(MIB, [2 * MIB])
        await thief.map(writable=False)
        thief.granted, thief.geometry = PoolGranted(0, 99, True, 10), "g"
        with pytest.raises(VaultRefused) as refused:
            await thief._give_back()
        assert refused.value.code == "stale"
        assert (await facts(client))["pool"] == "OWNED(10)"
        thief.unmap()
        pool.unmap()
