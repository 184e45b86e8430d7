"""One client's connection to the lock server, from accept to close.

Always true: nothing is answered before a good Hello; the server hears of the end exactly once, and whether it was the
client's own end: an end of file, or on a Unix socket any breaking of the connection, for there is no network to break
it. Our own refusing or closing of a connection proves nothing about the client.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import Protocol, cast

from holdfast.core.address import Address, UnixAddress
from holdfast.failover.lock_server import machine
from holdfast.failover.lock_server import messages as m
from holdfast.failover.lock_server.peer import may_connect, peer_uid
from holdfast.wire.frames import FrameError, FrameSplitter
from holdfast.wire.net import tune

_log = logging.getLogger(__name__)

# Whoever connects says Hello at once; a port scanner does not.
HELLO_TIMEOUT_S = 2.0
# How long a refused peer may take to read why.
LINGER_S = 1.0
# Answers to a client that asks and does not read; past it, it is not read from either.
UNSENT_BYTES_MAX = 64 * 1024


class Server(Protocol):
    """What a session needs of the server it belongs to."""

    address: Address
    token: str
    window_s: float
    state: machine.LockState

    @property
    def needs_token(self) -> bool: ...
    def admit(self, session: Session) -> int | None: ...
    def dismiss(self, number: int, sure: bool) -> None: ...
    def take(self, event: machine.Event) -> None: ...
    def owner(self) -> m.Owner: ...


class Session(asyncio.Protocol):
    """Speaks the lock server's messages with one client."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._splitter = FrameSplitter()
        self._number: int | None = None
        self._client: machine.Client | None = None
        self._ended_by_client = False

    @property
    def greeted(self) -> bool:
        return self._client is not None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        tune(transport)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._no_hello)
        self._number = self._server.admit(self)
        if self._number is None:
            self.refuse(m.FULL, "this lock server has all the connections it can bear")
        elif self._is_unix() and not may_connect(uid := peer_uid(transport)):
            self.refuse(m.WRONG_USER, f"the client runs as user {uid}, and the lock is another's")

    def eof_received(self) -> bool:
        self._ended_by_client = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._hello_timer.cancel()
        self._leave(sure=self._ended_by_client or (self._is_unix() and isinstance(exc, ConnectionError)))

    def data_received(self, data: bytes) -> None:
        try:
            for payload in m.split(self._splitter, data):
                if self._number is None:
                    return  # refused: what still comes is not read, so that the refusal can be
                self._take(m.decode_to_server(payload))
        except FrameError as error:
            if self._number is not None:
                self.refuse(m.MALFORMED, str(error))

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    # -- for the server

    def send(self, message: m.ToClient) -> None:
        if not self._transport.is_closing():
            self._transport.write(m.encode(message))

    def refuse(self, code: str, reason: str) -> None:
        """Say why, and end. What the connection held is no proof of anything: it was not the client that ended it."""
        _log.warning("refused %s: %s: %s", self._client.who if self._client else "a connection", code, reason)
        self.send(m.Refused(code, reason))
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        # Closing with unread input would reset the connection and the reason with it.
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)
        self._hello_timer.cancel()
        self._leave(sure=False)

    def close(self) -> None:
        """End without a word; the server knows already."""
        self._number = None
        self._transport.abort()

    # -- messages

    def _take(self, message: m.ToServer) -> None:
        assert self._number is not None
        if isinstance(message, m.Hello):
            self._greet(message)
            return
        if self._client is None:
            self.refuse(m.NO_HELLO, "the first message must be Hello")
            return
        match message:
            case m.AskLock(grant):
                self._server.take(machine.Acquire(self._number, self._client, grant))
            case m.GiveBack():
                self._server.take(machine.Release(self._number))
            case m.Ping(number):
                self.send(m.Pong(number, self._server.state.holds(self._number)))
            case m.AskOwner():
                self.send(self._server.owner())

    def _greet(self, hello: m.Hello) -> None:
        if hello.version != m.VERSION:
            reason = f"the client speaks version {hello.version}, this server {m.VERSION}; upgrade the older one"
            self.refuse(m.WRONG_VERSION, reason)
        elif self._server.needs_token and not _equal(hello.token, self._server.token):
            self.refuse(m.WRONG_TOKEN, "the token is wrong" if hello.token else "a token is needed on TCP")
        elif self.greeted or not hello.id:
            self.refuse(m.MALFORMED, "Hello was said already" if self.greeted else "Hello without an id")
        else:
            self._client = machine.Client(hello.id, hello.who, hello.pid, hello.start_ticks)
            self._hello_timer.cancel()
            self.send(m.Welcome(m.VERSION, self._server.window_s))

    def _leave(self, sure: bool) -> None:
        number, self._number = self._number, None
        if number is not None:
            self._server.dismiss(number, sure)

    def _no_hello(self) -> None:
        if self._number is not None:
            self.refuse(m.NO_HELLO, f"no Hello within {HELLO_TIMEOUT_S:g} s")

    def _is_unix(self) -> bool:
        return isinstance(self._server.address, UnixAddress)


def _equal(one: str, other: str) -> bool:
    """In a time that tells nothing about where they differ."""
    return hmac.compare_digest(one.encode(errors="surrogatepass"), other.encode(errors="surrogatepass"))
