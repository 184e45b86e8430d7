"""Taking connections in: some at a time, and never with the descriptors that the process itself needs.

Not by the loop's own server: that takes all that wait in one turn, before anybody could be turned out, and uvloop's
ends for good, without a word, on an error that is over a moment later. Always true: a listener that is out of
descriptors rests and goes on; who does nothing here is turned out, the longest idle first, before anybody else is
refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import os
import socket
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import cast

from holdfast.core.address import Address, UnixAddress
from holdfast.core.limits import descriptor_limit
from holdfast.core.ports import ProtocolFactory
from holdfast.core.tasks import Tasks

log = logging.getLogger("holdfast.net")

# Well below what is spared: so many are taken in before anybody is turned out for them.
ACCEPTS_AT_ONCE = 8
LAST_ACCEPTS_MAX = 4096  # by one that is closed: those the kernel keeps for it
# Out of descriptors or of the kernel's memory: somebody must leave before another can come.
REST_S = 0.05
# Of all descriptors that a process may have: what a server for everyone may use for its connections, and what a page
# for probes, which must answer where the first one is full. The rest is for the process's own links, files and slabs.
SHARE = 5 / 8
SHARE_OF_PAGES = 1 / 16
# One look at many connections turns out some of them, so that a flood does not cost a look at all each time.
TURNED_OUT_SHARE = 64

# A connection for which nothing is under way: since when, seconds, and what closes it.
Idle = tuple[float, Callable[[], object]]


def places(share: float) -> int:
    """How many connections may use that share of what this process may have now."""
    return int(descriptor_limit() * share)


def make_room(idle: Iterable[Idle]) -> bool:
    """Turn out who has been idle longest; whether there was anybody."""
    known = list(idle)
    for _, close in heapq.nsmallest(1 + len(known) // TURNED_OUT_SHARE, known, key=itemgetter(0)):
        close()
    return bool(known)


class SocketListener:
    """Listening sockets of one address, and the connections that are just being taken in."""

    def __init__(self, address: Address, sockets: list[socket.socket], factory: ProtocolFactory) -> None:
        self.address = address
        self._sockets = sockets
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._taking = Tasks(f"listening at {address}")
        self._resting = False
        for sock in sockets:
            sock.setblocking(False)
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def close(self) -> None:
        """Who is at the door is let in first: whom the kernel has greeted it would reset."""
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
            with contextlib.suppress(OSError):
                for _ in range(LAST_ACCEPTS_MAX):
                    self._taking.spawn(self._connect(sock.accept()[0]), "take in the last")
            sock.close()
        self._sockets = []
        if isinstance(self.address, UnixAddress):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.path)

    def _accept(self, listening: socket.socket) -> None:
        """Take some in, and no more until each of them has been looked at."""
        came: list[socket.socket] = []
        rest_s = 0.0
        try:
            while len(came) < ACCEPTS_AT_ONCE:
                came.append(listening.accept()[0])
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            rest_s = REST_S  # the socket stays readable: without a rest the loop would do nothing but fail
            if not self._resting:
                log.warning("cannot take connections in at %s: %s; trying on", self.address, error)
        self._resting = rest_s > 0
        self._loop.remove_reader(listening.fileno())
        self._taking.spawn(self._take_in(listening, came, rest_s), "take in")

    async def _take_in(self, listening: socket.socket, came: list[socket.socket], rest_s: float) -> None:
        try:
            await asyncio.gather(*map(self._connect, came))
            if rest_s:
                await asyncio.sleep(rest_s)
        finally:
            if listening in self._sockets:
                self._loop.add_reader(listening.fileno(), self._accept, listening)

    async def _connect(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(cast("type[asyncio.Protocol]", self._factory), sock)
        except OSError as error:  # it left at once
            log.debug("a connection to %s ended before it began: %s", self.address, error)
            sock.close()
