"""The load under which a vault is killed: processes that write, read and own, and say what they did and what was wrong.

`python -m bench.vault JSON` plays one role until it is killed: one JSON object per line on stdout, each
with the time it was said. The bytes of a tensor follow from the weights' identity, those of a KV page from its key; so
a process that maps them knows whether what it sees was ever complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import sys
import time
from typing import Any

from holdfast.memory.client.calls import StaleMemoryLayoutError, VaultRefused
from holdfast.memory.client.weights import EMPTY, RO, RW, MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.layout import TensorSpec
from holdfast.testing.waiting import until

SLAB_BYTES = 2 * 1024 * 1024
# Longer than any restart here; a wait that reaches it is a finding.
WAIT_MS = 20_000
PAUSE_S = 0.02  # between tries while the vault is away

# What may happen to anyone whose vault was killed under it.
LOST = (ConnectionError, TimeoutError, FileNotFoundError)


def tensors_of(identity: str) -> list[TensorSpec]:
    """Other identities have other shapes too."""
    rng = random.Random(identity)
    sizes = [rng.randrange(200_000, 1_500_000) for _ in range(rng.randrange(3, 8))]
    return [TensorSpec(f"t{place}", (size,), (1,), "uint8", size) for place, size in enumerate(sizes)]


def content(name: str, size: int) -> bytes:
    digest = hashlib.blake2b(name.encode(), digest_size=64).digest()
    return (digest * (size // len(digest) + 1))[:size]


def wrong_tensors(client: MemoryClient) -> list[str]:
    """Names of mapped tensors whose bytes are not those of the identity; empty if all is well."""
    assert client.mapped is not None
    layout, specs = client.mapped.layout, tensors_of(client.mapped.layout.identity)
    if [(place.name, place.size_bytes) for place in layout.tensors] != [(spec.name, spec.size_bytes) for spec in specs]:
        return ["the layout itself"]
    addresses = client.mapped.addresses()
    return [
        spec.name
        for spec in specs
        if client.device.read(addresses[spec.name], spec.size_bytes)
        != content(f"{layout.identity}/{spec.name}", spec.size_bytes)
    ]


class Actor:
    """What every role has."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.path: str = settings["path"]
        self.name: str = settings["name"]
        self.rng = random.Random(settings["seed"])
        self.device = open_device("host-0")
        self.lost = asyncio.Event()

    def say(self, **what: Any) -> None:
        line = json.dumps({"at_s": time.monotonic(), **what}) + "\n"
        os.write(1, line.encode())

    def client(self) -> MemoryClient:
        self.lost = asyncio.Event()
        number = int(self.name.rpartition("-")[2])
        wishes: dict[str, Any] = {"slab_bytes": SLAB_BYTES, "on_lost": lambda _: self.lost.set()}
        return MemoryClient(self.path, self.device, number, **wishes)

    async def pause(self, up_to_s: float = 0.01) -> None:
        await asyncio.sleep(self.rng.uniform(0, up_to_s))

    def verify(self, client: MemoryClient) -> None:
        """Say what is seen; the controller knows whether it was ever offered."""
        assert client.mapped is not None
        wrong = wrong_tensors(client)
        if wrong:
            self.say(wrong=f"{client.mapped.layout.identity}: {wrong} are not what was committed")
        self.say(saw=client.mapped.layout.identity, connected=client.connected)

    async def for_ever(self) -> None:
        """Rounds with a client of their own; what a vault's death does to one ends the round, nothing else may."""
        while True:
            client = self.client()
            try:
                await client.connect(WAIT_MS / 1000)
                await self.round(client)
            except LOST as error:
                self.say(retry=f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_S)
            except VaultRefused as error:
                if error.code not in ("stale", "stale_epoch", "aborted"):
                    raise
                self.say(retry=str(error))
            finally:
                await client.close()
            self.say(open_fds=len(os.listdir("/proc/self/fd")))

    async def round(self, client: MemoryClient) -> None:
        raise NotImplementedError


class Reader(Actor):
    """Acquire, verify, release; unmap, remap, verify; or stay mapped for a while, whatever happens to the vault."""

    async def round(self, client: MemoryClient) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            asked_s = time.monotonic()
            if await client.acquire("ro", WAIT_MS) == EMPTY:
                self.say(empty=True, asked_s=asked_s)
                return
            self.verify(client)
            act = self.rng.choice((self._remap, self._stay, self._release))
            await act(client)

    async def _release(self, client: MemoryClient) -> None:
        await self.pause()
        await client.release()

    async def _remap(self, client: MemoryClient) -> None:
        assert client.mapped is not None
        address = client.mapped.address
        await client.unmap()
        await self.pause()
        asked_s = time.monotonic()
        with contextlib.suppress(StaleMemoryLayoutError):  # replaced meanwhile: as it should be
            if await client.remap(WAIT_MS) == EMPTY:
                self.say(empty=True, asked_s=asked_s)
            elif client.mapped.address != address:
                self.say(wrong=f"remapped at {client.mapped.address:#x}, was at {address:#x}")
            else:
                self.verify(client)
        await client.release()

    async def _stay(self, client: MemoryClient) -> None:
        for _ in range(10):
            await self.pause()
            self.verify(client)
        await reattached(client)
        await client.release()


class Writer(Actor):
    """Write weights beside the committed ones, by their hash; now and then give up before the commit."""

    async def round(self, client: MemoryClient) -> None:
        got = await client.acquire("rw_or_ro", WAIT_MS)
        if got == RO:
            assert client.mapped is not None
            replaced = client.mapped.layout.hash()
            await client.release()
            got = await client.acquire("rw", WAIT_MS, replace=replaced)
        assert got == RW, got
        identity = f"{self.name}-{self.rng.getrandbits(48):012x}"
        await self._fill(client, identity)
        if self.rng.random() < 0.2:
            await client.release()
            self.say(gave_up=identity)
            return
        self.say(committing=identity)
        await client.commit()
        self.say(committed=identity)
        self.verify(client)
        await self.pause()
        await client.release()

    async def _fill(self, client: MemoryClient, identity: str) -> None:
        """In pieces, over bytes that are wrong everywhere: a death in between leaves something to be seen."""
        specs = tensors_of(identity)
        addresses = await client.allocate(specs, identity)
        for spec in specs:
            client.device.write(addresses[spec.name], b"\xee" * spec.size_bytes)
        for spec in specs:
            await self.pause(0.004)
            client.device.write(addresses[spec.name], content(f"{identity}/{spec.name}", spec.size_bytes))


class Checker(Actor):
    """For each line on stdin: import as an engine that was not there before, and say what it got."""

    async def for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            while not await self._import(line.strip()):  # noqa: ASYNC110 - the vault may be away
                await asyncio.sleep(PAUSE_S)

    async def _import(self, asked: str) -> bool:
        client = self.client()
        try:
            await client.connect()
            if await client.acquire("ro", WAIT_MS) != RO:
                return False
            self.verify(client)
            assert client.mapped is not None
            self.say(imported=client.mapped.layout.identity, asked=asked)
        except LOST:
            return False
        finally:
            await client.close()
        return True


async def reattached(client: MemoryClient) -> None:
    """Wait until a client that lost its vault is back; it does that by itself."""
    await until(lambda: client.connected, "the client to reattach", WAIT_MS / 1000)
