"""Vault and keeper killed, alone and together: nothing mapped is touched, nothing committed is lost that anyone has."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator

import pytest
from vault_rig import Rig, back, digest, expected, facts, load, until

from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.errors import VaultRefused
from holdfast.memory.vault.vault import DONATION_S
from holdfast.testing.waiting import BOUND_S

pytestmark = pytest.mark.processes


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with Rig() as started:
        yield started


async def write(client: MemoryClient, seed: int = 1) -> None:
    assert await client.acquire("rw", 5000) == "rw"
    await load(client, seed)
    await client.commit()


async def restarted(rig: Rig, *clients: MemoryClient) -> None:
    """Vault and keeper killed in one breath, and started again by whoever serves once the clients have noticed."""
    rig.kill("keeper", "server")
    await until(rig.vaults["host-0"].gone, "both are gone")
    await until(lambda: not any(client.connected for client in clients), "all notice")
    assert rig.vaults["host-0"].ensure()


async def test_killed_vault_is_restarted_and_clients_reattach_without_unmapping(rig: Rig) -> None:
    """Bytes are readable throughout, at the same addresses; readers keep their seats; everyone is told of the loss."""
    told: list[str] = []
    async with rig.client(0, on_lost=told.append) as writer, rig.client(1, on_lost=told.append) as reader:
        await write(writer)
        assert await reader.acquire("ro", 1000) == "ro"
        assert reader.mapped is not None
        address = reader.mapped.address
        rig.kill("server")
        await until(lambda: len(told) == 2, "both are told")
        assert digest(reader) == digest(writer) == expected(1), "while nobody serves"
        await until(lambda: reader.connected and writer.connected, "both are back")
        assert (reader.mapped.address, digest(reader)) == (address, expected(1))
        seen = await facts(reader)
        assert (seen["weights"], seen["readers"]) == ("RO", 2)


async def test_superseded_weights_do_not_come_back_with_a_restarted_vault(rig: Rig) -> None:
    """What superseded them was asked to go, and a reader has the old ones mapped still: a new vault gives none."""
    async with rig.client(0) as reader:
        assert await reader.acquire("rw", 5000) == "rw"
        await load(reader, 1)
        old = await reader.commit()
        async with rig.client(1) as replacer:
            assert await replacer.acquire("rw", 5000, replace=old) == "rw"
            await load(replacer, 2)
            new = await replacer.commit()
            await replacer.release()
            await replacer.drop(new, 5000)
            assert await replacer.acquire("ro", 0) == "empty"
        lost = reader.link()
        rig.kill("server")
        await back(reader, lost)
        async with rig.client(2) as late:
            assert await late.acquire("ro", 0) == "empty"
            assert digest(reader) == expected(1)
            await write(late, 3)
            assert digest(late) == expected(3)


async def test_waiter_of_a_killed_vault_is_told_at_once_and_may_ask_again(rig: Rig) -> None:
    """ConnectionError, long before its time-out; the new vault takes the same question."""
    async with rig.client(0) as writer, rig.client(1) as waiter:
        assert await writer.acquire("rw", 1000) == "rw"
        waiting = asyncio.ensure_future(waiter.acquire("ro", 60_000, wait_for_writer=True))
        await asyncio.sleep(0)
        rig.kill("server")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(waiting, BOUND_S)
        await waiter.connect()
        waiting = asyncio.ensure_future(waiter.acquire("ro", 60_000, wait_for_writer=True))
        await writer.connect()
        await write(writer, 2)
        assert await waiting == "ro"
        assert digest(waiter) == expected(2)


async def test_half_done_writer_of_a_killed_vault_is_told_aborted(rig: Rig) -> None:
    """Nothing of what it wrote is ever seen; it asks and writes again."""
    told: list[str] = []
    async with rig.client(0, on_lost=told.append) as writer, rig.client(1) as other:
        assert await writer.acquire("rw", 1000) == "rw"
        await load(writer, 1)
        rig.kill("server")
        await until(lambda: told, "it is told")
        with pytest.raises(VaultRefused) as refused:
            await writer.commit()
        assert refused.value.code == "aborted"
        await until(lambda: not other.connected, "the other notices too")
        await other.connect()
        assert await other.acquire("ro", 1000) == "empty"
        await writer.connect()
        await write(writer, 2)
        assert digest(writer) == expected(2)


async def test_killed_keeper_is_replaced_and_the_next_one_has_everything(rig: Rig) -> None:
    """Then the vault dies: weights, layout and seats come from the new keeper."""
    async with rig.client(0) as writer, rig.client(1) as reader:
        await write(writer)
        await reader.acquire("ro", 1000)
        old = rig.pids("keeper")
        rig.kill("keeper")
        await until(lambda: rig.pids("keeper") not in ([], old), "another keeper")
        assert await reader.slab_checksum(0), "the vault serves on"
        async with rig.client(2) as third:  # acknowledged only once the new keeper has all
            assert await third.acquire("ro", 5000) == "ro"
        await until(lambda: _readers(reader, 2), "the third has left")
        links = reader.link(), writer.link()
        rig.kill("server")
        await back(reader, links[0])
        await back(writer, links[1])
        assert (await facts(reader))["readers"] == 2
        async with rig.client(3) as late:
            assert await late.acquire("ro", 1000) == "ro"
            assert digest(late) == expected(1)


async def _readers(client: MemoryClient, count: int) -> bool:
    return (await facts(client))["readers"] == count


async def test_engines_give_the_weights_back_after_both_died(rig: Rig) -> None:
    """Committed bytes outlive vault and keeper as long as one engine maps them."""
    async with rig.client(0) as writer, rig.client(1) as reader:
        await write(writer)
        await reader.acquire("ro", 1000)
        await restarted(rig, reader, writer)
        await until(lambda: reader.connected and writer.connected, "both are back")
        async with rig.client(2) as late:
            assert await late.acquire("rw_or_ro", 5000) == "ro"
            assert digest(late) == digest(reader) == expected(1)
            assert (await facts(late))["readers"] == 3


async def test_nothing_is_written_anew_while_a_mapper_may_still_give_back(rig: Rig) -> None:
    """A newcomer that would load waits; the mapper, frozen for a while, gives back; the newcomer reads."""
    async with rig.engine(0) as mapper:
        await mapper.do("open")
        assert await mapper.do("acquire", mode="rw") == "rw"
        await mapper.do("load", seed=5)
        await mapper.do("commit")
        mapper.signal(signal.SIGSTOP)
        await restarted(rig)
        async with rig.client(1) as newcomer:
            asking = asyncio.ensure_future(newcomer.acquire("rw_or_ro", 10_000))
            await until(lambda: _waiting(rig), "it waits")
            mapper.signal(signal.SIGCONT)
            assert await asking == "ro"
            assert digest(newcomer) == expected(5)


async def _waiting(rig: Rig) -> bool:
    async with rig.client(9) as looker:
        return bool((await facts(looker))["waiting"])


async def test_memory_nobody_maps_is_gone_with_both_and_everyone_is_told(rig: Rig) -> None:
    """EMPTY, after the bounded time in which somebody might have given it back; then it can be loaded."""
    told: list[str] = []
    async with rig.client(0, on_lost=told.append) as writer:
        await write(writer)
        await writer.unmap()
        await restarted(rig, writer)
        assert await writer.remap(30_000) == "empty"
        assert (await facts(writer))["uptime_s"] >= DONATION_S
        assert told
        await write(writer, 1)
        assert digest(writer) == expected(1)


async def test_uncommitted_weights_are_never_given_back(rig: Rig) -> None:
    """A writer that had not committed when both died has nothing that others may read."""
    async with rig.client(0) as writer:
        assert await writer.acquire("rw", 1000) == "rw"
        await load(writer)
        await restarted(rig)
        async with rig.client(1) as other:
            assert await other.acquire("ro", 10_000) == "empty"


async def test_whoever_serves_starts_both_again_by_itself(rig: Rig) -> None:
    """`watch` needs nobody's call: killed together twice, and the weights are still there."""
    watching = asyncio.create_task(rig.vaults["host-0"].watch())
    async with rig.client(0) as writer:
        await write(writer)
        for _ in range(2):
            link = writer.link()
            rig.kill("keeper", "server")
            await back(writer, link)
            assert (await facts(writer))["weights"] == "RO"
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_end_of_the_lifeline_ends_both_and_nothing_is_started_again(rig: Rig) -> None:
    """Also where the keeper is no child of whoever started the first one."""
    async with rig.client(0) as client:
        old = rig.pids("keeper")
        rig.kill("keeper")
        await until(lambda: rig.pids("keeper") not in ([], old), "another keeper")
        assert client.connected
        rig.vaults["host-0"].stop()
        assert rig.pids("keeper") == rig.pids("server") == []


@pytest.mark.parametrize("kind", ["server", "keeper"])
async def test_sigterm_ends_both_and_nothing_is_started_again(rig: Rig, kind: str) -> None:
    """To whichever of the two it is sent; also whoever serves does not start them."""
    async with rig.client(0):
        os.kill(rig.pids(kind)[0], signal.SIGTERM)
        await until(rig.vaults["host-0"].gone, "both are gone")
        assert not rig.vaults["host-0"].ensure()
        assert rig.pids("keeper") == rig.pids("server") == []


async def test_vault_and_keeper_end_with_whoever_serves() -> None:
    """Its SIGKILL closes the lifeline too."""
    rig = Rig()
    code = (
        "import sys, time\nfrom holdfast.memory.vault.launch import VaultProcesses\n"
        "from holdfast.memory.vault.settings import VaultSettings\n"
        "VaultProcesses(VaultSettings('host-0', sys.argv[1])).start()\ntime.sleep(60)"
    )
    serving = await asyncio.create_subprocess_exec(sys.executable, "-c", code, rig.path())
    await until(lambda: rig.pids("server"), "the vault lives")
    serving.kill()
    await serving.wait()
    await until(lambda: not rig.pids("server") and not rig.pids("keeper"), "both are gone")
    shutil.rmtree(rig.directory)


async def test_vault_that_cannot_live_is_started_more_and_more_slowly() -> None:
    """Its directory is gone, so it dies at once, each time: the pauses grow."""
    rig = Rig()
    rig.vaults["host-0"].start()
    try:
        await until(lambda: rig.pids("server"), "it lives")
        async with rig.client(0):
            pass
        log = rig.log.rename(rig.directory.with_suffix(".log"))
        for left in rig.directory.iterdir():
            left.unlink()
        rig.directory.rmdir()
        begun_s = asyncio.get_running_loop().time()
        rig.kill("server")
        await until(lambda: log.read_text().count("Traceback") >= 4, "four starts")
        assert asyncio.get_running_loop().time() - begun_s >= 0.05 + 0.1 + 0.2
        log.unlink()
    finally:
        rig.vaults["host-0"].stop()
