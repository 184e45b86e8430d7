"""Vault and keeper killed, alone and together: nothing mapped is touched, nothing committed is lost that anyone has."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.memory.client.calls import VaultRefused
from holdfast.memory.vault.settings import VaultSettings
from holdfast.testing.processes import fd_count
from holdfast.testing.waiting import BOUND_S
from tests.rigs.memory.vaults import SOON_MS, Rig, back, descriptors_of, digest, expected, facts, load, until, write

pytestmark = pytest.mark.processes


async def test_killed_vault_is_restarted_and_clients_reattach_without_unmapping(rig: Rig) -> None:
    """Bytes are readable throughout, at the same addresses; readers keep their locks; everyone is told of the loss."""
    told: list[str] = []
    async with rig.client(0, on_lost=told.append) as writer, rig.client(1, on_lost=told.append) as reader:
        await write(writer)
        assert await reader.acquire("ro", SOON_MS) == "ro"
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
        old = await write(reader)
        async with rig.client(1) as replacer:
            assert await replacer.acquire("rw", SOON_MS, replace=old) == "rw"
            await load(replacer, 2)
            new = await replacer.commit()
            await replacer.release()
            await replacer.drop(new, SOON_MS)
            assert await replacer.acquire("ro", SOON_MS) == "empty"
        lost = reader.link()
        rig.kill("server")
        await back(reader, lost)
        async with rig.client(2) as late:
            assert await late.acquire("ro", SOON_MS) == "empty"
            assert digest(reader) == expected(1)
            await write(late, 3)
            assert digest(late) == expected(3)


async def test_waiter_of_a_killed_vault_is_told_at_once_and_may_ask_again(rig: Rig) -> None:
    """ConnectionError, long before its time-out; the new vault takes the same question."""
    async with rig.client(0) as writer, rig.client(1) as waiter:
        assert await writer.acquire("rw", SOON_MS) == "rw"
        waiting = asyncio.ensure_future(waiter.acquire("ro", SOON_MS, wait_for_writer=True))
        await asyncio.sleep(0)
        rig.kill("server")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(waiting, BOUND_S)
        await waiter.connect(BOUND_S)
        waiting = asyncio.ensure_future(waiter.acquire("ro", SOON_MS, wait_for_writer=True))
        await writer.connect(BOUND_S)
        await write(writer, 2)
        assert await waiting == "ro"
        assert digest(waiter) == expected(2)


async def test_half_done_writer_of_a_killed_vault_is_told_aborted(rig: Rig) -> None:
    """Nothing of what it wrote is ever seen; it asks and writes again."""
    told: list[str] = []
    async with rig.client(0, on_lost=told.append) as writer, rig.client(1) as other:
        assert await writer.acquire("rw", SOON_MS) == "rw"
        await load(writer, 1)
        rig.kill("server")
        await until(lambda: told, "it is told")
        with pytest.raises(VaultRefused) as refused:
            await writer.commit()
        assert refused.value.code == "aborted"
        await until(lambda: not other.connected, "the other notices too")
        await other.connect(BOUND_S)
        assert await other.acquire("ro", SOON_MS) == "empty"
        await writer.connect(BOUND_S)
        await write(writer, 2)
        assert digest(writer) == expected(2)


async def test_killed_keeper_is_replaced_and_the_next_one_has_everything(rig: Rig) -> None:
    """Then the vault dies: weights, layout and readers come from the new keeper."""
    async with rig.client(0) as writer, rig.client(1) as reader:
        await write(writer)
        await reader.acquire("ro", SOON_MS)
        old = rig.pids("keeper")
        rig.kill("keeper")
        await until(lambda: rig.pids("keeper") not in ([], old), "another keeper")
        assert (await facts(reader))["readers"] == 2, "the vault serves on"
        async with rig.client(2) as third:  # acknowledged only once the new keeper has all
            assert await third.acquire("ro", SOON_MS) == "ro"
        await rig.shows(readers=2)
        links = reader.link(), writer.link()
        rig.kill("server")
        await back(reader, links[0])
        await back(writer, links[1])
        assert (await facts(reader))["readers"] == 2
        async with rig.client(3) as late:
            assert await late.acquire("ro", SOON_MS) == "ro"
            assert digest(late) == expected(1)


async def test_engines_give_the_weights_back_after_both_died(patient_rig: Rig) -> None:
    """Committed bytes outlive vault and keeper as long as one engine maps them."""
    rig = patient_rig
    async with rig.client(0) as writer, rig.client(1) as reader:
        await write(writer)
        await reader.acquire("ro", SOON_MS)
        await rig.start_again(reader, writer)
        await until(lambda: reader.connected and writer.connected, "both are back")
        async with rig.client(2) as late:
            assert await late.acquire("rw_or_ro", SOON_MS) == "ro"
            assert digest(late) == digest(reader) == expected(1)
            assert (await facts(late))["readers"] == 3


async def test_nothing_is_written_anew_while_a_mapper_may_still_give_back(patient_rig: Rig) -> None:
    """A newcomer that would load waits; the mapper, frozen for a while, gives back; the newcomer reads."""
    rig = patient_rig
    async with rig.engine(0) as mapper:
        await mapper.do("open")
        assert await mapper.do("acquire", mode="rw") == "rw"
        await mapper.do("load", seed=5)
        await mapper.do("commit")
        mapper.signal(signal.SIGSTOP)
        await rig.start_again()
        async with rig.client(1) as newcomer:
            asking = asyncio.ensure_future(newcomer.acquire("rw_or_ro", SOON_MS))
            await rig.shows(waiting=1)
            mapper.signal(signal.SIGCONT)
            assert await asking == "ro"
            assert digest(newcomer) == expected(5)


async def test_memory_nobody_maps_is_gone_with_both_and_everyone_is_told(rig: Rig) -> None:
    """EMPTY, after the bounded time in which somebody might have given it back; then it can be loaded."""
    told: list[str] = []
    async with rig.client(0, on_lost=told.append) as writer:
        await write(writer)
        await writer.unmap()
        await rig.start_again(writer)
        assert await writer.remap(SOON_MS) == "empty"
        assert (await facts(writer))["uptime_s"] >= VaultSettings("host-0", "").weights_donation_s
        assert told
        await write(writer, 1)
        assert digest(writer) == expected(1)


async def test_uncommitted_weights_are_never_given_back(rig: Rig) -> None:
    """A writer that had not committed when both died has nothing that others may read."""
    async with rig.client(0) as writer:
        assert await writer.acquire("rw", SOON_MS) == "rw"
        await load(writer)
        await rig.start_again()
        async with rig.client(1) as other:
            assert await other.acquire("ro", SOON_MS) == "empty"


@pytest.mark.parametrize("kind", ["server", "keeper"])
async def test_sigterm_ends_both_and_nothing_is_started_again(rig: Rig, kind: str) -> None:
    """To whichever of the two it is sent; also whoever serves does not start them."""
    async with rig.client(0):
        os.kill(rig.pids(kind)[0], signal.SIGTERM)
        await until(rig.vaults["host-0"].gone, "both are gone")
        assert not rig.vaults["host-0"].ensure()
        assert rig.pids("keeper") == rig.pids("server") == []


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


# -- one vault and one keeper for each socket, also where descriptors run out or somebody starts another


async def test_keeper_that_lost_its_link_leaves_and_one_vault_comes_back(rig: Rig) -> None:
    """At the limit of its descriptors it cannot take what it should keep; the vault starts another one, and when the
    vault dies later only that one starts a vault, which has everything."""
    async with rig.client(0) as writer:
        old = rig.pids("keeper")[0]
        with descriptors_of(old, fd_count(old)):
            await write(writer)
            await until(lambda: old not in rig.pids("keeper"), "the old keeper is gone")
        await until(lambda: len(rig.pids("keeper")) == 1, "there is one keeper")
        before, link = rig.pids("server"), writer.link()
        rig.kill("server")
        await until(lambda: rig.pids("server") not in ([], before), "another vault")
        await back(writer, link)
        assert len(rig.pids("server")) == len(rig.pids("keeper")) == 1
        assert (await facts(writer))["weights"] == "RO"
        assert digest(writer) == expected(1)


async def test_vault_whose_socket_is_another_ones_leaves_it_to_that_one() -> None:
    """The lock beside the socket decides; keeper and vault end, and do not try again and again."""
    rig = Rig()
    with contextlib.ExitStack() as held:
        other = os.open(f"{rig.path()}.lock", os.O_RDWR | os.O_CREAT)
        held.callback(os.close, other)
        fcntl.flock(other, fcntl.LOCK_EX)
        with rig:
            await until(rig.vaults["host-0"].gone, "both have left")
            assert "another vault" in rig.log.read_text()


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def test_two_at_once_never_both_serve(rig: Rig) -> None:
    """A second vault started with the first one's own descriptors does not get as far as the first call."""
    async with rig.client(0) as client:
        vault = rig.pids("server")[0]
        words = command_of(vault)
        ours, theirs = os.pipe()
        second = await asyncio.create_subprocess_exec(
            *words[:4], str(theirs), str(theirs), str(ours), pass_fds=(ours, theirs), stderr=asyncio.subprocess.PIPE
        )
        _, said = await second.communicate()
        os.close(ours)
        os.close(theirs)
        assert second.returncode == 75, said
        assert (await facts(client))["pid"] == vault


def soft_limit(pid: int) -> tuple[int, int]:
    found = re.search(r"Max open files\s+(\d+)\s+(\d+)", Path(f"/proc/{pid}/limits").read_text())
    assert found is not None
    return int(found.group(1)), int(found.group(2))


async def test_every_process_takes_as_many_descriptors_as_it_may() -> None:
    """Started under a low soft limit: vault, keeper, and the children of a supervisor raise it to the hard one."""
    with Rig() as rig:
        settings = {"state_dir": str(rig.directory), "name": "store", "address": f"unix://{rig.directory}/store.sock"}
        store = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'ulimit -S -n 128; exec "$@"', "sh", sys.executable, "-m", "holdfast.roles", "store"),
            msgspec.json.encode(settings).decode(),
        )
        try:
            await until((rig.directory / "run" / "store.json").exists, "the store is ready")
            low, hard = soft_limit(store.pid)
            assert low == hard
        finally:
            store.kill()
            await store.wait()
        async with rig.client(0):
            for pid in (*rig.pids("server"), *rig.pids("keeper")):
                low, hard = soft_limit(pid)
                assert low == hard


async def test_vault_refuses_newcomers_before_it_is_out_of_descriptors(rig: Rig) -> None:
    """Those who are here keep what they need; who comes is told why it cannot."""
    async with rig.client(0) as client:
        vault = rig.pids("server")[0]
        with descriptors_of(vault, fd_count(vault) + 40):
            with pytest.raises(Exception, match="descriptors"):
                async with rig.client(1):
                    pass
            await write(client)
        assert digest(client) == expected(1)
