"""Provides the connection kit: the base classes of all connections between two of our processes.

A client opens with a hello: the range of versions that it speaks, and its features. The server answers with a version
in both ranges, or refuses with a code and a reason and closes. After that each side sends its protocol's messages, one
frame each. Each protocol defines its own `Hello`, `Welcome` and other messages.

Always true of a client's connection: each question gets its answer, or `ConnectionEnded` when the connection ends; an
answer without a waiting caller is dropped. Always true of a server's: a peer that sends a malformed or too long frame,
or no hello in time, is refused, and gets `LINGER_S` to read the reason.

Versions: fields are only ever appended to a message, with defaults, and messages of a new kind are sent only to peers
that announced the feature. A message of unknown kind ends the connection, because an answer may depend on it; a link
on which it may be lost sets `ignores_unknown`, and then logs the first one and continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec

from holdfast.core.backoff import Backoff
from holdfast.core.tasks import done_within
from holdfast.wire.accepting import make_room
from holdfast.wire.frames import FRAME_BYTES_MAX, FrameError, FrameSplitter, UnknownMessage, encode
from holdfast.wire.net import WatchedWriter, tune

_log = logging.getLogger(__name__)

# Refusal codes shared by all protocols.
WRONG_VERSION = "WrongVersion"
MALFORMED = "Malformed"
NO_HELLO = "NoHello"
FULL = "Full"
# How long a refused peer may take to read why.
LINGER_S = 2.0
IGNORED = "%s sent %s; it and further ones are ignored: its version of Holdfast is newer"


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Tells the peer why the connection is refused; it closes after this."""

    code: str
    reason: str


class HelloMessage(Protocol):
    """The fields of a protocol's hello that the kit reads. `last_version` 0: the client speaks `version` only."""

    @property
    def version(self) -> int: ...

    @property
    def last_version(self) -> int: ...

    @property
    def features(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of a protocol that one process speaks, from `first` to `last`, and its features."""

    first: int
    last: int
    features: tuple[str, ...] = ()

    def __contains__(self, version: int) -> bool:
        return self.first <= version <= self.last

    def __str__(self) -> str:
        return f"version {self.first}" if self.first == self.last else f"versions {self.first} to {self.last}"

    def agree(self, hello: HelloMessage) -> int | None:
        """Return the newest version that both sides speak, or None."""
        newest = min(self.last, max(hello.version, hello.last_version))
        return newest if newest >= max(self.first, hello.version) else None

    def common_features(self, hello: HelloMessage) -> tuple[str, ...]:
        return tuple(feature for feature in self.features if feature in hello.features)

    def refusal(self, hello: HelloMessage, server: str) -> str:
        """Return the reason to give a client with which no version is shared."""
        client = Versions(hello.version, max(hello.version, hello.last_version))
        return f"the client speaks {client}, {server} speaks {self}; upgrade the older one"


class ConnectionEnded(ConnectionError):
    """The connection ended before the answer came. `code` is the server's if it refused, else empty."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ClientConnection(asyncio.Protocol):
    """A client's connection, from connect to close. Subclasses handle the messages."""

    ignores_unknown = False

    def __init__(
        self, server: str, decode: Callable[[memoryview], Any], *, message_bytes_max: int = FRAME_BYTES_MAX
    ) -> None:
        self._server = server  # as error texts call it
        self._decode = decode
        self._splitter = FrameSplitter(message_bytes_max)
        self._unread = WatchedWriter(lambda why: self.end("", f"the {server} {why}"))
        self._pending: dict[Hashable, Callable[[Any], None]] = {}
        self._last_call = 0
        self.transport: asyncio.Transport | None = None  # while connected
        self.ended = ConnectionEnded("", f"connection closed by the {server}")
        self.closed = asyncio.Event()
        self.quiet = False  # set by `watch_silence`, cleared by anything received
        self._has_ignored = False

    # -- hooks

    def on_message(self, message: Any) -> None:
        """Handle a message. A subclass passes on what it does not handle itself."""
        if isinstance(message, Refused):
            self.end(message.code, f"{message.code}: {message.reason}")

    def on_received(self) -> None:
        """Run after all messages of one read were handled."""

    def on_closed(self) -> None:
        """Run when the connection has ended, before its pending questions fail."""

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if exc is not None:
            self.ended = ConnectionEnded("", f"connection lost: {exc}")
        self.closed.set()
        self.on_closed()
        pending, self._pending = self._pending, {}
        for on_answer in pending.values():
            on_answer(None)

    def data_received(self, data: bytes) -> None:
        self.quiet = False
        try:
            for payload in self._splitter.feed(data):
                if (message := self.read(payload)) is not None:
                    self.on_message(message)
        except FrameError as error:
            self.on_unreadable(error)
        self.on_received()

    def read(self, payload: memoryview) -> Any:
        """Return the decoded message; None if it is ignored."""
        try:
            return self._decode(payload)
        except UnknownMessage as error:
            if not self.ignores_unknown:
                raise
            if not self._has_ignored:
                self._has_ignored = True
                _log.warning(IGNORED, self.peer_name(), error)
            return None

    def peer_name(self) -> str:
        return f"the {self._server}"

    def on_unreadable(self, error: FrameError) -> None:
        self.end("", f"the {self._server} sent what is not our protocol: {error}")

    # -- for the owner

    def send(self, message: msgspec.Struct) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self._unread.write(self.transport, encode(message))

    @property
    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def next_call(self) -> int:
        self._last_call += 1
        return self._last_call

    def expect(self, key: Hashable, on_answer: Callable[[Any], None]) -> None:
        """Register `on_answer` for the answer with this key; it is called with None if the connection ends first."""
        assert key not in self._pending, f"two wait for {key}"
        self._pending[key] = on_answer

    def answer(self, key: Hashable, message: Any) -> None:
        """Pass a message to the callback that waits for it, if there is one."""
        if (on_answer := self._pending.pop(key, None)) is not None:
            on_answer(message)

    async def ask(self, key: Hashable, message: msgspec.Struct) -> Any:
        """Send a message and return the answer with this key; raise ConnectionEnded if the connection ends first."""
        if self.closed.is_set():
            raise self.ended
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.expect(key, lambda answer: None if future.done() else future.set_result(answer))
        self.send(message)
        try:
            answer = await future
        finally:
            self._pending.pop(key, None)
        if answer is None:
            raise self.ended
        return answer

    def end(self, code: str, reason: str) -> None:
        """Close at once; pending questions fail with this reason."""
        self.ended = ConnectionEnded(code, reason)
        self.abort()

    def close(self) -> None:
        """Close after everything written has been sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


async def watch_silence(
    connection: ClientConnection,
    *,
    tick_s: float,
    ticks_max: int,
    on_tick: Callable[[int, int], None],
    on_silent: Callable[[], None],
) -> None:
    """Return when the connection has closed. Call `on_tick` with the number of the tick and the number of silent ticks
    so far, and `on_silent` once when these reach `ticks_max`. Silence is counted in ticks of our own timer, so that our
    own freeze is never taken for the server's."""
    tick = silent = 0
    while not connection.closed.is_set():
        on_tick(tick, silent)
        connection.quiet = True
        await done_within(connection.closed.wait(), tick_s)
        tick += 1
        silent = silent + 1 if connection.quiet else 0
        if silent == ticks_max and not connection.closed.is_set():
            on_silent()


async def reconnect(
    session: Callable[[], Awaitable[bool]], backoff: Backoff, failed: Callable[[Exception], None]
) -> None:
    """Run sessions, with growing waits between them, until one returns True. Pass network errors to `failed`, which
    raises to stop."""
    while True:
        try:
            if await session():
                return
        except OSError as error:
            failed(error)
        await asyncio.sleep(backoff.next_s())


class ServerConnection(asyncio.Protocol):
    """One client's connection at a server, from accept to close. Subclasses handle the messages."""

    malformed_code, no_hello_code = MALFORMED, NO_HELLO
    ignores_unknown = False

    def __init__(
        self,
        decode: Callable[[memoryview], Any],
        *,
        hello_timeout_s: float,
        unsent_bytes_max: int,
        message_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        self._decode = decode
        self._hello_timeout_s = hello_timeout_s
        self._unsent_bytes_max = unsent_bytes_max
        self._splitter = FrameSplitter(message_bytes_max)
        self._hello_timer: asyncio.TimerHandle | None = None
        self.since_s = asyncio.get_running_loop().time()
        self.over = False  # refused or closed: further input is ignored
        self._has_ignored = False

    # -- hooks

    def on_connected(self) -> None:
        """Accept the connection or refuse it."""

    def on_frames(self, payloads: list[memoryview]) -> None:
        """Handle received frames: decode each, and pass it to `on_message` until the peer is refused."""
        for payload in payloads:
            if self.over:
                return
            if (message := self.read(payload)) is not None:
                self.on_message(message)

    def on_message(self, message: Any) -> None:
        """Handle one message."""

    def on_left(self, exc: Exception | None, *, refused: bool) -> None:
        """Run once when the connection ends: closed by the peer, broken, or refused."""

    def peer_name(self) -> str:
        return "a connection"

    def refusal(self, code: str, reason: str) -> msgspec.Struct:
        return Refused(code, reason)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self._unsent_bytes_max)
        tune(transport)
        self._hello_timer = asyncio.get_running_loop().call_later(self._hello_timeout_s, self._no_hello)
        self.on_connected()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave(exc, refused=False)

    def data_received(self, data: bytes) -> None:
        if self.over:
            return
        try:
            payloads = self._splitter.feed(data)
        except FrameError as error:
            self.refuse(self.malformed_code, str(error))
            return
        self.on_frames(payloads)

    # -- for subclasses and servers

    def read(self, payload: memoryview) -> Any:
        """Return the decoded message; None if it is ignored, or cannot be decoded and the peer is refused."""
        try:
            return self._decode(payload)
        except FrameError as error:
            if not (self.ignores_unknown and isinstance(error, UnknownMessage)):
                self.refuse(self.malformed_code, str(error))
            elif not self._has_ignored:
                self._has_ignored = True
                _log.warning(IGNORED, self.peer_name(), error)
            return None

    def welcome(self, message: msgspec.Struct) -> None:
        """Answer an accepted hello and stop its timer."""
        self.stop_hello_timer()
        self.send(message)

    def send(self, message: msgspec.Struct) -> None:
        if not self.transport.is_closing():
            self.transport.write(encode(message))

    def refuse(self, code: str, reason: str) -> None:
        """Send the reason, then close after `LINGER_S`."""
        if self.over:
            return
        _log.warning("refused %s: %s: %s", self.peer_name(), code, reason)
        self.send(self.refusal(code, reason))
        if not self.transport.is_closing():
            self.transport.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
        # Closing with unread input would reset the connection, and the peer would lose the reason.
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)
        self._leave(None, refused=True)

    @property
    def is_stranger(self) -> bool:
        """Return True until a Hello is accepted or the connection ends."""
        return self._hello_timer is not None

    def turn_out(self) -> None:
        """Close at once, to make room for another connection."""
        self._leave(None, refused=True)
        self.transport.abort()

    def close(self) -> None:
        """Close at once without calling `on_left`: the server itself closes it."""
        self.over = True
        self.stop_hello_timer()
        self.transport.abort()

    def stop_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None

    def _leave(self, exc: Exception | None, *, refused: bool) -> None:
        self.stop_hello_timer()
        if not self.over:
            self.over = True
            self.on_left(exc, refused=refused)

    def _no_hello(self) -> None:
        self.refuse(self.no_hello_code, f"no Hello within {self._hello_timeout_s:g} s")


def turn_out_strangers(connections: Iterable[ServerConnection]) -> bool:
    """Close the connections that have been open longest without a Hello; return False if there is none."""
    return make_room((one.since_s, one.turn_out) for one in connections if one.is_stranger)
