"""One vault and one keeper for each socket, also where descriptors run out or somebody starts another."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from vault_rig import Rig, back, descriptors_of, digest, expected, facts, load, until

from holdfast.testing.processes import fd_count

pytestmark = pytest.mark.processes


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with Rig() as started:
        yield started


async def test_keeper_that_lost_its_link_leaves_and_one_vault_comes_back(rig: Rig) -> None:
    """At the limit of its descriptors it cannot take what it should keep; the vault starts another one, and when the
    vault dies later only that one starts a vault, which has everything."""
    async with rig.client(0) as writer:
        old = rig.pids("keeper")[0]
        with descriptors_of(old, fd_count(old)):
            await writer.acquire("rw", 1000)
            await load(writer)
            await writer.commit()
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
            await client.acquire("rw", 1000)
            await load(client)
            await client.commit()
        assert digest(client) == expected(1)
