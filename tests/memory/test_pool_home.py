"""A pool that is always mapped at one place, its home, because tensors that know that place cannot move: what is there
before a pool, with one, without one again; and memory of the engine's own there."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator

import pytest

from holdfast.engines.host.pool import DirectPool
from holdfast.kv.geometry import Geometry
from holdfast.memory.client.pool import Home, PoolClient, PoolMapper, leave_home, make_home
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import HostDevice, open_device
from holdfast.memory.devices.contract import DeviceError, OutOfMemory, WrongFd
from tests.rigs.memory.vaults import MIB, Rig

STEP = 2 * MIB
SIZE = 3 * STEP
OWN = ((STEP, STEP),)  # an engine's private part


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice("host-0")
    yield device
    device.close()


def home_in(device: HostDevice, size: int = SIZE) -> Home:
    """As an engine makes it: reserved, with scratch, before there is any pool."""
    home = Home(device.reserve(size), size, OWN)
    device.scratch(home.address, size, OWN)
    return home


def pool_fds(device: HostDevice, pages: list[int]) -> list[int]:
    return [device.create(size) for size in (STEP, *pages)]


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# -- the mapper


def test_a_home_has_the_pool_or_scratch_at_the_same_place(device: HostDevice) -> None:
    """Scratch, the pool, nothing, the same pool, scratch again: always there; what was written into the pool is in it
    whenever it is mapped, and what was written into scratch never is."""
    home = home_in(device)
    mapper = PoolMapper(device, device, 0, home)
    device.write(home.address + STEP, b"before any pool")
    before, (index, *pages) = open_fds(), pool_fds(device, [STEP, 2 * STEP])
    kept = [os.dup(fd) for fd in (index, *pages)]  # as the vault has them
    mapping = mapper.map([STEP, STEP, 2 * STEP], [index, *pages], 7, writable=True)
    assert (mapping.pages_address, mapping.private_size, mapping.range_size) == (home.address, 0, SIZE)
    assert device.read(home.address + STEP, 15) == bytes(15)
    device.write(home.address + STEP - 3, b"over the edge of two slabs")
    mapper.unmap(mapping)
    with pytest.raises(DeviceError):
        device.read(home.address, 1)
    scratch = mapper.map([], [], 0, writable=True)
    assert (scratch.pages_address, scratch.made_epoch) == (home.address, 0)
    device.write(home.address + STEP, b"own again")
    mapper.protect(scratch, writable=False)  # there is no pool to be kept from
    device.write(home.address + STEP, b"and still")
    again = mapper.map([STEP, STEP, 2 * STEP], kept, 7, writable=False)
    assert device.read(home.address + STEP - 3, 26) == b"over the edge of two slabs"
    with pytest.raises(DeviceError):
        device.write(home.address, b"read only")
    mapper.protect(again, writable=True)
    device.write(home.address, b"the owner's")
    mapper.unmap(again)
    assert open_fds() == before


def test_what_does_not_fit_a_home_leaves_it_as_it_was(device: HostDevice) -> None:
    """Pages of another size in all are refused by their sizes, the index's addresses are given back, and whoever
    computes in the home computes on."""
    home = home_in(device)
    mapper = PoolMapper(device, device, 0, home)
    device.write(home.address, b"computes")
    reserved = dict(device._ranges.reserved)
    for pages in ([STEP], [2 * STEP, 2 * STEP], [STEP] * 4):
        fds = pool_fds(device, pages)
        with pytest.raises(DeviceError, match=f"{sum(pages)} bytes of pages, this engine's are {SIZE}"):
            mapper.map([STEP, *pages], fds, 7, writable=True)
        assert device.read(home.address, 8) == b"computes"
        assert device._ranges.reserved == reserved
        for fd in fds:
            os.close(fd)


def test_a_slab_that_cannot_be_mapped_leaves_an_empty_home(device: HostDevice) -> None:
    """All of a pool or nothing of it: no page of it, no index; the next one can be mapped there, or scratch."""
    home = home_in(device)
    mapper, (index, good) = PoolMapper(device, device, 0, home), pool_fds(device, [STEP])
    reading, writing = os.pipe()
    reserved = dict(device._ranges.reserved)
    with pytest.raises(WrongFd):
        mapper.map([STEP, STEP, 2 * STEP], [index, good, reading], 7, writable=True)
    with pytest.raises(DeviceError):
        device.read(home.address, 1)
    assert device._ranges.reserved == reserved
    mapper.map([], [], 0, writable=True)
    device.write(home.address, b"scratch")
    for fd in (index, good, reading, writing):
        os.close(fd)


def test_closing_the_device_while_a_home_is_mapped_leaves_nothing(device: HostDevice) -> None:
    """The descriptors are the mapping's until then, and it may be unmapped after that too."""
    before, home = open_fds(), home_in(device)
    mapper = PoolMapper(device, device, 0, home)
    mapping = mapper.map([STEP, SIZE], pool_fds(device, [SIZE]), 7, writable=True)
    device.close()
    for fd in mapping.fds:
        os.close(fd)
    assert open_fds() == before
    with pytest.raises(DeviceError):
        device.read(home.address, 1)


# -- with a vault


def client_with(client: MemoryClient, size: int = SIZE) -> tuple[PoolClient, Home]:
    assert isinstance(client.device, HostDevice)
    home = home_in(client.device, size)
    return PoolClient(client, open_device("host-0"), home=home, geometry="g"), home


@pytest.mark.processes
async def test_two_engines_have_one_pool_each_at_its_own_home(rig: Rig) -> None:
    """A standby finds no pool: it keeps its scratch. One is made: both have the same bytes, each at home. The owner
    steps back and unmaps, the standby owns it; the first maps it again, where it was."""
    async with rig.client(0) as one, rig.client(1) as two:
        (first, home), (second, other) = client_with(one), client_with(two)
        assert await second.stand_by() is None
        second.private_only()
        two.device.write(other.address + STEP, b"canary")
        await first.acquire(10, "g", 2000)
        made = await first.make(64, [STEP, 2 * STEP])
        assert made.pages_address == home.address
        one.device.write(home.address + 5, b"tokens")
        mapping = await second.stand_by()
        assert mapping is not None
        assert (mapping.pages_address, mapping.made_epoch) == (other.address, 10)
        assert two.device.read(other.address + 5, 6) == b"tokens"
        await first.quiesce()
        first.unmap()
        with pytest.raises(DeviceError):
            one.device.read(home.address, 1)
        granted = await second.acquire(11, "g", 2000)
        assert granted.adopt
        two.device.write(other.address + 5, b"others")
        again = await first.stand_by()
        assert again is not None
        assert again.pages_address == home.address
        assert one.device.read(home.address + 5, 6) == b"others"


@pytest.mark.processes
async def test_a_pool_of_another_size_is_none(rig: Rig) -> None:
    """Whoever stands by with another home keeps its scratch, and makes a pool of its own size when it is granted."""
    async with rig.client(0) as one, rig.client(1) as two:
        (first, _), (second, home) = client_with(one), client_with(two, SIZE + STEP)
        await first.acquire(10, "g", 2000)
        await first.make(64, [SIZE])
        assert await second.stand_by() is None
        second.private_only()
        two.device.write(home.address + STEP, b"canary")
        await first.quiesce()
        granted = await second.acquire(11, "of another size", 2000)
        assert not granted.adopt
        made = await second.make(64, [SIZE, STEP])
        assert (made.pages_address, made.range_size) == (home.address, SIZE + STEP)


@pytest.mark.processes
async def test_a_pool_of_another_geometry_is_none(rig: Rig) -> None:
    """As many bytes may be other blocks: where a standby has its private ones, an owner of another geometry keeps
    streams. So that pool is not mapped, and a canary's bytes stay the standby's own."""
    async with rig.client(0) as one, rig.client(1) as two:
        (first, home), (second, other) = client_with(one), client_with(two)
        await first.acquire(10, "of other blocks", 2000)
        await first.make(64, [SIZE])
        assert await second.stand_by() is None
        second.private_only()
        two.device.write(other.address + STEP, b"canary")
        assert one.device.read(home.address + STEP, 6) == bytes(6)
        await first.quiesce()
        granted = await second.acquire(11, "g", 2000)
        assert not granted.adopt
        assert (await second.make(64, [SIZE])).pages_address == other.address


# -- memory of the engine's own


GEOMETRY = Geometry("w", "uint8", 16, 1, 1, 1, 8)


async def test_own_memory_comes_to_a_home_and_goes(device: HostDevice) -> None:
    """Whole, writable and empty, each time; scratch with its own parts before, between and after."""
    home = home_in(device)
    direct = DirectPool(device, 0, asyncio.Lock())
    for epoch in (1, 2):
        device.write(home.address + STEP, b"a canary's")
        owned = await direct.take(GEOMETRY, home, epoch, 1.0)
        assert (owned.pages_address, owned.range_bytes, owned.pool.epoch) == (home.address, SIZE, epoch)
        assert device.read(home.address + STEP, 10) == bytes(10)
        device.write(home.address, b"all of it")
        device.write(home.address + SIZE - 9, b"all of it")
        direct.free()
        assert device.read(home.address, 9) == bytes(9)
        direct.free()  # a second time does nothing


async def test_a_home_is_changed_while_nobody_computes_there(device: HostDevice) -> None:
    """A canary that was begun is over before its memory goes."""
    home, still = home_in(device), asyncio.Lock()
    direct = DirectPool(device, 0, still)
    async with still:
        taking = asyncio.create_task(direct.take(GEOMETRY, home, 1, 20.0))
        for _ in range(10):
            await asyncio.sleep(0)
        device.write(home.address + STEP, b"canary")
        assert device.read(home.address + STEP, 6) == b"canary"
        assert not taking.done()
    assert (await taking).pages_address == home.address
    assert device.read(home.address + STEP, 6) == bytes(6)
    direct.free()


async def test_a_home_keeps_its_scratch_until_there_is_memory(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What computes there computes on while the device is full, and after the wait was in vain."""
    home = home_in(device)
    direct = DirectPool(device, 0, asyncio.Lock())
    device.write(home.address + STEP, b"canary")
    monkeypatch.setattr(device, "free_bytes", lambda: 0)
    with pytest.raises(TimeoutError, match=f"{SIZE} bytes for KV"):
        await direct.take(GEOMETRY, home, 1, 0.03)
    assert device.read(home.address + STEP, 6) == b"canary"
    monkeypatch.setattr(device, "free_bytes", lambda: SIZE)
    create, tries = device.create, []

    def others_were_quicker(size: int) -> int:
        tries.append(size)
        if len(tries) < 3:
            raise OutOfMemory("taken")
        return create(size)

    monkeypatch.setattr(device, "create", others_were_quicker)
    async with asyncio.timeout(20):
        owned = await direct.take(GEOMETRY, home, 2, 20.0)
    assert (owned.pages_address, tries) == (home.address, [SIZE] * 3)
    direct.free()


async def test_own_memory_is_given_back_before_its_home_takes_any(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine steps back on a full device too: what an empty home needs may be of the memory that goes. The private
    slab behind it stays as it is, and nothing is left of a home that was left."""
    home = make_home(device, SIZE, STEP)
    direct = DirectPool(device, STEP, asyncio.Lock())
    device.write(home.private_address, b"canary")
    owned = await direct.take(GEOMETRY, home, 1, 1.0)
    assert (owned.pages_address, owned.range_bytes, owned.private_at) == (home.address, SIZE + STEP, SIZE)
    device.write(home.address + SIZE - 3, b"end")
    create, slab = device.create, direct._fd

    def create_unless_full(size: int) -> int:
        with contextlib.suppress(OSError):
            os.fstat(slab)
            raise OutOfMemory("all of it is still there")
        return create(size)

    monkeypatch.setattr(device, "create", create_unless_full)
    direct.free()
    assert device.read(home.private_address, 6) == b"canary"
    leave_home(device, home)
    assert not device._ranges.reserved
    assert not device._ranges.mappings()
