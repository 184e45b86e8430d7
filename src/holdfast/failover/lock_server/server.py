"""The lock server: sockets and the record on disk around its machine.

Always true: a grant's record is on disk before the grant is told; nothing a client sends or fails to read ends the
process or grows it without bound; a holder that is silent keeps the lock as long as its connection stands. Closing the
server keeps the record: for the holder it is like any other restart.

Always true of a session: nothing is answered before a good Hello; the server hears of the end exactly once, and whether
it was the client's own end: an end of file, or on a Unix socket any breaking of the connection, for there is no network
to break it. Our own refusing or closing of a connection proves nothing about the client.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Callable
from typing import cast

from holdfast.core.address import Address, UnixAddress
from holdfast.core.errors import UserError
from holdfast.core.peers import peer_uid
from holdfast.core.ports import Listener, Network
from holdfast.failover.lock_server import machine
from holdfast.failover.lock_server import messages as m
from holdfast.failover.lock_server.record import LockRecord
from holdfast.wire.frames import FrameError, FrameSplitter, encode
from holdfast.wire.net import tune

_log = logging.getLogger(__name__)

# Four times the waiters; one that says no Hello makes room for the next before the holder finds the house full.
CONNECTIONS_MAX = 1024
# Whoever connects says Hello at once; a port scanner does not.
HELLO_TIMEOUT_S = 2.0
# How long a refused peer may take to read why.
LINGER_S = 1.0
# Answers to a client that asks and does not read; past it, it is not read from either.
UNSENT_BYTES_MAX = 64 * 1024


class LockServer:
    """One lock. `start`, then `run` until cancelled."""

    def __init__(
        self,
        address: Address,
        network: Network,
        record: LockRecord,
        *,
        window_s: float,
        token: str,
        unix_s: Callable[[], float],
    ) -> None:
        self.address = address
        self.token = token
        self.window_s = window_s
        self._network = network
        self._record = record
        self._unix_s = unix_s
        self._sessions: dict[int, Session] = {}
        self._next_session = 0
        self._listener: Listener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self.state = machine.LockState(window_s, 0.0)

    def __repr__(self) -> str:
        return f"lock server {self.address}: {self.state!r}"

    async def start(self) -> Address:
        """Read the record, then listen. The window counts from here: the server before this one is dead by now."""
        self._record.open()
        found = self._record.load()
        self.state = machine.begin(found.record, not found.trouble, self.window_s, self._loop.time(), self._unix_s())
        if found.trouble:
            _log.error("cannot read %s: %s; who held the lock is unknown", self._record.path, found.trouble)
        self._listener = await self._network.listen(self.address, lambda: Session(self))
        self.address = self._listener.address
        self._arm()
        _log.info("%r", self)
        return self.address

    async def run(self) -> None:
        """Serve; UserError once the record cannot be written, for then nobody can be granted anything."""
        try:
            await self._failed
        finally:
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for session in list(self._sessions.values()):
            session.close()
        self._sessions.clear()
        self._record.close()

    # -- what sessions call

    def admit(self, session: Session) -> int | None:
        """A new connection's number, or None when there is no room."""
        if len(self._sessions) >= CONNECTIONS_MAX:
            strangers = [number for number, other in self._sessions.items() if not other.greeted]
            if not strangers:
                return None
            self._sessions.pop(strangers[0]).close()
        self._next_session += 1
        self._sessions[self._next_session] = session
        return self._next_session

    def dismiss(self, number: int, sure: bool) -> None:
        if self._sessions.pop(number, None) is not None:
            self.take(machine.Ended(number, sure))

    def take(self, event: machine.Event) -> None:
        """Decide, and carry it out. Writing stops this thread, and may: it happens only while nobody holds the lock,
        so no holder waits for its pings to be answered."""
        if self._failed.done():
            return
        self.state, effects = machine.step(self.state, event, self._loop.time())
        try:
            for effect in effects:
                self._do(effect)
        except OSError as error:
            reason = f"the lock server cannot write {self._record.path}: {error}; make room, or choose another file"
            self._failed.set_exception(UserError(reason))
        self._arm()

    def owner(self) -> m.Owner:
        grant, waiting = self.state.grant, len(self.state.waiters)
        if grant is None:
            unknown = self.state.situation is machine.Situation.UNKNOWN
            return m.Owner("somebody unknown, until the window ends" if unknown else "", waiting=waiting)
        client = grant.client
        return m.Owner(client.who, client.pid, client.start_ticks, grant.since_unix_s, waiting)

    # -- effects

    def _do(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Save(record):
                self._record.save(record)
            case machine.GrantTo(connection, grant, back, waited_s):
                how = "is back with" if back else "has"
                _log.info("%s %s the lock, grant %d, after %.3f s", grant.client.who, how, grant.number, waited_s)
                self._send(connection, m.Granted(grant.number))
            case machine.Freed(grant, why, held_s):
                _log.info("grant %d of %s is over after %.3f s: %s", grant.number, grant.client.who, held_s, why)
            case machine.Missing(grant, until_s):
                left_s = until_s - self._loop.time()
                _log.warning("lost sight of %s, grant %d; waiting %.1f s", grant.client.who, grant.number, left_s)
            case machine.ConfirmRelease(connection):
                self._send(connection, m.Released())
            case machine.Refuse(connection, code, reason):
                if (session := self._sessions.get(connection)) is not None:
                    session.refuse(code, reason)
            case machine.Drop(connection):
                if (old := self._sessions.pop(connection, None)) is not None:
                    old.close()

    def _send(self, connection: int, message: m.ToClient) -> None:
        if (session := self._sessions.get(connection)) is not None:
            session.send(message)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = machine.next_deadline_s(self.state)
        self._timer = None if due_s is None else self._loop.call_at(due_s, self.take, machine.Tick())


class Session(asyncio.Protocol):
    """One client's connection, from accept to close: speaks the lock server's messages with it."""

    def __init__(self, server: LockServer) -> None:
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
        elif self._is_unix() and (uid := peer_uid(transport.get_extra_info("socket"))) not in (os.geteuid(), 0):
            # Root could take the lock by other means anyway.
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
            self._transport.write(encode(message))

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
        elif not self._is_unix() and not _equal(hello.token, self._server.token):
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
