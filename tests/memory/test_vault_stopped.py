"""Vaults and keepers that are stopped: found by the kernel's word, killed and replaced; left behind by nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from holdfast.memory.client.calls import MemoryLost
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.testing.processes import state_of
from holdfast.testing.waiting import BOUND_S
from tests.rigs.memory.vaults import MIB, PATIENT, SOON_MS, Rig, back, digest, expected, facts, until, write

pytestmark = pytest.mark.processes


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """With somebody who looks after vault and keeper, started as with nohup: the kernel's hang-up ends nobody."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Rig(**PATIENT) as started:
            watching = asyncio.create_task(started.vaults["host-0"].watch())
            yield started
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        signal.signal(signal.SIGHUP, before)


def stop(rig: Rig, *kinds: str) -> list[int]:
    found = [pid for kind in kinds for pid in rig.pids(kind)]
    assert len(found) == len(kinds)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    return found


def replaced(rig: Rig, old: list[int]) -> bool:
    living = rig.pids("server") + rig.pids("keeper")
    return len(living) == 2 and not set(old) & set(living)


@pytest.mark.parametrize("kinds", [("server",), ("keeper",), ("server", "keeper")])
async def test_stopped_vault_or_keeper_is_replaced_and_a_takeover_succeeds(rig: Rig, kinds: tuple[str, ...]) -> None:
    """The owner dies while it is stopped: the next one has pages and weights all the same."""
    async with rig.client(2) as writer, rig.engine(0) as owner, rig.engine(1) as second:
        await write(writer)
        await owner.owns_the_pool()
        await second.do("open")
        await second.do("join", epoch=None)
        link = writer.link()
        old = stop(rig, *kinds)
        if len(kinds) == 2:  # then the pool is its owner's to give back
            await owner.back()
        await owner.kill()
        assert await second.do("own", epoch=11, timeout_ms=SOON_MS) is True
        assert await second.do("map_pool") == "pages"
        await until(lambda: replaced(rig, old), "replaced")
        if "server" in kinds:
            await back(writer, link)
        assert (await facts(writer))["weights"] == "RO"
        assert digest(writer) == expected(1)


@pytest.mark.parametrize("kind", ["server", "keeper"])
async def test_one_that_is_stopped_before_its_first_word_is_replaced_too(rig: Rig, kind: str) -> None:
    """It was just started for another that died, and is stopped while its interpreter loads: who started it said so."""
    async with rig.client(0):
        first = rig.pids(kind)
        rig.kill(kind)
        second: list[int] = await until(lambda: [pid for pid in rig.pids(kind) if pid not in first], "another")
        # The first may still be ending, and a group's leader that ends lets the stopped ones of its group run on.
        await until(lambda: state_of(first[0]) in ("Z", ""), "the first has ended")
        os.kill(second[0], signal.SIGSTOP)
        await until(lambda: rig.pids(kind) and not set(rig.pids(kind)) & {*first, *second}, "replaced")


@pytest.mark.parametrize("kinds", [(), ("server",), ("keeper",)])
async def test_end_leaves_nobody_behind(kinds: tuple[str, ...]) -> None:
    """Also a keeper that the vault itself has started; and nobody waits for one that is stopped to leave."""
    with Rig() as rig:
        async with rig.client(0):
            first = rig.pids("keeper")
            rig.kill("keeper")
            await until(lambda: rig.pids("keeper") not in ([], first), "another keeper")
        vault = rig.vaults["host-0"]
        await until(lambda: not vault.gone() and set(vault.members.pids.values()) == _living(rig), "both are known")
        stop(rig, *kinds)
        vault.stop()
        await until(lambda: not _living(rig), "nobody is left")


def _living(rig: Rig) -> set[int]:
    return {*rig.pids("server"), *rig.pids("keeper")}


def listens(rig: Rig) -> bool:
    """Its socket is there a moment before anybody listens on it."""
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(rig.path()) == 0


@contextlib.asynccontextmanager
async def serving(rig: Rig) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "holdfast", "memory", "serve", "--device", "host-0"]
    launcher = await asyncio.create_subprocess_exec(
        *command, "--socket-dir", str(rig.directory), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield launcher
    finally:
        with contextlib.suppress(ProcessLookupError):
            launcher.terminate()
        await launcher.wait()


async def test_engines_give_everything_back_after_the_launcher_was_killed() -> None:
    """Vault and keeper end with it; that is a loss and no clean end: the next vault takes weights and pool back."""
    rig = Rig()
    async with serving(rig) as first:
        await until(lambda: listens(rig), "it listens")
        noticed: list[object] = []
        client = MemoryClient(rig.path(), open_device("host-0"), 0, on_notice=noticed.append)
        await client.connect(BOUND_S)
        await write(client)
        pool = PoolClient(client, open_device("host-0"))
        await pool.acquire(10, "g", SOON_MS)
        await pool.make(MIB, [2 * MIB])
        link = client.link()
        first.kill()
        await until(lambda: not rig.pids("server") and not rig.pids("keeper"), "both have ended")
        async with serving(rig):
            await back(client, link)
            seen = await facts(client)
            assert (seen["weights"], seen["pool"]) == ("RO", "OWNED(10)")
            assert digest(client) == expected(1)
            assert not [notice for notice in noticed if isinstance(notice, MemoryLost)]
            async with rig.client(1) as late:
                assert await late.acquire("rw_or_ro", SOON_MS) == "ro"
            pool.unmap()
            await client.close()
        assert not list(rig.directory.glob("*.state")), "SIGTERM to who serves is a clean end, after which nobody waits"
    rig.__exit__()
