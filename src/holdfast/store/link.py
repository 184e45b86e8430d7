"""One connection of an embedded-store client, from connect to close.

Always true: every pending call is answered, or failed with `LinkClosed` when the connection ends; answers to calls
nobody waits for any more are dropped; the owner hears of the end exactly once. Whether the server is slow or frozen
is judged by the owner, from `quiet`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from holdfast.store import messages as m
from holdfast.wire.frames import FrameError, FrameSplitter, encode

# Unsent bytes towards a frozen server; beyond, calls fail at once instead of piling up behind it.
UNSENT_BYTES_MAX = 8 * 1024 * 1024

Answer = m.Value | m.Done | m.Failed
OnAnswer = Callable[[Answer], None]


class LinkClosed(Exception):
    """The connection ended before the answer came."""


class LinkOwner(Protocol):
    """Who a link reports to, always synchronously."""

    def link_watched(self, message: m.WatchItems | m.Changed) -> None: ...

    def link_heard(self, link: Link) -> None:
        """Something was received, and has been handled."""

    def link_closed(self, link: Link) -> None: ...


class Link(asyncio.Protocol):
    """Speaks the store's messages over one connection."""

    def __init__(self, owner: LinkOwner) -> None:
        self._owner = owner
        self._splitter = FrameSplitter()
        self._calls: dict[int, OnAnswer] = {}
        self._next_call = 0
        self.welcomed = False
        self.quiet = False  # set by whoever watches for silence, cleared by anything received
        self.closed = asyncio.Event()
        self.reason = "the connection was closed"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(encode(m.Hello(m.VERSION)))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.reason = f"the connection broke: {exc}"
        self.closed.set()
        self._owner.link_closed(self)
        self._calls, calls = {}, self._calls
        for call, on_answer in calls.items():
            on_answer(m.Failed(call, ""))

    def data_received(self, data: bytes) -> None:
        self.quiet = False
        try:
            for payload in self._splitter.feed(data):
                self._take(m.decode_to_client(payload))
        except FrameError as error:
            self.reason = f"it does not speak the store's protocol: {error}"
            self._transport.abort()
        self._owner.link_heard(self)

    def send(self, message: m.ToServer) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def congested(self) -> bool:
        return self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX

    def number(self, on_answer: OnAnswer) -> int:
        """A number for a call that is about to be sent. At the connection's end it is answered `Failed` with no
        reason."""
        self._next_call += 1
        self._calls[self._next_call] = on_answer
        return self._next_call

    async def call(self, make: Callable[[int], m.ToServer]) -> Answer:
        """Send a request and wait for its answer; raise `LinkClosed` if the connection ends first."""
        if self.closed.is_set():
            raise LinkClosed(self.reason)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def settle(answer: Answer) -> None:
            if not future.done():
                future.set_result(answer)

        number = self.number(settle)
        self.send(make(number))
        try:
            answer = await future
        finally:
            self._calls.pop(number, None)
        if isinstance(answer, m.Failed) and not answer.reason:
            raise LinkClosed(self.reason)
        return answer

    def close(self) -> None:
        """End the connection once what was written is sent."""
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _take(self, message: m.ToClient) -> None:
        if isinstance(message, m.Changed | m.WatchItems):
            self._owner.link_watched(message)
        elif isinstance(message, Answer):
            on_answer = self._calls.pop(message.call, None)
            if on_answer is not None:
                on_answer(message)
        elif isinstance(message, m.Welcome):
            self.welcomed = True
        elif isinstance(message, m.Refused):
            self.reason = f"it refused the connection: {message.code}: {message.reason}"
            self._transport.close()
