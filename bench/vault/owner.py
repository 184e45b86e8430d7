"""The owner's role in the load: own the KV pool under a new epoch, believe what is whole, write and publish, hand over.

A page's bytes follow from its key, so an adopter can tell whether what the index vouches for is there. Every key is
said before it is withdrawn and after it is published: the controller knows what must have survived.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass

from bench.vault.load import PAUSE_S, WAIT_MS, Actor, content, reattached
from holdfast.kv.adopt import QUARANTINED, YOURS, adopt
from holdfast.kv.geometry import Geometry
from holdfast.kv.index import FREE, FULL, OPEN, Index, index_bytes
from holdfast.memory.client.pool import PoolClient, PoolMapping
from holdfast.memory.client.weights import RO, MemoryClient
from holdfast.memory.devices import view

GEOMETRY = Geometry("kills", "uint8", block_tokens=16, layers=1, kv_heads=1, head_size=64, block_count=256)
PAGES_BYTES = 2 * 1024 * 1024
STEP_BLOCKS = 4
# An owner hands over after this many steps at most; a killed one does not get that far.
STEPS_MAX = 150
# As long as a vault that lost everything waits for what engines still have.
GIVEN_BACK_S = 3.0

assert GEOMETRY.block_bytes * GEOMETRY.block_count <= PAGES_BYTES


@dataclass(slots=True)
class _Held:
    """What an owner works on."""

    index: Index
    mapping: PoolMapping
    epoch: int
    quarantined: set[int]


class Owner(Actor):
    """Weights mapped as every engine has them, then the pool."""

    _asked_s = 0.0

    async def round(self, client: MemoryClient) -> None:
        assert await client.acquire("ro", WAIT_MS, wait_for_writer=True) == RO
        self.verify(client)
        pool = PoolClient(client, self.device)
        epoch = time.time_ns() // 1_000_000
        self.say(waits=epoch)
        self._asked_s = time.monotonic()
        granted = await pool.acquire(epoch, GEOMETRY.hash.hex(), WAIT_MS)
        held: _Held | None = None
        try:
            held = await self._take(pool, epoch, granted.adopt)
            for _ in range(self.rng.randrange(1, STEPS_MAX)):
                if not await self._still_owns(client):
                    return
                await self._step(held, client, pool)
            held.index.close()
            held = None
            self.say(handing_over=epoch)
            await pool.quiesce()
            self.say(handed_over=epoch)
        finally:
            if held is not None:
                held.index.close()
            pool.unmap()

    async def _take(self, pool: PoolClient, epoch: int, adopting: bool) -> _Held:
        if not adopting:
            mapping = await pool.make(index_bytes(GEOMETRY), [PAGES_BYTES])
            index = self._index(mapping)
            index.format(epoch)
            self.say(owns=epoch, asked_s=self._asked_s, fresh=True)
            return _Held(index, mapping, epoch, set())
        mapping = await pool.map(writable=True)
        index = self._index(mapping)
        if index.owner is None:  # its maker died between making and formatting it
            index.format(epoch)
            self.say(owns=epoch, asked_s=self._asked_s, fresh=False, keys=[], reason="never formatted")
            return _Held(index, mapping, epoch, set())
        adoption = adopt(index, epoch)
        for key, block in adoption.by_key.items():
            if self._page(mapping, block) != content(key.hex(), GEOMETRY.block_bytes):
                self.say(wrong=f"the page of block {block} is not what its key {key.hex()} vouches for")
        assert len(adoption.by_key) == adoption.verdicts.count(YOURS)
        self.say(
            owns=epoch,
            asked_s=self._asked_s,
            fresh=False,
            keys=[key.hex() for key in adoption.by_key],
            reason=adoption.reason,
        )
        index.store_owner(type(index.owner)(epoch, 0))  # every page was checked: better than any canary
        return _Held(index, mapping, epoch, set(adoption.blocks_of(QUARANTINED)))

    def _index(self, mapping: PoolMapping) -> Index:
        return Index(view(mapping.index_address, mapping.index_size, writable=True), GEOMETRY)

    def _page(self, mapping: PoolMapping, block: int) -> bytes:
        return self.device.read(mapping.pages_address + block * GEOMETRY.block_bytes, GEOMETRY.block_bytes)

    async def _still_owns(self, client: MemoryClient) -> bool:
        """After a loss: the vault says whether this session has its pool still, or has given it back."""
        if not self.lost.is_set():
            return True
        deadline_s = time.monotonic() + GIVEN_BACK_S
        while time.monotonic() < deadline_s:
            await reattached(client)
            self.lost.clear()
            if f'"pool":"OWNED({client.epoch})"'.encode() in await client.status():
                return True
            await asyncio.sleep(PAUSE_S)
        self.say(pool_lost=client.epoch)
        return False

    async def _step(self, held: _Held, client: MemoryClient, pool: PoolClient) -> None:
        """Open, write in two halves, publish a few blocks."""
        index, size = held.index, GEOMETRY.block_bytes
        if held.quarantined and pool.gpu_fence.is_set():
            for block in held.quarantined:
                if index.state(block) != FREE:
                    index.free(block)
            held.quarantined.clear()
        usable = [block for block in range(GEOMETRY.block_count) if block not in held.quarantined]
        blocks = self.rng.sample(usable, min(STEP_BLOCKS, len(usable)))
        assert all(index.state(block) != OPEN for block in blocks)
        self.say(withdrawing=[index.entry(block).key.hex() for block in blocks if index.state(block) == FULL])
        generations = {block: index.open(block) for block in blocks}
        keys = {block: hashlib.blake2b(self.rng.randbytes(16), digest_size=16).digest() for block in blocks}
        for part in (slice(0, size // 2), slice(size // 2, size)):
            for block in blocks:
                at = held.mapping.pages_address + block * size + part.start
                self.device.write(at, content(keys[block].hex(), size)[part])
            await asyncio.sleep(0)
        for block in blocks:
            index.publish(block, generations[block], keys[block], epoch=held.epoch, depth=0, tokens=16)
        self.say(published=[key.hex() for key in keys.values()], connected=client.connected)
        await self.pause(PAUSE_S / 4)
