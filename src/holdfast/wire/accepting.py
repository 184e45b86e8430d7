"""Accepts connections, a few at a time, and leaves the process the file descriptors that it needs itself.

It replaces the event loop's own server, which accepts the whole backlog in one turn, before idle connections could be
closed; uvloop's also stops for good, silently, on a transient error. Always true: a listener that is out of descriptors
pauses and continues; idle connections are closed, the longest idle first, before a new one is refused.
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

# Connections accepted in one turn, before idle ones are closed for them; well below the spared places.
ACCEPTS_AT_ONCE = 8
LAST_ACCEPTS_MAX = 4096  # when a listener closes: the kernel's backlog
# Pause when out of descriptors or kernel memory: a connection must close before another can be accepted.
REST_S = 0.05
# Shares of the process's descriptor limit: for a public server's connections, and for a status page, which must answer
# when that server is full. The rest is for the process's own connections, files and slabs.
SHARE = 5 / 8
SHARE_OF_PAGES = 1 / 16
# One scan closes 1/64 of the idle connections, so that a flood does not cost a full scan per connection.
TURNED_OUT_SHARE = 64

# An idle connection: since when (s), and the function that closes it.
Idle = tuple[float, Callable[[], object]]


def connections_max(share: float) -> int:
    """Return how many connections fit into this share of the current descriptor limit."""
    return int(descriptor_limit() * share)


def make_room(idle: Iterable[Idle]) -> bool:
    """Close the connections that have been idle longest; return False if there is none."""
    known = list(idle)
    for _, close in heapq.nsmallest(1 + len(known) // TURNED_OUT_SHARE, known, key=itemgetter(0)):
        close()
    return bool(known)


class SocketListener:
    """The listening sockets of one address, and the connections that are being accepted."""

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
        """Stop listening. Accept the backlog first: the kernel would reset those connections."""
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
        """Accept a few connections, and no more until each of them has been set up."""
        came: list[socket.socket] = []
        rest_s = 0.0
        try:
            while len(came) < ACCEPTS_AT_ONCE:
                came.append(listening.accept()[0])
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            rest_s = REST_S  # the socket stays readable: without a pause the loop would spin
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
        except OSError as error:  # the peer left at once
            log.debug("a connection to %s ended before it began: %s", self.address, error)
            sock.close()
