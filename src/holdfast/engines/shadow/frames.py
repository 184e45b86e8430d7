"""Words between the leader of an engine and its ranks, over stream sockets: a length, then as many bytes.

Always true: they arrive whole and in order, or the other side is gone. Whoever sends, and whoever waits for an answer,
has a bound (`ANSWER_S`) on his socket: a rank that does not take its words in that time is stuck, and the engine with
it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

LENGTH_BYTES = 4
WORDS_BYTES_MAX = 2**28  # block tables of 1,024 streams over 1 million tokens are a quarter of it
ANSWER_S = 60.0  # as long as the longest step: a rank may still be at it


def frame(body: bytes) -> bytes:
    assert 0 < len(body) <= WORDS_BYTES_MAX, f"a step's words take {len(body)} bytes"
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def send(ranks: Sequence[socket.socket], body: bytes) -> None:
    """Tell all of them."""
    words = frame(body)
    for rank in ranks:
        rank.sendall(words)


def received(source: socket.socket) -> bytes:
    """Wait for the next words. Empty: who sends them is gone."""
    head = _exactly(source, LENGTH_BYTES)
    return _exactly(source, int.from_bytes(head, "little")) if head else b""


async def receive(source: socket.socket) -> bytes:
    """The same in an event loop, from a socket that does not block; ConnectionError where the sender is gone."""
    head = await _exactly_in_loop(source, LENGTH_BYTES)
    return await _exactly_in_loop(source, int.from_bytes(head, "little"))


def _exactly(source: socket.socket, count: int) -> bytes:
    """Empty: it ended before."""
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(count - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


async def _exactly_in_loop(source: socket.socket, count: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), bytearray()
    while len(parts) < count:
        part = await loop.sock_recv(source, count - len(parts))
        if not part:
            raise ConnectionError("a rank is gone")
        parts += part
    return bytes(parts)
