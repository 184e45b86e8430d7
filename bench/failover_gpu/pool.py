"""An engine whose weights and KV pool are the vault's: mapped writable ahead of time, woken with one kernel.

A whole block is filled from its key, so that every wrong word is seen after adoption. Always true: from the kill to the
first finished kernel only that launch and the wait for it are driver calls; blocks are handed out by the pool alone.
"""

from __future__ import annotations

from random import Random, SystemRandom
from typing import Any

from bench.failover_gpu.engine import WAIT_MS, Engine, Settings
from holdfast.kv.adopt import Adoption, Follower
from holdfast.kv.geometry import KEY_BYTES, Geometry
from holdfast.kv.index import Index, index_bytes
from holdfast.kv.pool import NoRoom, Pool
from holdfast.memory.client.weights import RO
from holdfast.memory.devices import view
from holdfast.memory.layout import TensorSpec
from tests.rigs.gpu.lane import Piece

BLOCK_TOKENS = 16
WEIGHTS = "failover-bench"
_KEYS = SystemRandom()  # no two blocks of any round have the same content


def geometry_of(settings: Settings) -> Geometry:
    """Blocks of the size asked for; a byte of keys and a byte of values per head item."""
    head = settings.block_bytes // (2 * BLOCK_TOKENS)
    return Geometry(WEIGHTS, "uint8", BLOCK_TOKENS, 1, 1, head, settings.block_count)


def seed_of(key: bytes) -> int:
    return int.from_bytes(key[:4], "little")


class VaultEngine(Engine):
    """Serves from vault memory past the CPU fence; takes the dead engine's open blocks past the GPU fence."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.shape = geometry_of(settings)
        self.geometry = self.shape.hash.hex()
        self.kv: Pool | None = None
        self.adoption: Adoption | None = None
        self._index: Index | None = None
        self._follower: Follower | None = None

    # -- before the lock

    async def start(self) -> None:
        await super().start()
        if self.settings.weights_bytes:
            await self._have_weights()
        # Writable while there is time: changing access in the wake would cost 42-46 ms (fact 4a).
        mapping = await self.pool.stand_by() or self.pool.private_only()
        if mapping.made_epoch:
            self._look_at_index()
            self._follower = Follower(self.index)
        warm = (mapping.private_address, mapping.private_size, 7)
        self.lane.fill(*warm)  # a kernel is loaded by its first launch
        assert self.lane.count_wrong([warm]) == 0

    async def _have_weights(self) -> None:
        if await self.client.acquire("rw_or_ro", WAIT_MS) == RO:
            return
        size, total = self.settings.slab_bytes, self.settings.weights_bytes
        sizes = [min(size, total - start) for start in range(0, total, size)]
        specs = [TensorSpec(f"layer.{n}", (size,), (1,), "uint8", size) for n, size in enumerate(sizes)]
        await self.client.allocate(specs, WEIGHTS)
        for piece in self.weights():
            self.lane.fill(*piece)
        await self.client.commit()

    def weights(self) -> list[Piece]:
        mapped = self.client.mapped
        if mapped is None:
            return []
        addresses = mapped.addresses()
        return [(addresses[place.name], place.size_bytes, n) for n, place in enumerate(mapped.layout.tensors)]

    def _look_at_index(self) -> None:
        mapping = self.pool.mapping
        assert mapping is not None
        self._index = Index(view(mapping.index_address, mapping.index_size, writable=True), self.shape)

    @property
    def index(self) -> Index:
        assert self._index is not None
        return self._index

    def follow(self) -> None:
        if self._follower is not None:
            self._follower.poll()

    # -- the wake

    async def wake(self, *, fenced: bool) -> dict[str, Any]:
        if not (facts := await self.take_over()):
            return facts
        await self.pass_gpu_fence()
        assert self.kv is not None
        self.kv.gpu_fence_passed()
        facts["wrong_words"] = self.lane.count_wrong(self.believed()) + self.lane.count_wrong(self.weights())
        self.kv.canary_passed()
        return facts

    async def take_over(self) -> dict[str, Any]:
        """Adopt, and finish one kernel in memory that no other process may still write; no facts where there was no
        pool."""
        granted = await self.acquire()
        if not granted.adopt:
            await self._make()
            return {}
        assert self._follower is not None, "nothing was mapped ahead"
        assert self.pool.mapped_is(granted.made_epoch), "another pool was mapped ahead"
        self.adoption = self._follower.adopt(self.index, self.epoch)
        self.kv = Pool(self.index, self.epoch, adoption=self.adoption)
        self.mark("adopted")
        self.adopted()
        block, generation = self.open_blocks(1)[0]
        key = _KEYS.randbytes(KEY_BYTES)
        self.lane.fill(*self.piece(block, key))
        self.lane.synchronize()
        self.mark("first_kernel")
        calls = list(self.driver_calls)
        self.publish(block, generation, key)
        assert not self.adoption.reason, f"nothing was believed: {self.adoption.reason}"
        return {"driver_calls": calls, "blocks": len(self.adoption.by_key)}

    def adopted(self) -> None:
        """What else is done before the first kernel; nothing, where its time is measured."""

    async def _make(self) -> None:
        total, slab = self.settings.block_bytes * self.settings.block_count, self.settings.slab_bytes
        pages = [min(slab, total - start) for start in range(0, total, slab)]
        await self.pool.make(index_bytes(self.shape), pages)
        self._look_at_index()
        self.index.format(self.epoch)
        self.kv = Pool(self.index, self.epoch)
        got = self.open_blocks(self.settings.block_count)
        Random(self.epoch).shuffle(got)  # so that whole, open and free blocks lie between each other
        full, rest = got[: self.settings.full_count], got[self.settings.full_count :]
        self.fill_and_publish(full)
        self.kv.release([block for block, _ in rest])

    # -- blocks

    def at(self, block: int) -> int:
        assert self.pool.mapping is not None
        return self.pool.mapping.pages_address + block * self.settings.block_bytes

    def piece(self, block: int, key: bytes) -> Piece:
        return self.at(block), self.settings.block_bytes, seed_of(key)

    def believed(self) -> list[Piece]:
        """Every block the adopted index vouches for, as it must be."""
        assert self.adoption is not None
        return [self.piece(block, key) for key, block in self.adoption.by_key.items()]

    def open_blocks(self, count: int) -> list[tuple[int, int]]:
        assert self.kv is not None
        got = self.kv.allocate(count)
        assert not isinstance(got, NoRoom), f"no room: {got}"
        return got

    def publish(self, block: int, generation: int, key: bytes) -> None:
        """Once its fill has retired."""
        assert self.kv is not None
        self.kv.publish(block, generation, key, 0)
        self.kv.release([block])

    def fill_and_publish(self, blocks: list[tuple[int, int]]) -> list[Piece]:
        keys = [_KEYS.randbytes(KEY_BYTES) for _ in blocks]
        pieces = [self.piece(block, key) for (block, _), key in zip(blocks, keys, strict=True)]
        for piece in pieces:
            self.lane.fill(*piece)
        self.lane.synchronize()
        for (block, generation), key in zip(blocks, keys, strict=True):
            self.publish(block, generation, key)
        return pieces

    async def serve(self) -> None:
        """Steps: read all weights, write the open blocks."""
        opened = self.open_blocks(self.settings.open_count)
        self.keep_busy([(self.at(block), self.settings.block_bytes, 1) for block, _ in opened], self.weights())
