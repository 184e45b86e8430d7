"""Who has which KV block: the scheduler's small port, and its books over a pool whose index outlives the engine.

Always true: a block is open before any step that may write it is planned; it is published, under the
chained key of the tokens up to its end, when the step that computed its last position has retired and before that
step's tokens are shown; it is released only when no step in flight can write it. The last token of a text is always
computed, found or not: its logits are what the next token is drawn from. What `start` or `grow` cannot give changes
nothing. After a takeover nobody gets a block that a stream yet to come back will look for as long as the GPU fence is
about to bring others, and a stream that has shown nothing not even then, unless it would be alone.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.core.requests import CANARY_TIER
from holdfast.engines.paged.sequences import Stream
from holdfast.kv.geometry import block_keys
from holdfast.kv.pool import KvUse, NoRoom, Pool
from holdfast.kv.resumes import Resumes


class Blocks(Protocol):
    """The port. Streams in it are those between `start` and `end`."""

    @property
    def count(self) -> int:
        """All there are: what a stream alone can have."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def room_soon(self) -> bool:
        """Blocks come back soon whatever anybody does: better to wait for one than to take it from somebody."""

    def use(self) -> KvUse:
        """How full they are; another thread may ask."""

    def start(self, stream: Stream) -> int | None:
        """Blocks for its text and one token more; says how many leading positions need no computing. None: there
        is no room now."""

    def grow(self, stream: Stream) -> bool:
        """One block more."""

    def computed(self, stream: Stream, length: int) -> None:
        """The KV of its first `length` positions is there, and the step that made it so has retired."""

    def end(self, stream: Stream) -> None:
        """Give everything back. No step in flight has it."""


class PoolBlocks:
    """The books of a pool's owner: prefixes are shared by key, and found again by whoever owns the pool next."""

    def __init__(self, pool: Pool) -> None:
        geometry = pool.index.geometry
        self.pool = pool
        self.count = geometry.block_count
        self.block_tokens = geometry.block_tokens
        self._root = geometry.root()
        self.used = 0  # held by streams, one that two of them share counted twice
        self.resumes = Resumes()
        self.found_tokens_total = 0  # positions that needed no computing, over all starts

    def __repr__(self) -> str:
        return f"<{self.used} blocks in use, {self.found_tokens_total} tokens found, {self.pool!r}>"

    @property
    def room_soon(self) -> bool:
        return self.pool.fence_awaited

    def use(self) -> KvUse:
        return self.pool.use()

    def start(self, stream: Stream) -> int | None:
        tokens, size, pool = stream.tokens, self.block_tokens, self.pool
        wanted = blocks_for(len(tokens) + 1, size)
        # A canary computes everything: what an earlier one computed says nothing of the weights as they are now.
        shared = (len(tokens) - 1) // size if stream.request.tier != CANARY_TIER else 0
        usable = self._keys(stream, shared)
        # A stream at the head of the queue asks at every step: this look holds nothing and moves no block's age.
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

    def grow(self, stream: Stream) -> bool:
        opened = self.pool.allocate(1, sparing=self.pool.fence_awaited)
        if isinstance(opened, NoRoom):
            return False
        ((block, generation),) = opened
        stream.blocks.append(block)
        stream.generations.append(generation)
        self.used += 1
        return True

    def computed(self, stream: Stream, length: int) -> None:
        size = self.block_tokens
        if length < (stream.published + 1) * size:
            return
        keys = self._keys(stream, length // size)
        for depth in range(stream.published, length // size):
            # If another block has this content already, ours stays open and this stream's own: it goes on reading it.
            self.pool.publish(stream.blocks[depth], stream.generations[depth], keys[depth], depth)
        stream.published = length // size

    def end(self, stream: Stream) -> None:
        self.pool.release(stream.blocks, live=not stream.gone)
        self.used -= len(stream.blocks)
        stream.blocks, stream.generations, stream.published = [], [], 0

    def _keys(self, stream: Stream, count: int) -> list[bytes]:
        """The names of its first `count` blocks, all of them full; those known once are not computed again."""
        keys, size = stream.keys, self.block_tokens
        if len(keys) < count:
            keys += block_keys(keys[-1] if keys else self._root, stream.tokens[len(keys) * size : count * size], size)
        return keys[:count]


class PrivateBlocks:
    """Blocks that no index knows and nobody finds: for canaries and warm-up, in a standby too, and where there is no
    vault. `known`: positions of the one text there is that need no computing."""

    room_soon = False

    def __init__(self, blocks: range, block_tokens: int, known: int = 0) -> None:
        self.count = len(blocks)
        self.block_tokens = block_tokens
        self._free = list(reversed(blocks))
        self._known = known

    def use(self) -> KvUse:
        return KvUse(self.count, self.count - len(self._free))

    def start(self, stream: Stream) -> int | None:
        wanted = blocks_for(len(stream.tokens) + 1, self.block_tokens)
        if wanted > len(self._free):
            return None
        stream.blocks = [self._free.pop() for _ in range(wanted)]
        return min(self._known, len(stream.tokens) - 1)

    def grow(self, stream: Stream) -> bool:
        if not self._free:
            return False
        stream.blocks.append(self._free.pop())
        return True

    def computed(self, stream: Stream, length: int) -> None:
        """Nobody will look for it."""

    def end(self, stream: Stream) -> None:
        self._free += reversed(stream.blocks)
        stream.blocks = []


def blocks_for(length: int, block_tokens: int) -> int:
    return -(-length // block_tokens)
