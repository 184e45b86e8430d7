"""What the leading rank tells the others step by step, over one stream socket each; every index says what its own says.

The leader alone decides about blocks: its acts are noted, told, and done again by the others. Block ids and keys are
the same on every rank, generations are each index's own. Always true: words arrive whole and in order; acts are done in
the order they were noted, and a step's before any of its KV is computed, so that what it may write is open on every
rank; `Settle` is answered, once its acts are written, with one byte; heat, a hint for the order of eviction, is the
leader's only, since nobody else evicts. Every send and every awaited answer has a bound: a rank that does not take its
words in that time is stuck, and the engine with it.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from typing import assert_never

import msgspec

from holdfast.kv.index import FREE, Index

LENGTH_BYTES = 4
WORDS_BYTES_MAX = 2**28  # block tables of 1,024 streams over 1 million tokens are a quarter of it
ANSWER = b"."
ANSWER_S = 60.0  # as long as the longest step: a rank may still be at it


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    block: int


class Freed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    block: int


class Published(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    block: int
    key: bytes
    depth: int


Act = Opened | Freed | Published


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A step's segment (`batch.Segment`)."""

    tokens: list[int]
    start: int
    blocks: list[int]


class Compute(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """One step over the pool, or over the private blocks behind it (a canary's)."""

    private: bool
    acts: list[Act]
    pieces: list[Piece]


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Write these, then answer."""

    acts: list[Act]


Words = Compute | Settle
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Words)


def tell(ranks: Sequence[socket.socket], words: Words) -> None:
    body = _encoder.encode(words)
    assert len(body) <= WORDS_BYTES_MAX, f"a step's words take {len(body)} bytes"
    frame = len(body).to_bytes(LENGTH_BYTES, "little") + body
    for rank in ranks:
        rank.sendall(frame)


def heard(leader: socket.socket) -> Words | None:
    """Wait for the next words; None: the leader is gone."""
    head = _exactly(leader, LENGTH_BYTES)
    body = _exactly(leader, int.from_bytes(head, "little")) if head else b""
    return _decoder.decode(body) if body else None


def _exactly(source: socket.socket, count: int) -> bytes:
    """Empty: it ended before."""
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(count - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


class NotedIndex(Index):
    """The leader's index. Another thread may free blocks while the step thread opens others: each note follows its
    store, and a block changes hands only after that."""

    __slots__ = ("_acts", "published")

    def __init__(self, index: Index) -> None:
        super().__init__(index.view, index.geometry)
        self._acts: deque[Act] = deque()  # bounded by what one step and the cancels before it do
        self.published = False  # since the last time

    def open(self, block: int) -> int:
        generation = super().open(block)
        self._acts.append(Opened(block))
        return generation

    def publish(
        self, block: int, generation: int, key: bytes, *, epoch: int, depth: int, tokens: int, heat: int = 0
    ) -> None:
        super().publish(block, generation, key, epoch=epoch, depth=depth, tokens=tokens, heat=heat)
        self._acts.append(Published(block, key, depth))
        self.published = True

    def free(self, block: int) -> None:
        super().free(block)
        self._acts.append(Freed(block))

    def taken(self) -> list[Act]:
        """What was done since the last time."""
        self.published = False
        return [self._acts.popleft() for _ in range(len(self._acts))]


def done_again(acts: Sequence[Act], index: Index, epoch: int) -> None:
    for act in acts:
        match act:
            case Opened(block):
                index.open(block)
            case Published(block, key, depth):
                tokens = index.geometry.block_tokens
                generation = index.entry(block).generation
                index.publish(block, generation, key, epoch=epoch, depth=depth, tokens=tokens)
            case Freed(block):
                if index.state(block) != FREE:  # it was in quarantine, and this rank's own fence has freed it
                    index.free(block)
            case _:
                assert_never(act)
