"""What must hold of blocks whatever plans the steps: a device that writes what it was given as late as it can, and a
witness that compares the index with what is really in the blocks.

A position's KV is its whole text up to there, so a block's content is right if every position of it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.engines.vllm.blocks import VaultBlocks
from holdfast.kv import adopt
from holdfast.kv.geometry import Geometry
from holdfast.kv.index import FULL, OPEN, Index, index_bytes
from holdfast.kv.pool import Pool

GARBAGE = (-1,)
Text = tuple[int, ...]


def geometry(shared: int, block_tokens: int) -> Geometry:
    return Geometry("w1", "float32", block_tokens, 2, 2, 8, shared)


def next_token(text: Sequence[int], vocabulary: int = 2) -> int:
    """Of a model that says the same after the same text: streams with one beginning make the same blocks."""
    return (sum(text) * 7 + len(text)) % vocabulary


@dataclass(slots=True)
class Flight:
    """A step on its way: what it writes, by (block, slot), and the requests in it."""

    writes: dict[tuple[int, int], Text] = field(default_factory=dict)
    members: list[tuple[object, int, bool]] = field(default_factory=list)  # a stream, its positions, whether it draws

    def plan(self, text: Sequence[int], start: int, count: int, blocks: Sequence[int], size: int) -> None:
        for position in range(start, start + count):
            self.writes[blocks[position // size], position % size] = tuple(text[: position + 1])

    @property
    def blocks(self) -> set[int]:
        return {block for block, _ in self.writes}


class World:
    """One index, its owners one after the other, and the device. Block ids are vLLM's: 0 is null, then the shared."""

    def __init__(self, shared: int, size: int) -> None:
        self.shared, self.size = shared, size
        self.shape = geometry(shared, size)
        self.buffer = bytearray(index_bytes(self.shape))
        self.index = Index(self.buffer, self.shape)
        self.epoch = 1
        self.index.format(self.epoch)
        self.pool = Pool(self.index, self.epoch)
        self.believed = True  # by the next owner
        self.content: dict[tuple[int, int], Text] = {}
        self.flights: deque[Flight] = deque()
        self.ghosts: set[int] = set()  # blocks that dead owners' steps may still write
        self.texts: dict[bytes, Text] = {}  # what a key stands for

    def learn(self, text: Sequence[int], keys: Sequence[bytes]) -> None:
        """The keys of a text's leading blocks."""
        for depth, key in enumerate(keys):
            said = tuple(text[: (depth + 1) * self.size])
            assert self.texts.setdefault(key, said) == said, "one key for two texts"

    def land(self) -> Flight:
        """The oldest step has run: it wrote as late as it could."""
        flight = self.flights.popleft()
        self.content.update(flight.writes)
        return flight

    # -- what must hold

    def check(self, vault: VaultBlocks, held: Iterable[int]) -> None:
        """Check what holds at any moment."""
        for block in {block for flight in self.flights for block in flight.blocks} | self.ghosts:
            if block <= self.shared:
                assert self.index.state(block - 1) == OPEN, f"block {block} may be written and is not open"
        keys = set()
        for block in range(1, self.shared + 1):
            entry = self.index.entry(block - 1)
            if entry.state == FULL:
                text = self.texts[entry.key]
                assert entry.whole
                assert entry.key not in keys, "two whole blocks of one key"
                assert entry.depth == len(text) // self.size - 1
                keys.add(entry.key)
                for slot in range(self.size):
                    position = entry.depth * self.size + slot
                    assert self.content.get((block, slot)) == text[: position + 1], f"{block} is not what it says"
        assert all(self.pool.match((key,)) for key in keys)
        in_hands = {block for block in held if block <= self.shared}
        in_hands |= {other + 1 for other in self.pool._twins.values()}  # held with the one that is like it
        assert vault.use().held == len(in_hands)
        assert vault.room <= self.shared - len(in_hands) - self.pool.quarantined_count

    def check_adoption(self) -> None:
        """A next owner would find exactly what the owner finds, and keep away from what may be written."""
        found = adopt.adopt(Index(bytearray(self.buffer), self.shape), self.epoch + 1)
        assert found.reason == ("" if self.believed else adopt.NO_CANARY)
        if self.believed:
            assert set(found.by_key) == {key for key in self.texts if self.pool.match((key,))}
        quarantined = {block + 1 for block in found.blocks_of(adopt.QUARANTINED)}
        written = {block for flight in self.flights for block in flight.blocks if block <= self.shared}
        assert written | self.ghosts <= quarantined

    def check_at_rest(self, vault: VaultBlocks) -> None:
        """Nothing is held and no step in flight: nothing is lost either."""
        pool = self.pool
        assert pool.free_count + pool.cached_count + pool.quarantined_count == self.shared
        room = pool.free_count + pool.cached_count - (pool.awaited_count if pool.fence_awaited else 0)
        assert vault.room <= room if pool.fence_awaited else vault.room == room
        states = [self.index.state(block) for block in range(self.shared)]
        assert states.count(OPEN) == pool.quarantined_count
        assert states.count(FULL) == pool.cached_count

    # -- deaths

    def die(self, canary: bool) -> None:
        """The owner dies and another one adopts. What was in flight lands whenever it likes until the fence."""
        self.ghosts |= {block for flight in self.flights for block in flight.blocks if block <= self.shared}
        self.flights.clear()
        self._haunt()
        self.epoch += 1
        self.index = Index(self.buffer, self.shape)
        self.pool = Pool(self.index, self.epoch, adoption=adopt.adopt(self.index, self.epoch))
        self.believed = canary
        if canary:
            self.pool.canary_passed()

    def fence(self) -> None:
        """All that earlier owners had queued is over, its last writes just now."""
        self._haunt()
        self.ghosts.clear()
        self.pool.gpu_fence_passed()

    def _haunt(self) -> None:
        for block in self.ghosts:
            self.content.update({(block, slot): GARBAGE for slot in range(self.size)})
