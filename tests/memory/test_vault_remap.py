"""Unmap and remap: the same bytes at the same addresses, or the right error in time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest
from vault_rig import SOON_MS, Rig, digest, expected, facts, load, until, write

from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.errors import StaleMemoryLayoutError
from holdfast.testing.waiting import BOUND_S

pytestmark = pytest.mark.processes


async def sleeper_of(rig: Rig, seed: int = 1, identity: str | None = None) -> MemoryClient:
    """A client that wrote weights and gave its mapping up."""
    client = MemoryClient(rig.path(), open_device("host-0"), 0)
    await client.connect(BOUND_S)
    await write(client, seed, identity)
    await client.unmap()
    return client


async def restart_empty(rig: Rig) -> None:
    """A clean end and a new start: nothing is kept."""
    rig.vaults["host-0"].stop()
    rig.vaults["host-0"].start()


async def test_remap_brings_the_same_bytes_to_the_same_addresses(rig: Rig) -> None:
    """Addresses stay put; a second time too."""
    client = await sleeper_of(rig)
    assert client.mapped is not None
    before = client.mapped.addresses()
    for _ in range(2):
        assert await client.remap() == "ro"
        assert client.mapped.addresses() == before
        assert digest(client) == expected(1)
        await client.unmap()
    await client.close()


async def test_remap_waits_for_a_writer_that_is_soon_done(rig: Rig) -> None:
    """The vault was restarted, somebody loads the same weights anew: remap waits for the commit."""
    client = await sleeper_of(rig)
    await restart_empty(rig)
    async with rig.client(1) as writer:
        assert await writer.acquire("rw", SOON_MS) == "rw"
        waking = asyncio.ensure_future(client.remap(SOON_MS))
        await rig.shows(waiting=1)
        await load(writer, 1)
        await writer.commit()
        assert await waking == "ro"
        assert digest(client) == expected(1)
    await client.close()


async def test_remap_times_out_in_the_time_asked_for(rig: Rig) -> None:
    """And not before, while a writer never ends."""
    client = await sleeper_of(rig)
    await restart_empty(rig)
    async with rig.client(1) as writer:
        await writer.acquire("rw", SOON_MS)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.remap(1000), BOUND_S)
        assert 0.8 <= loop.time() - begun_s < BOUND_S
        assert (await facts(writer))["waiting"] == 0
    await client.close()


async def test_remap_of_a_frozen_vault_ends_in_time(rig: Rig) -> None:
    """Even where nobody answers at all: never a hang."""
    client = await sleeper_of(rig)
    vault = rig.pids("server")[0]
    os.kill(vault, signal.SIGSTOP)
    try:
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.remap(1000), BOUND_S)
        assert asyncio.get_running_loop().time() - begun_s < BOUND_S
    finally:
        os.kill(vault, signal.SIGCONT)
    assert await client.remap(SOON_MS) == "ro", "what was cancelled holds nothing"
    await client.close()


@pytest.mark.parametrize(("seed", "identity"), [(2, "other weights"), (1, "the same shapes, other content")])
async def test_remap_of_other_weights_is_stale(rig: Rig, seed: int, identity: str) -> None:
    """Other weights, or the same shapes with another content identity: StaleMemoryLayoutError, and nothing is held."""
    client = await sleeper_of(rig, 1, "first")
    await restart_empty(rig)
    async with rig.client(1) as writer:
        await write(writer, seed, identity, count=3 if seed == 1 else 4)
        with pytest.raises(StaleMemoryLayoutError):
            await client.remap(SOON_MS)
        await rig.shows(readers=1)
    await client.close()


async def test_remap_without_a_vault_is_a_connection_error(rig: Rig) -> None:
    """At once, and the message says how to start one; also where a socket file is left that nobody serves any more."""
    client = await sleeper_of(rig)
    rig.vaults["host-0"].stop()
    await until(lambda: not client.connected, "it notices")
    with pytest.raises(ConnectionError, match="holdfast memory serve"):  # it does not wait for one to come
        await asyncio.wait_for(client.remap(2 * SOON_MS), BOUND_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(rig.path())
        with pytest.raises(ConnectionError):
            await client.remap(SOON_MS)
    await client.close()


async def test_remap_after_an_empty_restart_is_empty_at_once(rig: Rig) -> None:
    """And the engine can load again, at the same addresses."""
    client = await sleeper_of(rig)
    assert client.mapped is not None
    before = client.mapped.addresses()
    await restart_empty(rig)
    assert await asyncio.wait_for(client.remap(2 * SOON_MS), BOUND_S) == "empty"  # it does not wait for a writer
    assert await client.acquire("rw_or_ro", SOON_MS) == "rw"
    await load(client, 1)
    assert client.mapped.addresses() == before
    await client.commit()
    assert digest(client) == expected(1)
    await client.close()


async def test_remap_after_a_vault_restart_has_the_same_weights(rig: Rig) -> None:
    """The keeper kept them: a SIGKILL of the vault meanwhile changes nothing."""
    client = await sleeper_of(rig)
    rig.kill("server")
    await until(lambda: not client.connected, "it notices")
    assert await client.remap(SOON_MS) == "ro"
    assert digest(client) == expected(1)
    await client.close()
