"""What the leading rank tells the others step by step, over one stream socket each.

Always true: words arrive whole and in order; a step's acts are to be written into the index before any of its KV is
computed; `Settle` is answered, once its acts are written, with one byte. Every send and every awaited answer has a
bound: a rank that does not take its words in that time is stuck, and the engine with it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

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
