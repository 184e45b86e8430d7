"""A frontend's connection to a worker: handshake, frames, and whether the worker takes what is sent.

Always true: a connection that ends says why in `lost`; how much is sent to a worker is no reason to drop it.
"""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from holdfast.wire.frames import FrameSplitter, encode
from holdfast.wire.messages import VERSION, Hello, Refused, Welcome
from holdfast.wire.net import Unread


class Framed(asyncio.Protocol):
    """Handshake and frames; subclasses take the messages."""

    purpose = ""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._splitter = FrameSplitter()
        self._unread = Unread(lambda why: self._break(f"the worker {why}"))
        loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.welcomed: asyncio.Future[Welcome] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.send(Hello(VERSION, self.purpose, self._peer))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        why = f"connection lost: {exc}" if exc else "connection closed by the worker"
        if not self.welcomed.done():
            self.welcomed.set_exception(ConnectionError(why))
            self.welcomed.exception()  # the waiter may have timed out; the failure is in `lost` as well
        if not self.lost.done():
            self.lost.set_result(why)

    async def welcome(self, timeout_s: float) -> Welcome:
        """The worker's answer; ConnectionError or TimeoutError if there is none."""
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self.welcomed)

    def send(self, message: msgspec.Struct) -> None:
        if self.transport is not None:
            self._unread.write(self.transport, encode(message))

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _first(self, message: object) -> None:
        """Welcome or Refused."""
        if self.welcomed.done():
            return
        if isinstance(message, Welcome) and message.version == VERSION:
            self.welcomed.set_result(message)
        elif isinstance(message, Welcome):
            self._break(f"worker speaks wire version {message.version}, this frontend {VERSION}")
        elif isinstance(message, Refused):
            self._break(f"worker refused the connection: {message.reason}")

    def _break(self, why: str) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(ConnectionError(why))
            self.welcomed.exception()
        if not self.lost.done():
            self.lost.set_result(why)
        self.close()
