"""Records which stream has which KV block: the scheduler's interface (`Blocks`), and its implementation over a pool
with an index that outlives the engine.

Always true:
- A block is open before a step that may write it is planned.
- A block is published under the chained key of the tokens up to its end. That happens after the step that computed its
  last position has retired, and before that step's tokens are shown.
- A block is released only when no step in flight can write it.
- The last token of a text is always computed, even if its KV is found: the next token is drawn from its logits.
- A `start` or `grow` that fails changes nothing.
- After a takeover, blocks that streams yet to be resumed will look for are spared. While the GPU fence is about to free
  other blocks, no stream gets a spared one. After that, a new stream gets one only if no other stream holds blocks.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.core.requests import CANARY_TIER
from holdfast.engines.paged.sequences import PagedStream
from holdfast.kv.geometry import block_keys
from holdfast.kv.pool import KvUse, NoRoom, Pool, Resumes


class StreamCapacity(Protocol):
    """The KV that a single stream can have: `count` blocks."""

    @property
    def count(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...


class Blocks(StreamCapacity, Protocol):
    """The scheduler's interface to a store of blocks. A stream has blocks between `start` and `end`."""

    @property
    def room_soon(self) -> bool:
        """Return True if blocks come free soon anyway: waiting is better than preempting a stream."""

    def use(self) -> KvUse:
        """Return how full the store is; callable from any thread."""

    def start(self, stream: PagedStream) -> int | None:
        """Allocate blocks for a stream's text and one more token; return how many leading positions need no computing,
        or None if there is no room now."""

    def grow(self, stream: PagedStream) -> bool:
        """Give the stream one more block; return False if there is none."""

    def computed(self, stream: PagedStream, length: int) -> None:
        """Note that the KV of the first `length` positions is computed, and its step has retired."""

    def end(self, stream: PagedStream) -> None:
        """Release the stream's blocks, which no step in flight may write."""


class PoolBlocks:
    """The blocks of a pool's owner. Streams share prefixes by key, and the pool's next owner finds them again."""

    def __init__(self, pool: Pool) -> None:
        geometry = pool.index.geometry
        self.pool = pool
        self.count = geometry.block_count
        self.block_tokens = geometry.block_tokens
        self._root = geometry.root()
        self.used = 0  # held by streams; a block that two streams share counts twice
        self.resumes = Resumes()
        self.found_tokens_total = 0  # positions that needed no computing, over all starts

    def __repr__(self) -> str:
        return f"<{self.used} blocks in use, {self.found_tokens_total} tokens found, {self.pool!r}>"

    @property
    def room_soon(self) -> bool:
        return self.pool.fence_awaited

    def use(self) -> KvUse:
        return self.pool.use()

    def start(self, stream: PagedStream) -> int | None:
        tokens, size, pool = stream.tokens, self.block_tokens, self.pool
        wanted = blocks_for(len(tokens) + 1, size)
        # A canary computes everything: an earlier canary's KV says nothing about the weights' current state.
        shared = (len(tokens) - 1) // size if stream.request.tier != CANARY_TIER else 0
        usable = self._keys(stream, shared)
        # A stream at the head of the queue asks at every step: `fits` takes nothing and changes no block's age.
        sparing = pool.fence_awaited or (not stream.shown and self.used > 0)
        if not pool.fits(usable, wanted, sparing=sparing):
            return None
        found = pool.lookup(usable)
        opened = pool.allocate(wanted - len(found), sparing=sparing)
        assert not isinstance(opened, NoRoom), f"it fitted: {opened}"
        stream.blocks = found + [block for block, _ in opened]
        stream.generations = [0] * len(found) + [generation for _, generation in opened]
        stream.published = len(found)
        self.used += wanted
        known = len(found) * size
        self.found_tokens_total += known
        if stream.resumed:
            stream.resumed = False
            self.resumes.count(pool, usable, len(found), len(tokens) - 1 - known)
        return known

    def grow(self, stream: PagedStream) -> bool:
        opened = self.pool.allocate(1, sparing=self.pool.fence_awaited)
        if isinstance(opened, NoRoom):
            return False
        ((block, generation),) = opened
        stream.blocks.append(block)
        stream.generations.append(generation)
        self.used += 1
        return True

    def computed(self, stream: PagedStream, length: int) -> None:
        size = self.block_tokens
        if length < (stream.published + 1) * size:
            return
        keys = self._keys(stream, length // size)
        for depth in range(stream.published, length // size):
            # If another block already has this content, ours stays open and private to this stream, which reads it.
            self.pool.publish(stream.blocks[depth], stream.generations[depth], keys[depth], depth)
        stream.published = length // size

    def end(self, stream: PagedStream) -> None:
        self.pool.release(stream.blocks, live=not stream.gone)
        self.used -= len(stream.blocks)
        stream.blocks, stream.generations, stream.published = [], [], 0

    def _keys(self, stream: PagedStream, count: int) -> list[bytes]:
        """Return the keys of the first `count` blocks, all full; compute only those not known yet."""
        keys, size = stream.keys, self.block_tokens
        if len(keys) < count:
            keys += block_keys(keys[-1] if keys else self._root, stream.tokens[len(keys) * size : count * size], size)
        return keys[:count]


class PrivateBlocks:
    """Blocks without an index, which no other stream finds: for canaries, warm-up (also in a standby), and engines
    without a vault. `known`: leading positions of the only text that need no computing."""

    room_soon = False

    def __init__(self, blocks: range, block_tokens: int, known: int = 0) -> None:
        self.count = len(blocks)
        self.block_tokens = block_tokens
        self._free = list(reversed(blocks))
        self._known = known

    def use(self) -> KvUse:
        return KvUse(self.count, self.count - len(self._free))

    def start(self, stream: PagedStream) -> int | None:
        wanted = blocks_for(len(stream.tokens) + 1, self.block_tokens)
        if wanted > len(self._free):
            return None
        stream.blocks = [self._free.pop() for _ in range(wanted)]
        return min(self._known, len(stream.tokens) - 1)

    def grow(self, stream: PagedStream) -> bool:
        if not self._free:
            return False
        stream.blocks.append(self._free.pop())
        return True

    def computed(self, stream: PagedStream, length: int) -> None:
        """Do nothing: no other stream looks for these blocks."""

    def end(self, stream: PagedStream) -> None:
        self._free += reversed(stream.blocks)
        stream.blocks = []


def blocks_for(length: int, block_tokens: int) -> int:
    return -(-length // block_tokens)
