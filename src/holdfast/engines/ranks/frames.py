"""The frames between an engine's leader and its ranks, over stream sockets: a length, then that many bytes.

The leader sends steps to every rank. When the engine wakes, each rank sends the survey of its pool to the leader, which
sends all surveys to every rank.

Always true:
- Frames arrive whole and in order, or the other side is gone.
- Ranks make steps in the order they were sent. A step's index changes are made before it is computed, so that the
  blocks it may write are open on every rank.
- Sending, and waiting for an answer, is bounded by `ANSWER_S`. A rank that does not accept a frame in that time is
  stuck, and so is the engine.
- Every rank gets every survey and computes the same result from them. No block is adopted before.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

import msgspec

from holdfast.kv.adopt import Survey, agree, packed, unpacked
from holdfast.kv.index import FREE, Index

# -- changes of the leader's KV index: recorded, sent, and repeated by the other ranks, so that all indexes stay equal
#
# The leader alone decides about blocks. Block ids and keys are the same on every rank; each index has its own
# generations. Always true: changes are made in the order they were recorded. Only the leader stores heat, a hint for
# the order of eviction, since no other rank evicts.


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    block: int


class Freed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    block: int


class Published(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    block: int
    key: bytes
    depth: int


IndexChange = Opened | Freed | Published


class RecordedIndex(Index):
    """The leader's index, which records its changes. Another thread may free blocks while the step thread opens others:
    each change is recorded after it was made, and only then may another stream get the block."""

    __slots__ = ("_changes", "published")

    def __init__(self, index: Index) -> None:
        super().__init__(index.view, index.geometry)
        self._changes: deque[IndexChange] = deque()  # bounded by the changes of one step and the cancels before it
        self.published = False  # since `take_changes`

    def open(self, block: int) -> int:
        generation = super().open(block)
        self._changes.append(Opened(block))
        return generation

    def publish(
        self, block: int, generation: int, key: bytes, *, epoch: int, depth: int, tokens: int, heat: int = 0
    ) -> None:
        super().publish(block, generation, key, epoch=epoch, depth=depth, tokens=tokens, heat=heat)
        self._changes.append(Published(block, key, depth))
        self.published = True

    def free(self, block: int) -> None:
        super().free(block)
        self._changes.append(Freed(block))

    def take_changes(self) -> list[IndexChange]:
        """Return the changes since the last call."""
        self.published = False
        return [self._changes.popleft() for _ in range(len(self._changes))]


def repeat_changes(changes: Sequence[IndexChange], index: Index, epoch: int) -> None:
    for change in changes:
        match change:
            case Opened(block):
                index.open(block)
            case Published(block, key, depth):
                tokens = index.geometry.block_tokens
                generation = index.entry(block).generation
                index.publish(block, generation, key, epoch=epoch, depth=depth, tokens=tokens)
            case Freed(block):
                if index.state(block) != FREE:  # this rank's own fence has already freed it from quarantine
                    index.free(block)
            case _:
                assert_never(change)


LENGTH_BYTES = 4
FRAME_BYTES_MAX = 2**28  # block tables of 1,024 streams over 1 million tokens are a quarter of it
ANSWER_S = 60.0  # as long as the longest step: a rank may still compute it


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    changes: list[IndexChange]  # the leader's index changes before this step
    work: bytes = b""  # what to compute, in the engine's own encoding; empty: nothing
    answered: bool = True  # the leader waits for an answer
    drained: bool = False  # answer only when the device has nothing left to do


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankStep)


def send_step(ranks: Sequence[socket.socket], step: RankStep) -> None:
    send(ranks, _encoder.encode(step))


def receive_step(leader: socket.socket) -> RankStep | None:
    """Wait for the next step; return None if the leader is gone."""
    body = receive(leader)
    return _decoder.decode(body) if body else None


def frame(body: bytes) -> bytes:
    assert 0 < len(body) <= FRAME_BYTES_MAX, f"a step takes {len(body)} bytes"
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def send(receivers: Sequence[socket.socket], body: bytes) -> None:
    framed = frame(body)
    for receiver in receivers:
        receiver.sendall(framed)


def receive(sender: socket.socket) -> bytes:
    """Wait for the next frame and return its body, empty if the sender is gone."""
    head = _exactly(sender, LENGTH_BYTES)
    return _exactly(sender, int.from_bytes(head, "little")) if head else b""


async def receive_in_loop(sender: socket.socket) -> bytes:
    """Return the next frame's body from a non-blocking socket; raise ConnectionError if the sender is gone."""
    head = await _exactly_in_loop(sender, LENGTH_BYTES)
    return await _exactly_in_loop(sender, int.from_bytes(head, "little"))


def _exactly(sender: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = sender.recv(count - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


async def _exactly_in_loop(sender: socket.socket, count: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), bytearray()
    while len(parts) < count:
        part = await loop.sock_recv(sender, count - len(parts))
        if not part:
            raise ConnectionError("a rank is gone")
        parts += part
    return bytes(parts)


# -- how ranks with their own pools agree on which KV blocks all of them have


class LeaderAgreement:
    """The leader's `Peers`. Only the leader waits for the other ranks' fences, because only it hands out blocks."""

    def __init__(self, ranks: Sequence[socket.socket], wake_s: float, fenced: Callable[[], Awaitable[None]]) -> None:
        self._ranks, self._fenced = ranks, fenced
        # One rank's vault may grant its pool at once, another's only after nearly `wake_s`.
        self._bound_s = wake_s + ANSWER_S

    async def agree(self, found: Survey) -> Survey:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._bound_s):
            surveys = [packed(found), *await asyncio.gather(*map(receive_in_loop, self._ranks))]
            framed = frame(msgspec.msgpack.encode(surveys))
            await asyncio.gather(*(loop.sock_sendall(rank, framed) for rank in self._ranks))
        return _answers(surveys)[0]

    async def fenced(self) -> None:
        await self._fenced()


class RankAgreement:
    """The `Peers` of a rank other than the leader."""

    def __init__(self, rank: int, leader: socket.socket, wake_s: float) -> None:
        self._rank, self._leader = rank, leader
        self._bound_s = wake_s + ANSWER_S

    async def agree(self, found: Survey) -> Survey:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._bound_s):
            await loop.sock_sendall(self._leader, frame(packed(found)))
            surveys = msgspec.msgpack.decode(await receive_in_loop(self._leader), type=list[bytes])
        return _answers(surveys)[self._rank]

    async def fenced(self) -> None:
        """Do nothing: the leader waits."""


def _answers(surveys: Sequence[bytes]) -> list[Survey]:
    return agree([unpacked(data) for data in surveys])
