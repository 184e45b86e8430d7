"""A client's one connection to the lock server, from connect to close.

Always true: every question is answered, or failed with `LinkEnded` when the connection ends; an answered ping is told
with the time at which it was *sent*, the only time at which this client knows that the server was there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

from holdfast.failover.lock_server import messages as m
from holdfast.wire.frames import FrameError, FrameSplitter, encode

Answer = TypeVar("Answer", m.Welcome, m.Granted, m.Released, m.Pong, m.Owner)
OnPong = Callable[[float, bool], None]


class LinkEnded(Exception):
    """The connection ended before the answer came. `code`: the server's reason, if it gave one."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Link(asyncio.Protocol):
    """Speaks the lock server's messages over one connection. `on_pong(sent_s, holds)`."""

    def __init__(self, on_pong: OnPong) -> None:
        self._on_pong = on_pong
        self._splitter = FrameSplitter()
        self._questions: dict[type, asyncio.Future[Any]] = {}
        # Number and time of unanswered ones; whoever pings stops at its bound, a few of them later.
        self._pings: dict[int, float] = {}
        self._last_ping = 0
        self._refusal = LinkEnded("", "the connection was closed")
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        questions, self._questions = self._questions, {}
        for question in questions.values():
            if not question.done():
                question.set_exception(self._refusal)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in m.split(self._splitter, data):
                self._take(m.decode_to_client(payload))
        except FrameError as error:
            self._refusal = LinkEnded(m.MALFORMED, f"it does not speak the lock server's protocol: {error}")
            self._transport.abort()

    async def ask(self, message: m.ToServer, wanted: type[Answer]) -> Answer:
        """Send, and wait for the answer of that type; one question of a type at a time."""
        if self.closed.is_set():
            raise self._refusal
        assert wanted not in self._questions, f"two wait for {wanted.__name__}"
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions[wanted] = future
        self._send(message)
        try:
            return await future
        finally:
            self._questions.pop(wanted, None)

    def ping(self) -> None:
        self._send(self._next_ping())

    async def prove(self) -> m.Pong:
        """A ping, and its answer."""
        return await self.ask(self._next_ping(), m.Pong)

    async def wait_closed(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self.closed.wait()
        except TimeoutError:
            return False
        return True

    def let_go(self) -> None:
        """End it, and say so: over TCP an end with something unread is a reset, which alone proves nothing."""
        self._send(m.GiveBack())
        if self._transport.get_write_buffer_size():
            self._transport.abort()  # a server that does not read
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _next_ping(self) -> m.Ping:
        self._last_ping += 1
        self._pings[self._last_ping] = asyncio.get_running_loop().time()
        return m.Ping(self._last_ping)

    def _send(self, message: m.ToServer) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def _take(self, message: m.ToClient) -> None:
        if isinstance(message, m.Refused):
            self._refusal = LinkEnded(message.code, f"{message.code}: {message.reason}")
            self._transport.abort()
            return
        if isinstance(message, m.Pong) and (sent_s := self._pings.pop(message.number, None)) is not None:
            self._on_pong(sent_s, message.holds)
        question = self._questions.get(type(message))
        if question is not None and not question.done():
            question.set_result(message)
