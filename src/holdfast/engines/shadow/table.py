"""Where the ranks of one engine, each with a pool of its own, agree on what they found: over a socket from the leader
to each of the others.

Always true: every rank hears every survey and comes to the same answer by itself, and nothing of a pool is believed
before. A peer that dies is an error at once, one that is stuck an error when its time is over.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from holdfast.engines.shadow.frames import ANSWER_S, frame, receive
from holdfast.kv.adopt import Survey, agree, packed, unpacked


class LeadersTable:
    """The leader's `Peers`. It alone waits for the others' fences: it alone gives blocks to anybody."""

    def __init__(self, ranks: Sequence[socket.socket], wake_s: float, fenced: Callable[[], Awaitable[None]]) -> None:
        self._ranks, self._fenced = ranks, fenced
        # One rank's vault may grant its pool at once, another's only when that time is all but over.
        self._bound_s = wake_s + ANSWER_S

    async def agree(self, found: Survey) -> Survey:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._bound_s):
            surveys = [packed(found), *await asyncio.gather(*map(receive, self._ranks))]
            words = frame(msgspec.msgpack.encode(surveys))
            await asyncio.gather(*(loop.sock_sendall(rank, words) for rank in self._ranks))
        return _answers(surveys)[0]

    async def fenced(self) -> None:
        await self._fenced()


class RanksTable:
    """Another rank's `Peers`."""

    def __init__(self, rank: int, leader: socket.socket, wake_s: float) -> None:
        self._rank, self._leader = rank, leader
        self._bound_s = wake_s + ANSWER_S

    async def agree(self, found: Survey) -> Survey:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._bound_s):
            await loop.sock_sendall(self._leader, frame(packed(found)))
            surveys = msgspec.msgpack.decode(await receive(self._leader), type=list[bytes])
        return _answers(surveys)[self._rank]

    async def fenced(self) -> None:
        """Its leader waits."""


def _answers(surveys: Sequence[bytes]) -> list[Survey]:
    return agree([unpacked(data) for data in surveys])
