"""KV blocks that are real pages of a pool: what a token depends on is read from them, and what it leaves is written.

A position's KV is its token's id, four bytes; so a block's bytes are what its key is made of (`geometry.block_key`).
The KV of a stream's last token is written by the step that makes the next one, as in any engine: pages cover all
positions but the last.

Always true (protocols.md): a block is opened before anything is stored in it, published when its last position is
written and before that step's tokens are handed over, and released when its stream ends, waits or is cancelled. What is
known of a prefix is what the pages say, not what the request says.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from holdfast.engines.sim.blocks import blocks_for
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.stream import Stream
from holdfast.engines.sim.vocabulary import Vocabulary
from holdfast.kv.geometry import KEY_BYTES, Geometry, block_keys
from holdfast.kv.pool import NoRoom, Pool
from holdfast.kv.resumes import Resumes
from holdfast.kv.usage import KvUse

TOKEN_BYTES = 4


def geometry(weights: str, block_size: int, kv_blocks: int) -> Geometry:
    """Keys and values of two bytes each make room for a token's id."""
    made = Geometry(weights, "uint8", block_size, layers=1, kv_heads=1, head_size=2, block_count=kv_blocks)
    assert made.block_bytes == block_size * TOKEN_BYTES
    return made


class PagedBlocks:
    """The books of an owner. `pages` are its pool's bytes."""

    def __init__(self, pool: Pool, pages: memoryview, block_size: int, vocabulary: Vocabulary) -> None:
        self.pool = pool
        self.words: memoryview | None = pages.cast("I")
        self._words = pages.cast("I")
        self._pages = pages
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._root = pool.index.geometry.root()
        self._vocabulary = vocabulary
        self.used = 0
        self.resumes = Resumes()

    def close(self) -> None:
        """Let go of the pages, so that they can be unmapped."""
        for part in (self.words, self._words, self._pages):
            if part is not None:
                part.release()

    # -- the port

    def use(self) -> KvUse:
        return self.pool.use()

    def start(self, stream: Stream) -> float | None:
        if stream.tokens is stream.request.tokens:
            stream.tokens = list(stream.tokens)
        tokens, size = stream.tokens, self._block_size
        if stream.keys is None:
            stream.keys = block_keys(self._root, tokens[:-1], size)
        pool, wanted = self.pool, blocks_for(len(tokens) + 1, size)
        if not pool.fits(stream.keys, wanted, sparing=pool.fence_awaited):
            return None
        found = pool.lookup(stream.keys)
        opened = pool.allocate(wanted - len(found), sparing=pool.fence_awaited)
        assert not isinstance(opened, NoRoom), f"it fitted: {opened}"
        stream.held = found + [block for block, _ in opened]
        stream.generations = [generation for _, generation in opened]
        stream.blocks = len(stream.held)
        stream.full = len(found)
        stream.cached = len(found) * size
        stream.parent = stream.keys[len(found) - 1] if found else self._root
        stream.at = -1
        self.used += stream.blocks
        known = len(found) * size
        if found:
            stream.sequence = self._reread(stream, found)
        if stream.resumed:
            self.resumes.count(pool, stream.keys, len(found), len(tokens) - 1 - known)
            stream.resumed = False
        return (len(tokens) - known) / len(tokens)

    def grow(self, stream: Stream) -> bool:
        opened = self.pool.allocate(1)
        if isinstance(opened, NoRoom):
            return False
        ((block, generation),) = opened
        stream.held.append(block)
        stream.generations.append(generation)
        stream.blocks += 1
        self.used += 1
        return True

    def prefill(self, stream: Stream) -> None:
        size, tokens = self._block_size, stream.tokens
        for start in range(stream.full * size, len(tokens), size):
            part = tokens[start : start + size]
            at = stream.held[start // size] * size
            stream.at = at + len(part)
            self._words[at : stream.at] = memoryview(array("I", part))
            if len(part) == size:
                self.filled(stream)

    def filled(self, stream: Stream) -> None:
        at = stream.full
        block = stream.held[at]
        start = block * self._block_bytes
        key = blake2b(stream.parent + self._pages[start : start + self._block_bytes], digest_size=KEY_BYTES).digest()
        self.pool.publish(block, stream.generations[at - len(stream.held)], key, at)
        stream.parent = key
        stream.full = at + 1
        stream.at = stream.held[at + 1] * self._block_size  # there is one: blocks are taken a token ahead

    def end(self, stream: Stream) -> None:
        self.pool.release(stream.held)
        self.used -= stream.blocks
        stream.blocks = 0
        stream.held, stream.generations, stream.keys = [], [], None

    # -- inside

    def _reread(self, stream: Stream, found: list[int]) -> Sequence:
        """The text as its pages have it."""
        size, request = self._block_size, stream.request
        known = [token for block in found for token in self._words[block * size : (block + 1) * size].tolist()]
        text = known + stream.tokens[len(known) :]
        return Sequence(self._vocabulary, text, request.prompt_len, request.sampling, request.stop_token_ids)


class PrivateBlocks:
    """Pages that nobody shares and no index knows: for canaries, one short stream at a time."""

    def __init__(self, pages: memoryview, block_size: int) -> None:
        self.words: memoryview | None = pages.cast("I")
        self._words = pages.cast("I")
        self._block_size = block_size
        self.used = 0

    def close(self) -> None:
        for part in (self.words, self._words):
            if part is not None:
                part.release()

    def use(self) -> KvUse:
        return KvUse()

    def start(self, stream: Stream) -> float | None:
        blocks = blocks_for(stream.end, self._block_size)
        if self.used or blocks * self._block_size > len(self._words):
            return None
        stream.tokens = list(stream.tokens)
        stream.blocks = self.used = blocks
        return 1.0

    def grow(self, stream: Stream) -> bool:
        return False

    def prefill(self, stream: Stream) -> None:
        count = len(stream.tokens)
        self._words[:count] = memoryview(array("I", stream.tokens))
        stream.at = count

    def filled(self, stream: Stream) -> None:
        """The next block is the next in memory."""

    def end(self, stream: Stream) -> None:
        self.used -= stream.blocks
        stream.blocks = 0
