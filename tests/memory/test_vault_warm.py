"""A real vault moves its weights to host memory and back: what it counts, whom it refuses, and who dies on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.memory.client.calls import VaultRefused, demote, promote
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.devices import DeviceError, HostDevice, is_sealed
from holdfast.memory.devices.host_memory import PlainMemory
from holdfast.memory.protocol import Moved
from holdfast.memory.vault.warm import Mover
from holdfast.testing.waiting import until
from tests.rigs.memory.vaults import MIB, SOON_MS, Rig, digest, expected, facts, write

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SIZE = 2 * MIB  # of what `write` writes: three tensors in one slab, rounded up
POOL = 6 * MIB  # of an engine that owns one: an index, rounded up, and two slabs
LARGE = 200  # tensors of half a MiB: a copy takes long enough to be seen, and killed
ROUNDS = 3


def warm_rig(**settings: Any) -> Rig:
    return Rig(**{"host_budget_bytes": 256 * MIB} | settings)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with warm_rig() as started:
        yield started


async def committed(rig: Rig, count: int = 3) -> str:
    """Weights that nobody maps; their hash."""
    async with rig.client(0) as writer:
        return await write(writer, count=count)


async def seen(rig: Rig) -> dict[str, Any]:
    async with rig.client(9) as looker:
        return await facts(looker)


async def read(rig: Rig, count: int = 3) -> None:
    """An engine that attaches finds what was written."""
    async with rig.client(1) as reader:
        assert await reader.acquire("ro", SOON_MS) == "ro"
        assert digest(reader) == expected(1, count)
        assert reader.mapped is not None
        assert all(is_sealed(fd) for fd in reader.mapped.fds), "nobody can write to what is committed"


def slabs_of(rig: Rig, kind: str) -> int:
    """How many slabs a process of the vault's holds, as the kernel tells."""
    (pid,) = rig.pids(kind)
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(link).startswith("/memfd:holdfast")
    return found


async def refusal(move: Any) -> VaultRefused:
    with pytest.raises(VaultRefused) as caught:
        await move
    return caught.value


# -- there and back


async def test_weights_leave_the_device_and_come_back_as_they_were(rig: Rig) -> None:
    """By the vault's own count the device has nothing and host memory all of it; then the other way; same bytes."""
    async with rig.engine() as writer:
        await writer.do("open")
        await writer.do("acquire", mode="rw")
        await writer.do("load")
        hashed = await writer.do("commit")
        await writer.kill()
    await rig.shows(readers=0)
    moved = await demote(rig.path())
    assert moved.size_bytes == SIZE
    there = await seen(rig)
    assert (there["weights"], there["device_bytes"], there["host_bytes"]) == ("WARM", 0, SIZE)
    assert (there["weights_bytes"], there["layout_hash"]) == (0, hashed)
    assert (slabs_of(rig, "keeper"), slabs_of(rig, "server")) == (0, 1), "the device's are let go of"
    assert (await promote(rig.path())).size_bytes == SIZE
    await rig.shows(weights="COMMITTED", layout_hash=hashed, device_bytes=SIZE, weights_bytes=SIZE, host_bytes=0)
    assert (slabs_of(rig, "keeper"), slabs_of(rig, "server")) == (1, 1), "host memory is let go of"
    async with rig.engine(1) as reader:
        await reader.do("open")
        assert await reader.do("acquire", mode="rw_or_ro") == "ro"
        assert await reader.do("digest") == expected(1)


async def test_an_engine_that_sleeps_gets_the_same_bytes_at_the_same_addresses(rig: Rig) -> None:
    """Unmapped, its weights may be moved; its remap waits for them to be back, and newcomers wait with it."""
    async with rig.client(0) as sleeper, rig.client(1) as newcomer:
        await write(sleeper)
        assert sleeper.mapped is not None
        address = sleeper.mapped.address
        await sleeper.unmap()
        await demote(rig.path())
        waking = asyncio.gather(sleeper.remap(SOON_MS), newcomer.acquire("rw_or_ro", SOON_MS))
        await rig.shows(waiting=2)
        await promote(rig.path())
        assert await waking == ["ro", "ro"]
        assert sleeper.mapped.address == address
        assert digest(sleeper) == digest(newcomer) == expected(1)


async def test_an_engine_that_starts_meanwhile_waits_and_loads_nothing(rig: Rig) -> None:
    """By its role it would load what is missing; what is in host memory is not missing."""
    await committed(rig)
    await demote(rig.path())
    async with rig.engine(0) as engine:
        ready = asyncio.gather(engine.do("become_ready", devices=["host-0"]))
        await rig.shows(waiting=1)
        await promote(rig.path())
        assert await ready == ["wrote "]
        assert await engine.do("digest") == expected(1)


async def test_weights_go_there_and_back_again_and_again() -> None:
    """Nothing is left of the last time: not a byte is counted twice, and not a descriptor stays."""
    with warm_rig(budget_bytes=SIZE, host_budget_bytes=SIZE) as rig:
        await committed(rig)
        for _ in range(ROUNDS):
            await demote(rig.path())
            await promote(rig.path())
        await rig.shows(device_bytes=SIZE, host_bytes=0)
        await read(rig)


async def test_the_pool_of_a_dead_engine_goes_with_the_weights(rig: Rig) -> None:
    """While its owner lives the move is refused, by its name; then the device really has nothing left."""
    await committed(rig)
    async with rig.engine(3) as engine:
        await engine.owns_the_pool()
        refused = await refusal(demote(rig.path()))
        assert (refused.code, "engine 3 pid" in refused.reason) == ("mapped", True)
        await engine.kill()
    await rig.shows(mappers=0)
    assert (await seen(rig))["pool_bytes"] > 0
    await demote(rig.path())
    there = await seen(rig)
    assert (there["pool"], there["device_bytes"], there["host_bytes"]) == ("ABSENT", 0, SIZE)


# -- refusals


async def test_weights_that_somebody_has_are_not_moved(rig: Rig) -> None:
    """Neither while they are loaded nor while they are mapped; the refusal names who, and changes nothing."""
    async with rig.client(4) as engine:  # which waits for as long as the vault takes to start
        assert (await refusal(demote(rig.path()))).code == "empty"
        assert await engine.acquire("rw", SOON_MS) == "rw"
        loading = await refusal(demote(rig.path()))
        await engine.release()
        await write(engine)
        mapped = await refusal(demote(rig.path()))
        for refused in (loading, mapped):
            assert (refused.code, "engine 4 pid" in refused.reason) == ("mapped", True)
        assert digest(engine) == expected(1)
    assert (await seen(rig))["host_bytes"] == 0


@pytest.mark.parametrize("host_budget_bytes", [0, SIZE - 1])
async def test_no_more_host_memory_is_taken_than_the_budget_allows(host_budget_bytes: int) -> None:
    """Without one, none at all."""
    with Rig(host_budget_bytes=host_budget_bytes) as rig:
        await committed(rig)
        assert (await refusal(demote(rig.path()))).code == "over_budget"
        await read(rig)


async def test_weights_come_back_only_where_the_budget_has_room() -> None:
    """Somebody's pool has their place: refused by name, and they stay in host memory until it is gone."""
    with warm_rig(budget_bytes=POOL + SIZE - 1) as rig:
        await committed(rig)
        await demote(rig.path())
        async with rig.engine(3) as engine:
            await engine.owns_the_pool()
            assert (await refusal(promote(rig.path()))).code == "over_budget"
            there = await seen(rig)
            assert (there["weights"], there["device_bytes"], there["host_bytes"]) == ("WARM", POOL, SIZE)
            await engine.kill()
        await rig.shows(mappers=0)
        async with rig.client(2) as other:  # of another geometry, which drops it
            pool = PoolClient(other, other.device)
            assert not (await pool.acquire(20, "another", SOON_MS)).adopt
            await pool.quiesce()
        await promote(rig.path())
        await read(rig)


async def test_of_many_who_ask_at_once_one_is_served(rig: Rig) -> None:
    """The others are told that it is under way, or done."""
    await committed(rig, LARGE)
    for move, late in ((demote, "warm"), (promote, "hot")):
        answers = await asyncio.gather(*(move(rig.path()) for _ in range(8)), return_exceptions=True)
        refused = [answer.code for answer in answers if isinstance(answer, VaultRefused)]
        assert sum(isinstance(answer, Moved) for answer in answers) == 1, answers
        assert len(refused) == 7
        assert set(refused) <= {"busy", late}
    await read(rig, LARGE)


async def test_a_copy_that_fails_leaves_everything_as_it_was(rig: Rig) -> None:
    """The kernel refuses memory, out and in: each time it is told, and the weights are where they were."""
    await committed(rig)
    await refuses_memory(rig, True)
    assert (await refusal(demote(rig.path()))).code == "failed"
    await rig.shows(weights="COMMITTED", device_bytes=SIZE, host_bytes=0)
    await read(rig)
    await refuses_memory(rig, False)
    await demote(rig.path())
    await refuses_memory(rig, True)
    assert (await refusal(promote(rig.path()))).code == "failed"
    await rig.shows(weights="WARM", device_bytes=0, host_bytes=SIZE)
    await refuses_memory(rig, False)
    await promote(rig.path())
    await read(rig)


@pytest.mark.parametrize("way", ["copy_out", "copy_in"])
def test_what_was_not_copied_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of each slab are compared, and of what is not the same nothing is left."""
    device = HostDevice()
    with contextlib.closing(device):
        address = device.reserve(SIZE)
        fd = device.create(SIZE)
        device.map(address, SIZE, fd, writable=True)
        device.write(address + SIZE - 1, b"x")
        mover = Mover("host-0", lambda: 0.0)
        if way == "copy_in":
            mover.copy_out([SIZE], [fd])
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(PlainMemory, way, lambda *_: None)
        with pytest.raises(DeviceError, match="slab 0 is not what was copied"):
            mover.copy_out([SIZE], [fd]) if way == "copy_out" else mover.copy_in([SIZE])
        assert len(os.listdir("/proc/self/fd")) == before
        assert mover.host_bytes == (0 if way == "copy_out" else SIZE)
        mover.forget()
        os.close(fd)


async def refuses_memory(rig: Rig, refused: bool) -> None:
    """No file of the vault's, a memfd is one, may grow beyond half a slab."""
    most = SIZE // 2 if refused else resource.RLIM_INFINITY
    (server,) = rig.pids("server")
    resource.prlimit(server, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


# -- deaths


@pytest.mark.parametrize("level", ["DEMOTING", "PROMOTING"])
async def test_a_vault_killed_in_the_middle_of_a_copy_never_has_half_of_the_weights(rig: Rig, level: str) -> None:
    """The next one has them all, the same bytes, or none and says so; and it can do it again."""
    for _ in range(ROUNDS):
        if (await seen(rig))["weights"] == "EMPTY":
            await committed(rig, LARGE)
        if level == "PROMOTING":
            await demote(rig.path())
        move = asyncio.gather((demote if level == "DEMOTING" else promote)(rig.path()), return_exceptions=True)
        await caught_at(rig, level, move)
        (killed,) = rig.pids("server")
        rig.kill("server")
        await move
        after = await next_vault(rig, killed)
        assert after["host_bytes"] == 0
        assert after["weights"] in ("COMMITTED", "EMPTY")
        if after["weights"] == "COMMITTED":
            await read(rig, LARGE)
        else:
            assert after["device_bytes"] == 0


async def caught_at(rig: Rig, level: str, move: asyncio.Future[Any]) -> None:
    """Return when the vault says that it is at it, or when it is done already."""
    async with rig.client(9) as looker:

        async def there() -> bool:
            return move.done() or (await facts(looker))["weights"] == level

        await until(there, level)


async def next_vault(rig: Rig, killed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def back() -> bool:
        try:
            found.update(await seen(rig))
        except (OSError, TimeoutError):
            return False
        return bool(found["pid"] != killed)

    await until(back, "the next vault answers")
    return found


async def test_host_memory_goes_with_its_vault_and_the_weights_are_loaded_anew(rig: Rig) -> None:
    """An engine that slept meanwhile is told at once that nothing is there."""
    async with rig.client(0) as sleeper:
        await write(sleeper)
        await sleeper.unmap()
        await demote(rig.path())
        (killed,) = rig.pids("server")
        rig.kill("server")
        after = await next_vault(rig, killed)
        assert (after["weights"], after["device_bytes"], after["host_bytes"]) == ("EMPTY", 0, 0)
        assert await sleeper.remap(SOON_MS) == "empty"
        await write(sleeper)
        await sleeper.release()
    await demote(rig.path())
    await promote(rig.path())
    await read(rig)


@pytest.mark.parametrize("killed", [("server",), ("server", "keeper")])
async def test_weights_lost_from_host_memory_are_not_written_where_others_are(killed: tuple[str, ...]) -> None:
    """A vault that shares its device says that they are lost, and lets nobody write; one that died while they were on
    the device finds them there."""
    with warm_rig(leased=True) as rig:
        await committed(rig)
        for kind in ("demote", "promote", "demote"):
            await (demote if kind == "demote" else promote)(rig.path())
        (before,) = rig.pids("server")
        rig.kill(*killed)
        if len(killed) > 1:
            await rig.start_again()
        after = await next_vault(rig, before)
        assert (after["weights"], after["device_bytes"]) == ("LOST", 0)
        async with rig.client(0) as engine:
            with pytest.raises(TimeoutError):
                await engine.acquire("rw_or_ro", 100)
            with pytest.raises(TimeoutError):
                await engine.acquire("rw", 100)
        assert (await refusal(promote(rig.path()))).code == "hot"
        (again,) = rig.pids("server")
        rig.kill("server")
        assert (await next_vault(rig, again))["weights"] == "LOST", "the next one knows it too"


async def test_weights_that_came_back_are_not_lost_with_their_vault() -> None:
    """They are on the device again: the next vault has them, though others share it."""
    with warm_rig(leased=True) as rig:
        await committed(rig)
        await demote(rig.path())
        await promote(rig.path())
        (before,) = rig.pids("server")
        rig.kill("server")
        assert (await next_vault(rig, before))["weights"] == "COMMITTED"
        await read(rig)


async def test_a_keepers_death_moves_nothing(rig: Rig) -> None:
    """Killed while the weights are in host memory, and once more on their way back: they come back."""
    await committed(rig, LARGE)
    await demote(rig.path())
    rig.kill("keeper")
    await rig.shows(weights="WARM")
    move = asyncio.gather(promote(rig.path()))
    await caught_at(rig, "PROMOTING", move)
    rig.kill("keeper")
    await move
    await read(rig, LARGE)
    (killed,) = rig.pids("server")
    rig.kill("server")
    assert (await next_vault(rig, killed))["weights"] == "COMMITTED", "the last keeper has their record"
    await read(rig, LARGE)


async def test_a_vault_that_is_told_to_end_takes_its_copy_with_it(rig: Rig) -> None:
    """Nobody is left behind, and who asked hears that it is lost, or that it was done just before."""
    await committed(rig, LARGE)
    move = asyncio.gather(demote(rig.path()), return_exceptions=True)
    await caught_at(rig, "DEMOTING", move)
    await asyncio.to_thread(rig.vaults["host-0"].stop)
    (answer,) = await move
    assert isinstance(answer, Moved | ConnectionError)
    assert rig.pids("server") == rig.pids("keeper") == []


async def test_who_asked_may_leave(rig: Rig) -> None:
    """The move goes on without it."""
    await committed(rig, LARGE)
    move = asyncio.gather(demote(rig.path()), return_exceptions=True)
    await caught_at(rig, "DEMOTING", move)
    move.cancel()
    await rig.shows(weights="WARM", device_bytes=0)
    await promote(rig.path())
    await read(rig, LARGE)
