"""Implements the listening HTTP server: it owns the connections, and drops clients that stop sending or reading."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator

from holdfast.core.address import Address, TcpAddress
from holdfast.core.ports import Listener, Network
from holdfast.wire.accepting import SHARE_OF_PAGES, Idle, connections_max, make_room
from holdfast.wire.http.connection import Admit, Handler, HttpConnection
from holdfast.wire.http.request import HttpBounds, HttpRequest, RefusedRequest
from holdfast.wire.http.response import RETRY_SOON, refusal
from holdfast.wire.net import has_unread

log = logging.getLogger("holdfast.http")

# A request that arrives at this rate or faster gets more time than `request_s`.
RECEIVED_BYTES_PER_S_MIN = 4096
# Limit for a whole request, in multiples of `request_s`: 5 min by default, for which the largest body needs 56 KB/s.
REQUEST_TIMES_MAX = 10
# Share of a server's places that is spared for clients that come when it is full: to refuse them, or to answer probes.
SPARED_SHARE = 1 / 8
# When the server stops: time for the next request of a client that was promised keep-alive; its answer is the last.
NEXT_S = 1.0
SHED = "more request bodies are arriving than there is memory for, and this one has been arriving longest"
FULL = "as many clients are being answered as there can be; let it have more descriptors (`ulimit -n`)"


def arrival_bound_s(bounds: HttpBounds, received_bytes: int) -> float:
    """Return how long (s) a request may take to arrive, given the bytes received so far."""
    steady_s = bounds.request_s + received_bytes / RECEIVED_BYTES_PER_S_MIN
    return min(steady_s, bounds.request_s * REQUEST_TIMES_MAX)


class HttpServer:
    """An HTTP server that listens on one address.

    - `handler` is called for each request.
    - `begin` is called before every answer, also before a refusal, with what has arrived of the request. It may set the
      request id and headers.
    - `admit` is called before a body is read. It returns the limit in bytes, or raises RefusedRequest.
    - `probes` are paths that are answered even when all places are taken: a full server is not unhealthy."""

    def __init__(
        self,
        handler: Handler,
        network: Network,
        bounds: HttpBounds = HttpBounds(),  # noqa: B008 - frozen
        *,
        begin: Handler = lambda connection, request: None,
        admit: Admit | None = None,
        share: float = SHARE_OF_PAGES,
        probes: frozenset[str] = frozenset(),
    ) -> None:
        self._begin = begin
        self._admit = admit
        self._buffered_bytes = 0  # bodies of all connections
        self._handler = handler
        self._network = network
        self._bounds = bounds
        self._share = share  # of this process's descriptors, for clients
        self._probes = probes
        self._listener: Listener | None = None
        self._leaving = False
        self._sweep_handle: asyncio.TimerHandle | None = None
        self.connections: set[HttpConnection] = set()
        self._excess: set[HttpConnection] = set()  # of those, the ones that came when all places were taken

    async def start(self, address: Address, *, share_port: bool = False, or_any: bool = False) -> Address:
        """Listen; return the bound address. `or_any`: if the port is in use, listen on a free one."""
        try:
            self._listener = await self._network.listen(address, self._connection, share_port=share_port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not (or_any and isinstance(address, TcpAddress)):
                raise
            self._listener = await self._network.listen(TcpAddress(address.host, 0), self._connection)
            log.warning("%s is in use by another; the status page is at %s", address, self._listener.address)
        self._sweep()
        return self._listener.address

    def _connection(self) -> HttpConnection:
        return HttpConnection(
            self._begin,
            self._answer,
            self._bounds,
            admit=self._read_at_most,
            came=self._came,
            left=self._left,
            held=self._count_buffered,
        )

    def _read_at_most(self, connection: HttpConnection, request: HttpRequest) -> int:
        """Return the limit for a body in bytes; raise RefusedRequest if none is accepted."""
        if connection in self._excess and request.path not in self._probes:
            raise RefusedRequest(429, FULL, headers=RETRY_SOON)
        return self._bounds.body_bytes_max if self._admit is None else self._admit(connection, request)

    def _count_buffered(self, more: int) -> None:
        """Keep the bodies of all connections within their budget: shed the one that has been arriving longest."""
        self._buffered_bytes += more
        while self._buffered_bytes > self._bounds.buffered_bytes_max:
            holding = [one for one in self.connections if one.ahead.buffered_bytes]
            oldest = min(holding, key=lambda one: one.receiving_since_s)
            oldest.shed(RefusedRequest(429, SHED, headers=RETRY_SOON))

    def _came(self, connection: HttpConnection) -> None:
        """Add a connection. If all places are taken, close an idle one, or give the new one a spared place for one
        answer."""
        most = connections_max(self._share)
        spared = max(1, int(most * SPARED_SHARE))
        here = len(self.connections) - len(self._excess)
        if here >= most - spared and not make_room(self._idle(lambda one: not one.closing)):
            room = len(self._excess) < spared or self._hurry()
            self._excess.add(connection)
            connection.closing = True
            if not room:  # all spared ones are being answered
                connection.refuse(RefusedRequest(429, FULL, headers=RETRY_SOON))
        self.connections.add(connection)
        if self._leaving:  # it was in the backlog
            connection.leaving = True

    def _left(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        self._excess.discard(connection)

    def _answer(self, connection: HttpConnection, request: HttpRequest) -> None:
        if connection in self._excess and request.path not in self._probes:
            connection.respond(429, refusal(429, FULL), headers=RETRY_SOON)
        else:
            self._handler(connection, request)

    def _hurry(self) -> bool:
        """Free a spared place: close an idle connection that had its last answer, else one still waiting to send its
        request. Return False if there is none."""
        answered = self._idle(lambda one: one.closing and one.outgoing.written > 0)
        return make_room(answered) or make_room(self._idle(lambda one: one.closing))

    def _idle(self, which: Callable[[HttpConnection], bool]) -> Iterator[Idle]:
        """Yield matching connections that are not being answered. A connection with an incomplete request counts as
        idle (there may be a flood of them); one with unread input does not."""
        for connection in self.connections:
            transport = connection.transport
            if transport is None or transport.is_closing() or transport.get_write_buffer_size():
                continue
            if not connection.at_work and which(connection) and not has_unread(transport):
                yield connection.active_at_s, transport.close  # the kernel may still hold the end of an answer

    def stop_accepting(self) -> None:
        """Close the listening socket. Each connection is closed after its next answer (which has `connection: close`),
        or when idle for `NEXT_S`."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self.connections:
            connection.leaving = True
        if not self._leaving:
            self._leaving = True
            asyncio.get_running_loop().call_later(NEXT_S, self._let_go)

    def _let_go(self) -> None:
        """Close connections that sent no further request within `NEXT_S`; repeat until none is left."""
        loop = asyncio.get_running_loop()
        rests = self._idle(lambda one: not (one.receiving or (one.closing and one.outgoing.written)))
        for active_at_s, close in list(rests):
            if loop.time() >= active_at_s + NEXT_S:
                close()
        if self.connections:
            loop.call_later(NEXT_S / 4, self._let_go)

    def cut_off(self, why: str) -> None:
        """End every answer in progress with a named error rather than a silent close."""
        for connection in list(self.connections):
            if connection.responder is not None:
                connection.responder.cut_off(why)

    def close(self) -> None:
        self.stop_accepting()
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
        for connection in list(self.connections):
            connection.abort()

    async def emptied(self) -> None:
        """Wait until all answers are sent and all connections closed; the caller sets the time limit."""
        while self.connections:  # noqa: ASYNC110 - once in a process's life; an event would cost every connection
            await asyncio.sleep(0.01)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in list(self.connections):
            self._enforce_bounds(connection, now_s)
        interval_s = min(5.0, self._bounds.unread_s / 4, self._bounds.request_s / 4)
        self._sweep_handle = loop.call_later(interval_s, self._sweep)

    def _enforce_bounds(self, connection: HttpConnection, now_s: float) -> None:
        bounds = self._bounds
        transport = connection.transport
        if transport is None:
            return
        if transport.get_write_buffer_size():
            connection.active_at_s = now_s  # idle time begins when everything was sent
            if connection.outgoing.stalled_s(transport, now_s) > bounds.unread_s:
                log.info("dropping a client that took nothing for %g s of what was sent to it", bounds.unread_s)
                connection.abort()
        elif connection.busy:
            connection.check_client()
        elif connection.receiving:
            allowed_s = arrival_bound_s(bounds, connection.received_bytes)
            if now_s - connection.receiving_since_s > allowed_s:
                connection.refuse(RefusedRequest(408, f"the request did not arrive within {allowed_s:.0f} s"))
        elif now_s - connection.active_at_s > bounds.idle_s:
            transport.close()  # not aborted: the kernel may still hold the end of an answer
