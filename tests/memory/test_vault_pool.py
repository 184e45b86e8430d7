"""The KV pool over real processes: who may own it, when its predecessors are fenced, what survives whom; and what ends
an owner in the vault's eyes: its process's end or its own word, never the loss of its connection alone."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from holdfast.memory.client.pool import PoolClient
from holdfast.memory.devices import open_device
from holdfast.memory.protocol import PoolNews
from holdfast.testing.processes import fd_count
from tests.rigs.agents import OrderFailed
from tests.rigs.memory.vaults import SOON_MS, Rig, descriptors_of, facts, until

pytestmark = pytest.mark.processes


async def test_frozen_owner_keeps_the_pool_until_it_is_killed(rig: Rig) -> None:
    """SIGSTOP: it is still connected, so the newcomer times out; after SIGKILL it is granted, with its pages."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await first.owns_the_pool()
        await second.do("open")
        first.signal(signal.SIGSTOP)
        with pytest.raises(OrderFailed, match="TimeoutError"):
            await second.do("own", epoch=11, timeout_ms=300)
        granted = second.order("own", epoch=12)
        await asyncio.sleep(0)
        assert not granted.done()
        await first.kill()
        assert await granted is True
        assert await second.do("map_pool") == "pages"
        await second.fenced()


async def test_rank_of_the_old_epoch_that_lives_keeps_the_fence_closed(rig: Rig) -> None:
    """The parent is dead, its second process is not: nobody else may touch the pages yet."""
    async with rig.engine(0) as parent, rig.engine(0) as rank, rig.engine(1) as second:
        await parent.owns_the_pool()
        await asyncio.gather(rank.do("open"), second.do("open"))
        await rank.do("join", epoch=10)
        await parent.kill()
        with pytest.raises(OrderFailed, match="TimeoutError"):
            await second.do("own", epoch=11, timeout_ms=300)
        granted = second.order("own", epoch=12)
        await rank.kill()
        assert await granted is True


@pytest.mark.parametrize("opening", ["open", "open_as_the_dead"])
async def test_gpu_fence_waits_for_the_process_not_for_the_connection(rig: Rig, opening: str) -> None:
    """Connection closed, process alive: the CPU fence has passed, the GPU fence only when the pidfd says so. One that
    sent the pidfd of a process that is over is known by the kernel's word for who connected."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await first.owns_the_pool(opening=opening)
        await second.do("open")
        await first.do("hang_up")
        assert await second.do("own", epoch=11) is True
        assert await second.do("fences") == [True, False]
        rig.kill("server")  # and a new vault knows it too
        await second.back()
        assert await second.do("fences") == [True, False]
        await first.kill()
        await second.fenced()


async def test_planned_handover_needs_nobodys_death(rig: Rig) -> None:
    """Quiesced: the next owner gets pages and both fences while the last one lives on."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await first.owns_the_pool()
        await second.do("open")
        granted = second.order("own", epoch=11)
        await first.do("quiesce")
        assert await granted is True
        assert await second.do("map_pool") == "pages"
        await second.fenced()
        with pytest.raises(OrderFailed, match="stale_epoch"):
            await first.do("own", epoch=10)


async def test_stale_epoch_is_refused_also_by_a_restarted_vault(rig: Rig) -> None:
    """Only larger epochs are ever granted, whoever of the vaults is asked."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await first.owns_the_pool()
        await first.kill()
        await second.do("open")
        for kills in (1, 2):
            for epoch in (9, 10):
                with pytest.raises(OrderFailed, match="stale_epoch"):
                    await second.do("own", epoch=epoch)
            rig.kill("server")
            await second.lost(kills)
            await second.do("open")
        assert await second.do("own", epoch=11) is True


async def test_vault_killed_between_grant_and_use_leaves_the_owner_its_pool(rig: Rig) -> None:
    """The owner has not made its pages when the vault dies: it comes back owning, makes them, and they are adopted."""
    async with rig.engine(0) as first, rig.engine(1) as second:
        await asyncio.gather(first.do("open"), second.do("open"))
        assert await first.do("own", epoch=10) is False
        rig.kill("server")
        await first.back()
        await first.do("make", text="later")
        assert await first.do("pool_text") == "later"
        await first.kill()
        await second.lost()
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
        assert not (await pool.acquire(11, "g", SOON_MS)).adopt
        assert (await facts(client))["pool"] == "OWNED(11)"


async def test_answer_lost_with_the_vault_is_given_up(rig: Rig) -> None:
    """Granted, but the vault died before the answer arrived: the asker owns nothing, and may ask with a new epoch."""
    async with rig.client(0) as client:
        news: list[PoolNews] = []
        pool = PoolClient(client, open_device("host-0"), on_news=news.append)
        await client.register_mapping(None)
        keeper = rig.pids("keeper")[0]
        os.kill(keeper, signal.SIGSTOP)  # no answer before it knows
        asking = asyncio.ensure_future(pool.acquire(10, "g", SOON_MS))
        await until(lambda: PoolNews("granted", 10) in news, "the vault has granted it")
        rig.kill("server")
        os.kill(keeper, signal.SIGCONT)
        with pytest.raises(ConnectionError):
            await asking
        assert client.connected
        assert client.last_epoch == 10
        assert not (await pool.acquire(11, "g", SOON_MS)).adopt


# -- what ends an owner


@pytest.mark.parametrize("how", ["no_message", "no_frame", "no_descriptors", "hung_up"])
async def test_owner_that_lost_its_connection_and_lives_keeps_the_fence_closed(rig: Rig, how: str) -> None:
    """Cut off by the vault for what it sent, or by itself: it comes back to its pool, and only its death lets another
    one in."""
    async with rig.engine(0) as owner, rig.engine(1) as second:
        await owner.owns_the_pool()
        await second.do("open")
        granted = second.order("own", epoch=11, timeout_ms=SOON_MS)
        await owner.do("break_off", how=how)
        await owner.back()
        await rig.shows(pool="OWNED(10)")
        assert not granted.done()
        assert await owner.do("pool_text") == "pages"
        await owner.kill()
        assert await granted is True
        assert await second.do("map_pool") == "pages"


async def test_vault_out_of_descriptors_does_not_pass_a_living_owners_fence(rig: Rig) -> None:
    """What the owner sends is cut off on the way; it stays a mapper until the vault can have it back."""
    async with rig.engine(0) as owner, rig.engine(1) as second:
        await owner.owns_the_pool()
        await second.do("open")
        granted = second.order("own", epoch=11, timeout_ms=SOON_MS)
        await rig.shows(waiting=1)
        vault = rig.pids("server")[0]
        with descriptors_of(vault, fd_count(vault)):
            await owner.do("send_descriptors")
            await owner.lost()
            assert not granted.done()
        await owner.back()
        await rig.shows(pool="OWNED(10)")
        await owner.kill()
        assert await granted is True


async def test_cut_off_owner_is_expected_back_by_the_next_vault_too(rig: Rig) -> None:
    """It is in the keeper's records: a vault killed while the owner is cut off does not let another one in."""
    async with rig.engine(0) as owner, rig.engine(1) as second:
        await owner.owns_the_pool()
        await second.do("open")
        await second.do("join", epoch=None)
        await asyncio.gather(owner.do("break_off", how="no_message"), asyncio.to_thread(rig.kill, "server"))
        granted = second.order("own", epoch=11, timeout_ms=SOON_MS)
        await owner.back()
        await rig.shows(pool="OWNED(10)")
        assert not granted.done()
        await owner.kill()
        assert await granted is True


async def test_owner_that_leaves_while_the_vault_is_away_holds_nobody_up(rig: Rig) -> None:
    """A client of a process that lives on is closed just after the vault was killed: it takes its leave of the next
    vault, and the pool is another's for the asking."""
    async with rig.engine(0) as owner, rig.engine(1) as second:
        await owner.owns_the_pool()
        rig.kill("server")
        await owner.do("hang_up")
        await second.do("open")
        assert await second.do("own", epoch=11, timeout_ms=SOON_MS) is True
