"""Unmap and remap: the same bytes at the same addresses, or the right error in time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator

import pytest

from holdfast.memory.client.calls import StaleMemoryLayoutError
from holdfast.memory.client.weights import MemoryClient
from holdfast.testing.waiting import BOUND_S
from tests.rigs.memory.vaults import SOON_MS, Rig, digest, expected, facts, load, until, write

pytestmark = pytest.mark.processes


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[MemoryClient]:
    """A client that wrote weights and gave its mapping up."""
    async with rig.client() as made:
        await write(made, 1, "first")
        await made.unmap()
        yield made


async def restart_empty(rig: Rig) -> None:
    """A clean end and a new start: nothing is kept."""
    rig.vaults["host-0"].stop()
    rig.vaults["host-0"].start()


async def test_remap_brings_the_same_bytes_to_the_same_addresses(rig: Rig, client: MemoryClient) -> None:
    """Addresses stay put; a second time too."""
    assert client.mapped is not None
    before = client.mapped.addresses()
    for _ in range(2):
        assert await client.remap() == "ro"
        assert client.mapped.addresses() == before
        assert digest(client) == expected(1)
        await client.unmap()


async def test_remap_waits_for_a_writer_that_is_soon_done(rig: Rig, client: MemoryClient) -> None:
    """The vault was restarted, somebody loads the same weights again: remap waits for the commit."""
    await restart_empty(rig)
    async with rig.client(1) as writer:
        assert await writer.acquire("rw", SOON_MS) == "rw"
        waking = asyncio.ensure_future(client.remap(SOON_MS))
        await rig.shows(waiting=1)
        await load(writer, 1, "first")
        await writer.commit()
        assert await waking == "ro"
        assert digest(client) == expected(1)


async def test_remap_times_out_in_the_time_asked_for(rig: Rig, client: MemoryClient) -> None:
    """And not before, while a writer never ends."""
    await restart_empty(rig)
    async with rig.client(1) as writer:
        await writer.acquire("rw", SOON_MS)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.remap(1000), BOUND_S)
        assert 0.8 <= loop.time() - begun_s < BOUND_S
        assert (await facts(writer))["waiting"] == 0


async def test_remap_of_a_frozen_vault_ends_in_time(rig: Rig, client: MemoryClient) -> None:
    """Even where nobody answers at all: never a hang."""
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


@pytest.mark.parametrize(("seed", "identity"), [(2, "other weights"), (1, "the same shapes, other content")])
async def test_remap_of_other_weights_is_stale(rig: Rig, client: MemoryClient, seed: int, identity: str) -> None:
    """Other weights, or the same shapes with another content identity: StaleMemoryLayoutError, and nothing is held."""
    await restart_empty(rig)
    async with rig.client(1) as writer:
        await write(writer, seed, identity, count=3 if seed == 1 else 4)
        with pytest.raises(StaleMemoryLayoutError):
            await client.remap(SOON_MS)
        await rig.shows(readers=1)


async def test_remap_without_a_vault_is_a_connection_error(rig: Rig, client: MemoryClient) -> None:
    """At once, and the message says how to start one; also where a socket file is left that nobody serves any more."""
    rig.vaults["host-0"].stop()
    await until(lambda: not client.connected, "it notices")
    with pytest.raises(ConnectionError, match="holdfast run vault"):  # it does not wait for one to come
        await asyncio.wait_for(client.remap(2 * SOON_MS), BOUND_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(rig.path())
        with pytest.raises(ConnectionError):
            await client.remap(SOON_MS)


async def test_remap_after_an_empty_restart_is_empty_at_once(rig: Rig, client: MemoryClient) -> None:
    """And the engine can load again, at the same addresses."""
    assert client.mapped is not None
    before = client.mapped.addresses()
    await restart_empty(rig)
    assert await asyncio.wait_for(client.remap(2 * SOON_MS), BOUND_S) == "empty"  # it does not wait for a writer
    assert await client.acquire("rw_or_ro", SOON_MS) == "rw"
    await load(client, 1, "first")
    assert client.mapped.addresses() == before
    await client.commit()
    assert digest(client) == expected(1)


async def test_remap_after_a_vault_restart_has_the_same_weights(rig: Rig, client: MemoryClient) -> None:
    """The keeper kept them: a SIGKILL of the vault meanwhile changes nothing."""
    rig.kill("server")
    await until(lambda: not client.connected, "it notices")
    assert await client.remap(SOON_MS) == "ro"
    assert digest(client) == expected(1)
