"""A listening HTTP server: connections of `wire.http`, and one sweep that drops clients who stopped taking part."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from holdfast.core.address import Address
from holdfast.core.ports import Listener, Network
from holdfast.wire.http import Handler, HttpConnection, HttpLimits


@dataclass(frozen=True, slots=True)
class HttpPatience:
    """How long a client may do nothing."""

    request_s: float = 30.0  # to send a request it has begun
    idle_s: float = 300.0  # between requests; longer than common proxies', so that they close first
    unread_s: float = 60.0  # without reading what was sent


class HttpServer:
    """Serve `handler` on one address until closed."""

    def __init__(
        self,
        handler: Handler,
        network: Network,
        limits: HttpLimits | None = None,
        patience: HttpPatience | None = None,
    ) -> None:
        self._handler = handler
        self._network = network
        self._limits = limits or HttpLimits()
        self._patience = patience or HttpPatience()
        self._listener: Listener | None = None
        self._sweep_handle: asyncio.TimerHandle | None = None
        self.connections: set[HttpConnection] = set()

    async def start(self, address: Address, *, share_port: bool = False) -> Address:
        """Listen; return the address really bound."""
        self._listener = await self._network.listen(address, self._connection, share_port=share_port)
        self._sweep()
        return self._listener.address

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._handler, self._limits, self.connections)

    def stop_accepting(self) -> None:
        """Close the listening socket and every connection that is not being answered."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.close_when_idle()

    def close(self) -> None:
        self.stop_accepting()
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
        for connection in list(self.connections):
            connection.abort()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in list(self.connections):
            if self._overdue(connection, now_s):
                connection.abort()
        interval_s = min(5.0, self._patience.unread_s / 4)
        self._sweep_handle = loop.call_later(interval_s, self._sweep)

    def _overdue(self, connection: HttpConnection, now_s: float) -> bool:
        if connection.paused and now_s - connection.paused_since_s > self._patience.unread_s:
            return True
        if connection.busy:
            return False
        quiet_s = now_s - connection.active_at_s
        return quiet_s > (self._patience.request_s if connection.receiving else self._patience.idle_s)
