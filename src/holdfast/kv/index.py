"""The prefix index of a KV pool, in memory that outlives its owner: one header, one 64-byte entry per block.

Crash model: the owner may die at any instruction; its stores up to there, in program order, remain. So each state
change is *one aligned 8-byte store*, made after the stores of all data that it declares valid:
- `open` stores OPEN with the next generation, before work that writes the block is queued. This also withdraws the
  block's old content.
- `publish` stores the fields and their sum, and the word FULL last: only a complete entry is FULL.
- `free` stores FREE once the last possible writer has retired.

The sum covers the word, all fields except the heat, the block id and the geometry. An entry is *whole* if its sum is
correct. An entry that is torn, damaged, moved, or from an earlier generation or another geometry is never whole.

Why one store: item assignment on a memoryview cast to "Q" is CPython's `memcpy(ptr, &x, 8)` with a constant size.
Compilers emit it as one 8-byte store, and aligned ones are single-copy atomic on x86-64 and aarch64. (`struct` with an
explicit byte order writes byte by byte.) Offsets here are multiples of 8, and a mapping starts on a page boundary.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from struct import Struct
from typing import Protocol, TypeAlias

from holdfast.kv.geometry import KEY_BYTES, Geometry

MAGIC = b"HOLDFAST-KVINDEX"
VERSION = 3
HEADER_BYTES = 4096
ENTRY_BYTES = 64
HEADER_WORDS = HEADER_BYTES // 8
ENTRY_WORDS = ENTRY_BYTES // 8
OWNER_WORD = HEADER_WORDS - 1  # the last word of the header; everything before it never changes
STATIC_BYTES = OWNER_WORD * 8

# Words of an entry.
WORD, EPOCH, SHAPE, SUM, HEAT, KEY_LOW, KEY_HIGH = range(7)

# The state is the low 16 bits of the word, the generation the bits above. Any two states differ in both bytes, so one
# damaged byte never turns one state into another. Any other value is treated as OPEN.
FREE, OPEN, FULL = 0x0000, 0x3C5A, 0xC3A5
STATE_BITS = 16
STATE_MASK = (1 << STATE_BITS) - 1

LIVE = 1 << 63  # in the heat: a running stream holds this block
U64 = (1 << 64) - 1
MIX = 0x9E3779B97F4A7C15  # odd, so multiplying by it modulo 2**64 is invertible
EPOCH_MAX = (1 << 48) - 1  # unix milliseconds fit until the year 10,889
ADOPTIONS_MAX = 255

Buffer: TypeAlias = "memoryview | bytearray | bytes | mmap.mmap"

_KEY = Struct("=QQ")
_HEAD = Struct("=16s4Q16sQ")


class Words(Protocol):
    """An array of aligned 8-byte words; each assignment is one store."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, value: int, /) -> None: ...


class Misuse(AssertionError):
    """Raised if the caller broke the index's rules, which is a bug. Nothing has been stored."""


# The first adoption without a canary is the failover itself; a second one means that the new owner died early too.
ADOPTIONS_WITHOUT_CANARY_MAX = 1


@dataclass(frozen=True, slots=True)
class IndexOwner:
    """The epoch that may write, and how often the pool was adopted since a canary last passed on it."""

    epoch: int
    adoptions: int


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One block's entry as stored; it may be invalid (see `whole`)."""

    state: int
    generation: int
    key: bytes
    epoch: int
    depth: int
    tokens: int
    heat: int
    whole: bool  # the sum is right for a FULL word


def index_bytes(geometry: Geometry) -> int:
    return HEADER_BYTES + ENTRY_BYTES * geometry.block_count


def static_header(geometry: Geometry) -> bytes:
    """Return the header without its last word. A reader compares it whole: any difference means another geometry."""
    text = geometry.text
    if _HEAD.size + len(text) > STATIC_BYTES:
        raise ValueError(f"the geometry's text takes {len(text)} bytes, {STATIC_BYTES - _HEAD.size} fit; shorten it")
    head = _HEAD.pack(MAGIC, VERSION, HEADER_BYTES, ENTRY_BYTES, geometry.block_count, geometry.hash, len(text))
    return (head + text).ljust(STATIC_BYTES, b"\0")


def entry_sum(seed: int, block: int, word: int, epoch: int, shape: int, low: int, high: int) -> int:
    """Return a keyed checksum that numpy can compute for all entries at once (`adopt.sums` has the same rounds).

    Each round is a bijection of the state and of its input. So a change in one word is always detected, and changes in
    several words in all but one of 2**64 cases.
    """
    mixed = (seed ^ block) * MIX & U64
    mixed = ((mixed ^ (mixed >> 32)) ^ word) * MIX & U64
    mixed = ((mixed ^ (mixed >> 32)) ^ epoch) * MIX & U64
    mixed = ((mixed ^ (mixed >> 32)) ^ shape) * MIX & U64
    mixed = ((mixed ^ (mixed >> 32)) ^ low) * MIX & U64
    mixed = ((mixed ^ (mixed >> 32)) ^ high) * MIX & U64
    return mixed ^ (mixed >> 32)


def owner_word(owner: IndexOwner) -> int:
    """Return epoch, adoptions and a check byte in one word: one store changes both, and one damaged byte is
    detected."""
    if not 0 < owner.epoch <= EPOCH_MAX:
        raise ValueError(f"an epoch is 1 to {EPOCH_MAX}, got {owner.epoch}")
    body = owner.epoch << 8 | min(owner.adoptions, ADOPTIONS_MAX)
    return body << 8 | _check_byte(body)


def read_owner(word: int) -> IndexOwner | None:
    """Return the owner in the index's header; None if the word was never stored or is damaged."""
    body = word >> 8
    return IndexOwner(body >> 8, body & 0xFF) if word & 0xFF == _check_byte(body) else None


def _check_byte(body: int) -> int:
    check = 0xA5
    while body:
        check ^= body & 0xFF
        body >>= 8
    return check


class Index:
    """An index in a buffer that the caller mapped (read-only is enough to read). The constructor stores nothing."""

    __slots__ = ("_bytes", "_count", "_seed", "_static", "geometry", "words")

    def __init__(self, buffer: Buffer, geometry: Geometry, *, words: Words | None = None) -> None:
        whole = memoryview(buffer).cast("B")
        size = index_bytes(geometry)
        if len(whole) < size:
            raise ValueError(f"{geometry.block_count} blocks need an index of {size} bytes, this has {len(whole)}")
        self._bytes = whole[:size]
        self._static = static_header(geometry)
        self._seed = geometry.sum_key
        self._count = geometry.block_count
        self.geometry = geometry
        self.words: Words = self._bytes.cast("Q") if words is None else words

    def __repr__(self) -> str:
        owner = self.owner
        owned = f"epoch {owner.epoch}, {owner.adoptions} adoptions since a canary" if owner else "no owner"
        return f"<kv index: {self.geometry.block_count} blocks, {owned}>"

    @property
    def view(self) -> memoryview:
        return self._bytes

    def close(self) -> None:
        """Release the buffer, so that its mapping can be closed."""
        if isinstance(self.words, memoryview):
            self.words.release()
        self._bytes.release()

    # -- the header

    def same_geometry(self) -> bool:
        return self._bytes[:STATIC_BYTES].tobytes() == self._static

    @property
    def owner(self) -> IndexOwner | None:
        return read_owner(self.words[OWNER_WORD])

    def store_owner(self, owner: IndexOwner) -> None:
        self.words[OWNER_WORD] = owner_word(owner)

    def store_header(self) -> None:
        words = memoryview(self._static).cast("Q")
        for at, word in enumerate(words):
            self.words[at] = word

    def format(self, epoch: int) -> None:
        """Turn a *new*, zeroed buffer into an empty index owned by this epoch. Adopt a used buffer instead."""
        if self._bytes.tobytes().strip(b"\0"):
            raise Misuse("the buffer is not empty; adopt it")
        self.store_header()
        self.store_owner(IndexOwner(epoch, 0))

    # -- entries

    def open(self, block: int) -> int:
        """Mark a block OPEN, before any work that may write it is queued. Return the generation to pass to
        `publish`."""
        at = self._at(block)
        word = self.words[at]
        if word & STATE_MASK == OPEN:
            raise Misuse(f"block {block} is open already")
        generation = (word >> STATE_BITS) + 1
        self.words[at] = generation << STATE_BITS | OPEN
        return generation

    def publish(
        self, block: int, generation: int, key: bytes, *, epoch: int, depth: int, tokens: int, heat: int = 0
    ) -> None:
        """Mark a block FULL, after the step that wrote its last token has retired and before a client sees that
        token."""
        at = self._at(block)
        words = self.words
        if words[at] != generation << STATE_BITS | OPEN:
            raise Misuse(f"block {block} is not open in generation {generation}")
        low, high = _KEY.unpack(key)
        word = generation << STATE_BITS | FULL
        shape = depth << 32 | tokens
        words[at + KEY_LOW] = low
        words[at + KEY_HIGH] = high
        words[at + EPOCH] = epoch
        words[at + SHAPE] = shape
        words[at + HEAT] = heat
        words[at + SUM] = entry_sum(self._seed, block, word, epoch, shape, low, high)
        words[at] = word  # last: from here on an adopter reuses the block

    def free(self, block: int) -> None:
        """Mark a block FREE: a FULL one to evict it, an OPEN one only after its last possible writer has retired."""
        at = self._at(block)
        word = self.words[at]
        if word & STATE_MASK == FREE:
            raise Misuse(f"block {block} is free already")
        self.words[at] = word & ~STATE_MASK

    def set_heat(self, block: int, heat: int) -> None:
        """Store a hint for the next owner's eviction order; it never decides whether a block is valid."""
        self.words[self._at(block) + HEAT] = heat

    def state(self, block: int) -> int:
        return self.words[self._at(block)] & STATE_MASK

    def entry(self, block: int) -> IndexEntry:
        at = self._at(block)
        word, epoch, shape, total, heat, low, high = (self.words[at + field] for field in range(KEY_HIGH + 1))
        return IndexEntry(
            state=word & STATE_MASK,
            generation=word >> STATE_BITS,
            key=_KEY.pack(low, high),
            epoch=epoch,
            depth=shape >> 32,
            tokens=shape & 0xFFFFFFFF,
            heat=heat,
            whole=total == entry_sum(self._seed, block, word & ~STATE_MASK | FULL, epoch, shape, low, high),
        )

    def _at(self, block: int) -> int:
        if not 0 <= block < self._count:
            raise Misuse(f"block {block} is not one of the pool's {self._count}: never published")
        return HEADER_WORDS + block * ENTRY_WORDS


assert _KEY.size == KEY_BYTES
