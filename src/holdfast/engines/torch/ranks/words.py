"""What the leading rank tells the others step by step, over one stream socket each.

Always true: words arrive whole and in order; a step's acts are done before any of its KV is computed, so that what it
may write is open on every rank; `Settle` is answered, once its acts are written, with one byte.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from holdfast.engines.shadow.acts import Act
from holdfast.engines.shadow.frames import received, send

ANSWER = b"."


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
    send(ranks, _encoder.encode(words))


def heard(leader: socket.socket) -> Words | None:
    """Wait for the next words; None: the leader is gone."""
    body = received(leader)
    return _decoder.decode(body) if body else None
