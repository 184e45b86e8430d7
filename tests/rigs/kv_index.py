"""An index whose owner dies after its n-th store, and a device that writes what it was told to, whatever is dead.

`World` plays an owner by script. Content is a name per block: complete content bears the block's key, anything else is
not complete. What is queued on the device when the owner dies lands afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.kv import adopt
from holdfast.kv.geometry import KEY_BYTES, Geometry, block_keys
from holdfast.kv.index import FULL, Index, index_bytes
from holdfast.kv.pool import Pool

BLOCK_TOKENS = 4
KEYS = block_keys(bytes(KEY_BYTES), list(range(BLOCK_TOKENS * 64)), BLOCK_TOKENS)
GARBAGE = b"garbage"


def geometry(block_count: int = 6, rank: int = 0, rank_count: int = 1, weights: str = "w1") -> Geometry:
    return Geometry(
        weights, "bfloat16", BLOCK_TOKENS, 2, 2, 8, block_count, rank=rank, rank_count=rank_count, rope="base=1e4"
    )


class Died(BaseException):
    """SIGKILL, as the code that dies would see it if it could."""


class DyingWords:
    """Holds the words of a buffer; the store after the last allowed one never happens."""

    def __init__(self, buffer: bytearray, stores_left: int | None = None) -> None:
        self.words = memoryview(buffer).cast("B").cast("Q")
        self.stores_left = stores_left
        self.stores = 0
        self.last = -1  # where the last store went

    def __getitem__(self, at: int) -> int:
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        if self.stores_left is not None and self.stores == self.stores_left:
            raise Died
        self.stores += 1
        self.last = at
        self.words[at] = value


def fresh(shape: Geometry, epoch: int = 10) -> bytearray:
    buffer = bytearray(index_bytes(shape))
    Index(buffer, shape).format(epoch)
    return buffer


def filled(pool: Pool, keys: list[bytes]) -> list[int]:
    """The blocks of a stream of this pool, one for each key, that has just published them."""
    got = pool.allocate(len(keys))
    assert isinstance(got, list)
    return [pool.publish(*opened, key, depth) for depth, (opened, key) in enumerate(zip(got, keys, strict=True))]


def believed(adoption: adopt.Adoption) -> dict[bytes, int]:
    """What a new owner may read; the two ways it is told must agree."""
    mine = {block for block, verdict in enumerate(adoption.verdicts) if verdict == adopt.YOURS}
    assert mine == set(adoption.by_key.values())
    for key, block in adoption.by_key.items():
        assert adoption.index.entry(block).state == FULL
        assert adoption.index.entry(block).key == key
    return dict(adoption.by_key)


def quarantined(adoption: adopt.Adoption) -> set[int]:
    return set(adoption.blocks_of(adopt.QUARANTINED))


class World:
    """An owner by script, its device's queue, and what an adopter must and may believe at any instant."""

    def __init__(self, buffer: bytearray, shape: Geometry, epoch: int, stores_left: int | None = None) -> None:
        self.buffer = buffer
        self.epoch = epoch
        self.words = DyingWords(buffer, stores_left)
        self.index = Index(buffer, shape, words=self.words)
        self.content: dict[int, bytes] = {}
        self.queued: set[int] = set()
        self.published: dict[bytes, int] = {}  # `publish` has returned, and nothing has begun to take it back
        self.generations: dict[int, int] = {}

    def write(self, block: int) -> None:
        """Open, then queue: from now on the device may write the block at any time."""
        self.withdraw(block)
        self.generations[block] = self.index.open(block)
        self.queued.add(block)
        self.content[block] = b"partial"

    def publish(self, block: int, key: bytes, depth: int = 0) -> None:
        self.queued.discard(block)
        self.content[block] = key
        self.index.publish(
            block, self.generations[block], key, epoch=self.epoch, depth=depth, tokens=BLOCK_TOKENS, heat=1
        )
        self.published[key] = block

    def fill(self, block: int, key: bytes) -> None:
        self.write(block)
        self.publish(block, key)

    def free(self, block: int) -> None:
        self.queued.discard(block)
        self.withdraw(block)
        self.index.free(block)

    def withdraw(self, block: int) -> None:
        self.published = {key: at for key, at in self.published.items() if at != block}

    def late_writes(self) -> None:
        """The device goes on with what a dead owner had queued (facts 4b)."""
        for block in self.queued:
            self.content[block] = GARBAGE

    def check(self, adoption: adopt.Adoption) -> None:
        self.late_writes()
        mine = believed(adoption)
        for key, block in mine.items():
            assert self.content[block] == key, f"block {block} is believed and its content is not complete"
        assert self.published.items() <= mine.items(), "something published is lost"
        assert self.queued <= quarantined(adoption), "a block the device may still write is not quarantined"


Script = Callable[[World], None]


def run(script: Script, shape: Geometry, stores_left: int | None, epoch: int = 10) -> tuple[World, bool]:
    """Play a script on a fresh index until it ends or dies; says whether it came to its end."""
    world = World(fresh(shape, epoch), shape, epoch, stores_left)
    try:
        script(world)
    except Died:
        return world, False
    return world, True
