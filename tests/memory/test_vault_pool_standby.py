"""A standby with everything mapped, over real processes: what it hears, is granted, and how vaults' deaths matter."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, cast

import pytest

from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.devices.contract import Device, DeviceError
from holdfast.memory.protocol import PoolNews
from holdfast.testing.waiting import BOUND_S
from tests.rigs.memory.vaults import MIB, SOON_MS, Rig, back, digest, expected, facts, lost, until, write

pytestmark = pytest.mark.processes
PAGES = [2 * MIB, 2 * MIB]


class CountedDevice:
    """A device that knows what it was asked to do."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._device, name)
        if callable(member):
            self.calls.append(name)
        return member


class Standby:
    """A client of this process, its pool, and what it heard."""

    def __init__(self, client: MemoryClient, private_bytes: int = 0) -> None:
        self.client = client
        self.news: list[PoolNews] = []
        self.pool = PoolClient(client, open_device("host-0"), private_bytes, self.news.append)

    async def hears(self, kind: str, epoch: int) -> None:
        await until(lambda: PoolNews(kind, epoch) in self.news, f"{kind} {epoch}, not only {self.news}")

    def read(self, size: int = 5) -> bytes:
        assert self.pool.mapping is not None
        return self.client.device.read(self.pool.mapping.pages_address, size)


# -- the way of every failover


async def test_standby_that_has_the_pool_mapped_needs_no_call_between_grant_and_use(rig: Rig) -> None:
    """It hears of its owner's end by itself, and what it mapped ahead is what it is granted, writable."""
    async with rig.engine(0) as owner, rig.client(1) as client:
        await owner.owns_the_pool()
        standby = Standby(client, private_bytes=1)
        mapping = await standby.pool.stand_by()
        assert mapping is not None
        assert mapping.made_epoch == 10
        assert standby.read() == b"pages"
        assert standby.news == [PoolNews("granted", 10), PoolNews("made", 10)]
        assert client.last_epoch == 10
        counted, host = CountedDevice(client.device), CountedDevice(standby.pool.host)
        client.device, standby.pool.host = cast(Device, counted), cast(Device, host)
        await owner.kill()
        await standby.hears("owner_gone", 10)
        granted = await standby.pool.acquire(11, "g", SOON_MS)
        assert (granted.adopt, granted.made_epoch) == (True, 10)
        assert standby.pool.mapped_is(granted.made_epoch)
        assert counted.calls == host.calls == []
        assert standby.pool.mapping is mapping
        client.device.write(mapping.pages_address, b"mine!")
        await standby.hears("granted", 11)
        async with asyncio.timeout(BOUND_S):
            await standby.pool.gpu_fence.wait()
        assert standby.pool.cpu_fence.is_set()
        standby.pool.unmap()


async def test_every_seat_hears_and_the_dead_among_them_are_in_nobodys_way(rig: Rig) -> None:
    """The owner and two standbys are killed in one breath: the third hears of it, and is granted the pool."""
    async with rig.engine(0) as owner, rig.engine(1) as first, rig.engine(2) as second, rig.client(3) as client:
        await owner.owns_the_pool()
        await asyncio.gather(first.do("open"), second.do("open"))
        await asyncio.gather(first.do("join", epoch=None), second.do("join", epoch=None))
        standby = Standby(client)
        await standby.pool.stand_by()
        await asyncio.gather(first.kill(), second.kill(), owner.kill())
        await standby.hears("owner_gone", 10)
        assert (await standby.pool.acquire(11, "g", SOON_MS)).adopt
        assert standby.read() == b"pages"
        standby.pool.unmap()


async def test_standby_before_any_pool_has_private_memory_and_hears_when_one_is_made(rig: Rig) -> None:
    """No pool: a private slab alone. Once made, it maps the pool, which ends in a private slab that no vault keeps."""
    async with rig.engine(0) as owner, rig.client(1) as client:
        standby = Standby(client, private_bytes=2 * MIB + 1)
        assert await standby.pool.stand_by() is None
        alone = standby.pool.private_only()
        assert (alone.private_size, alone.private_address) == (4 * MIB, alone.pages_address)
        client.device.write(alone.private_address, b"canary")
        assert not standby.pool.mapped_is(alone.made_epoch)
        await owner.owns_the_pool()
        await standby.hears("made", 10)
        mapping = await standby.pool.stand_by()
        assert mapping is standby.pool.mapping is not None
        assert mapping.private_address == mapping.pages_address + sum(PAGES)
        client.device.write(mapping.private_address + mapping.private_size - 6, b"canary")
        assert standby.read() == b"pages"
        assert (await facts(client))["pool_bytes"] == mapping.index_size + sum(PAGES)
        again = await standby.pool.stand_by()
        assert again is mapping  # the same pool stays where it is
        standby.pool.unmap()
        assert "0 slabs" in repr(client.device)


async def test_pool_is_not_mapped_before_the_keeper_has_it(rig: Rig) -> None:
    """It is heard of at once, but a standby gets it only when no other can be made under the same epoch any more."""
    async with rig.client(0) as client, rig.client(1) as other, rig.client(2) as third:
        first, second = Standby(client), Standby(other)
        assert await second.pool.stand_by() is None
        await first.pool.acquire(10, "g", SOON_MS)
        keeper = rig.pids("keeper")[0]
        os.kill(keeper, signal.SIGSTOP)
        making = asyncio.ensure_future(first.pool.make(MIB, PAGES))
        await second.hears("made", 10)
        mapping = asyncio.ensure_future(second.pool.stand_by())
        for _ in range(3):  # round trips, after which the fetch would have been answered
            assert (await facts(third))["pool"] == "OWNED(10)"
        assert not mapping.done()
        assert not making.done()
        os.kill(keeper, signal.SIGCONT)
        await asyncio.gather(making, mapping)
        first.pool.unmap()
        second.pool.unmap()


async def test_owner_that_stepped_back_may_write_again_when_it_owns_again(rig: Rig) -> None:
    """Quiesced: it cannot write, though its private slab it can; owning again, or standing by, it can."""
    async with rig.client(0) as client, rig.client(1) as other:
        first, second = Standby(client, private_bytes=1), Standby(other)
        await first.pool.acquire(10, "g", SOON_MS)
        mapping = await first.pool.make(MIB, PAGES)
        await second.pool.stand_by()
        await first.pool.quiesce()
        await second.hears("owner_gone", 10)
        with pytest.raises(DeviceError):
            client.device.write(mapping.pages_address, b"x")
        client.device.write(mapping.private_address, b"x")
        assert (await first.pool.acquire(11, "g", SOON_MS)).made_epoch == 10
        client.device.write(mapping.pages_address, b"again")
        assert second.read() == b"again"
        await first.pool.quiesce()
        assert await first.pool.stand_by() is mapping
        assert mapping.writable
        first.pool.unmap()
        second.pool.unmap()


async def test_pool_that_was_made_anew_is_not_taken_for_the_one_that_was_mapped(rig: Rig) -> None:
    """Another geometry in between, whose owner makes its own pages: the standby hears it, and its old mapping does not
    match what it is granted."""
    async with rig.engine(0) as owner, rig.engine(1) as other, rig.client(2) as client:
        await owner.owns_the_pool()
        standby = Standby(client)
        await standby.pool.stand_by()
        await other.do("open")
        await owner.kill()
        assert await other.do("own", epoch=11, geometry="other") is False
        assert (await facts(client))["pool_bytes"] == 0
        await other.do("make", text="fresh")
        await standby.hears("dropped", 10)
        await standby.hears("made", 11)
        await other.kill()
        granted = await standby.pool.acquire(12, "other", SOON_MS)
        assert granted.adopt
        assert not standby.pool.mapped_is(granted.made_epoch)
        assert standby.read() == b"pages"  # still mapped, and nobody's pool any more
        standby.pool.unmap()
        await standby.pool.map(writable=True)
        assert standby.pool.mapped_is(granted.made_epoch)
        assert standby.read() == b"fresh"
        standby.pool.unmap()


# -- deaths of the vault


async def test_owner_that_died_while_the_vault_was_away_is_heard_of_on_coming_back(rig: Rig) -> None:
    """Vault and owner in one breath: the new vault knows the standby, and it may ask while there is no vault."""
    async with rig.engine(0) as owner, rig.client(1) as client:
        await owner.owns_the_pool()
        standby = Standby(client)
        await standby.pool.stand_by()
        standby.news.clear()
        link = client.link()
        rig.kill("server")
        await owner.kill()
        await lost(client, link)
        granted = await standby.pool.acquire(11, "g", SOON_MS)
        assert standby.pool.mapped_is(granted.made_epoch)
        assert standby.news[:2] == [PoolNews("made", 10), PoolNews("owner_gone", 10)]
        assert standby.read() == b"pages"
        standby.pool.unmap()


async def test_vault_killed_before_the_engine_changes_nothing_for_the_failover(rig: Rig) -> None:
    """Both are back at the new vault, the owner still owning, when it dies: the standby hears of it and adopts what it
    has mapped."""
    async with rig.engine(0) as owner, rig.client(1) as client:
        await owner.owns_the_pool()
        standby = Standby(client)
        await standby.pool.stand_by()
        link = client.link()
        rig.kill("server")
        await owner.back()
        await back(client, link)
        standby.news.clear()
        with pytest.raises(TimeoutError):
            await standby.pool.acquire(11, "g", 300)
        await owner.kill()
        await standby.hears("owner_gone", 10)
        assert standby.pool.mapped_is((await standby.pool.acquire(12, "g", SOON_MS)).made_epoch)
        assert standby.read() == b"pages"
        standby.pool.unmap()


async def test_seat_taken_before_there_was_any_pool_outlives_the_vault(rig: Rig) -> None:
    """The keeper has no record of a pool, but of the mapper: the standby is granted one without registering again."""
    async with rig.client(0) as client:
        standby = Standby(client)
        assert await standby.pool.stand_by() is None
        link = client.link()
        rig.kill("server")
        await lost(client, link)
        assert not (await standby.pool.acquire(10, "g", SOON_MS)).adopt


async def test_vault_keeper_and_engine_killed_leave_weights_and_a_fresh_pool(rig: Rig) -> None:
    """The standby waits for the new pair, gives the weights back, and makes a pool under its own epoch."""
    watching = asyncio.ensure_future(rig.vaults["host-0"].watch())
    async with rig.engine(0) as owner, rig.client(1) as client:
        await owner.owns_the_pool()
        await write(client)
        standby = Standby(client, private_bytes=1)
        await standby.pool.stand_by()
        link = client.link()
        rig.kill("keeper", "server")
        await owner.kill()
        await lost(client, link)
        granted = await standby.pool.acquire(client.last_epoch + 1, "g", SOON_MS)
        assert not granted.adopt
        assert not standby.pool.mapped_is(granted.made_epoch)
        assert standby.read() == b"pages"  # what it had mapped stays until it makes its own
        mapping = await standby.pool.make(MIB, PAGES)
        assert (mapping.made_epoch, mapping.private_size) == (11, 2 * MIB)
        seen = await facts(client)
        assert (seen["pool"], seen["weights"]) == ("OWNED(11)", "RO")
        assert digest(client) == expected(1)
        async with rig.client(2) as late:
            assert await late.acquire("ro", SOON_MS) == "ro"
            assert digest(late) == expected(1)
        standby.pool.unmap()
    watching.cancel()


async def test_pool_given_back_after_a_total_loss_is_still_the_one_that_standbys_mapped(patient_rig: Rig) -> None:
    """An adopter lives through the loss: its pool comes back under the epoch it was made, not the one that owns it."""
    rig = patient_rig
    async with rig.engine(0) as maker, rig.client(1) as client, rig.client(2) as third:
        await maker.owns_the_pool()
        owner, standby = Standby(client), Standby(third)
        mapped = await standby.pool.stand_by()
        await owner.pool.stand_by()
        await maker.kill()
        assert (await owner.pool.acquire(11, "g", SOON_MS)).adopt
        standby.news.clear()
        links = client.link(), third.link()
        await rig.start_again(client, third)
        await back(client, links[0])
        await back(third, links[1])
        await standby.hears("made", 10)
        await standby.hears("granted", 11)
        assert (await facts(third))["pool"] == "OWNED(11)"
        await owner.pool.quiesce()
        granted = await standby.pool.acquire(12, "g", SOON_MS)
        assert standby.pool.mapped_is(granted.made_epoch)
        assert standby.pool.mapping is mapped
        assert standby.read() == b"pages"
        owner.pool.unmap()
        standby.pool.unmap()


@pytest.mark.long
async def test_acquire_ends_in_time_when_no_vault_comes_back(rig: Rig) -> None:
    """ConnectionError at its own time-out, whether it was asked before or after the loss; and the epoch is not held."""
    async with asyncio.timeout(BOUND_S), rig.engine(0) as owner, rig.client(1) as client:
        await owner.owns_the_pool()
        standby = Standby(client)
        await standby.pool.stand_by()
        waiting = asyncio.ensure_future(standby.pool.acquire(11, "g", 1000))
        await asyncio.sleep(0)
        rig.kill("keeper", "server")
        with pytest.raises(ConnectionError):
            await waiting
        with pytest.raises(ConnectionError):
            await standby.pool.acquire(12, "g", 200)
        assert client.epoch is None
        standby.pool.unmap()


async def test_a_standbys_descriptors_do_not_grow(rig: Rig) -> None:
    """Pools mapped, made anew, stood by and unmapped again and again leave nothing open."""
    async with rig.client(0) as client:
        standby = Standby(client, private_bytes=1)
        counts = []
        for epoch in range(10, 40, 2):
            assert not (await standby.pool.acquire(epoch, str(epoch), SOON_MS)).adopt
            await standby.pool.make(MIB, PAGES)
            await standby.pool.quiesce()
            assert await standby.pool.stand_by() is standby.pool.mapping
            standby.pool.private_only()
            assert await standby.pool.stand_by() is not None
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[-1] == counts[1], counts
        standby.pool.unmap()
