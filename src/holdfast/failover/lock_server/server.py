"""Runs the lock server: sockets and the record on disk around its state machine.

Always true: a grant's record is on disk before the grant is sent; nothing a client sends or fails to read ends the
process or grows it without bound; a silent holder keeps the lock as long as its connection is open. Closing the server
keeps the record: for the holder it is like any other restart.

Always true of a session: it answers nothing before a valid Hello. It reports its end to the server exactly once, with
whether the client ended it: by an end of file, or on a Unix socket by any connection error, since there is no network
to break. A connection that the server refused or closed proves nothing about the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import logging
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.core.address import Address, TcpAddress, UnixAddress
from holdfast.core.errors import UserError
from holdfast.core.ports import Listener, Network, World
from holdfast.core.procfs import peer_uid
from holdfast.failover.lock_server import machine
from holdfast.failover.lock_server import messages as m
from holdfast.failover.lock_server.machine import ElectionRecord
from holdfast.wire.accepting import SHARE, connections_max
from holdfast.wire.connection import FULL, MALFORMED, NO_HELLO, WRONG_VERSION, ServerConnection, turn_out_strangers

FORMAT = "holdfast-lock-1"
# A record has some hundred bytes.
FILE_BYTES_MAX = 64 * 1024
RESERVED_BYTES = 4096  # a record has about three hundred


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    record: ElectionRecord


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """What was on disk. `trouble` says why it cannot be read; no record and no trouble: there was no file."""

    record: ElectionRecord | None = None
    trouble: str = ""


class LockRecord:
    """The record file at `path`; `open` it before use. A second server cannot open it.

    Always true: it holds one complete record, never a mixture (written beside, synced, renamed, the folder synced); a
    damaged, truncated or edited file reads as unreadable, never as another record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._guard: int | None = None

    def open(self) -> None:
        """Lock the file against other servers, which would grant the same lock; raise UserError if one uses it
        already."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        guard = os.open(f"{self.path}.guard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(guard)
            raise UserError(f"another lock server uses {self.path}: stop it, or give this one its own file") from error
        self._guard = guard
        for path in (self._beside,) if self.path.exists() else (self._beside, self._old):
            self._reserve(path)

    def _reserve(self, path: Path) -> None:
        """Reserve disk space for the next save, so that a full disk does not prevent an election. Later saves use the
        space of the record that was replaced before."""
        with contextlib.suppress(OSError), open(path, "r+b", opener=_made) as file:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)

    @property
    def _beside(self) -> Path:
        return self.path.with_name(self.path.name + ".new")

    @property
    def _old(self) -> Path:
        return self.path.with_name(self.path.name + ".old")

    def close(self) -> None:
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None

    def load(self) -> FoundRecord:
        try:
            with open(self.path, "rb") as file:
                return _read(file.read(FILE_BYTES_MAX))
        except FileNotFoundError:
            return FoundRecord()
        except OSError as error:
            return FoundRecord(trouble=str(error))

    def save(self, record: ElectionRecord) -> None:
        """Return once `record` would survive a power cut; raise OSError otherwise."""
        body = msgspec.json.encode(_Content(FORMAT, record))
        with open(self._beside, "r+b", opener=_made) as file:  # not truncated first: its space is reserved
            file.write(body + b"\n" + _sum(body) + b"\n")
            file.truncate()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            os.link(self.path, self._old)
        os.replace(self._beside, self.path)
        with contextlib.suppress(OSError):
            os.replace(self._old, self._beside)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _read(text: bytes) -> FoundRecord:
    body, _, tail = text.partition(b"\n")
    if tail != _sum(body) + b"\n":
        return FoundRecord(trouble="it is torn, or was not written by a lock server")
    try:
        content = msgspec.json.decode(body, type=_Content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return FoundRecord(trouble=str(error))
    if content.format != FORMAT:
        return FoundRecord(trouble=f"its format is {content.format!r}, not {FORMAT!r}")
    return FoundRecord(content.record)


def _sum(body: bytes) -> bytes:
    return f"{zlib.crc32(body):08x}".encode()


def _made(path: str, flags: int) -> int:
    # Private: with the holder's id, another client could return in the holder's place.
    return os.open(path, flags | os.O_CREAT, 0o600)


_log = logging.getLogger(__name__)

# Four times the waiters; fewer where the descriptor limit is low, since a grant writes a file. When full, connections
# without a Hello are closed, so that the holder can always return.
CONNECTIONS_MAX = 1024
# A client sends Hello at once; a port scanner does not.
HELLO_TIMEOUT_S = 2.0
# Unsent answers to a client that does not read; above this, the server stops reading from it.
UNSENT_BYTES_MAX = 64 * 1024


class LockServer:
    """A server of one lock. Call `start`, then `run` until cancelled."""

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
        self._sessions: dict[int, LockSession] = {}
        self._next_session = 0
        self._listener: Listener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self.state = machine.LockState(window_s, 0.0)

    def __repr__(self) -> str:
        return f"lock server {self.address}: {self.state!r}"

    async def start(self) -> Address:
        """Read the record, then listen; return the bound address. The window begins here: the previous server is dead
        by now."""
        self._record.open()
        found = self._record.load()
        self.state = machine.begin(found.record, not found.trouble, self.window_s, self._loop.time(), self._unix_s())
        if found.trouble:
            _log.error("cannot read %s: %s; the holder of the lock is unknown", self._record.path, found.trouble)
        self._listener = await self._network.listen(self.address, lambda: LockSession(self))
        self.address = self._listener.address
        self._arm()
        _log.info("%r", self)
        return self.address

    async def run(self) -> None:
        """Serve until cancelled; raise UserError when the record cannot be written, since no grant is possible then."""
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

    def admit(self, session: LockSession) -> int | None:
        """Return a new connection's number, or None if there are too many. Connections without a Hello make room."""
        full = len(self._sessions) >= min(CONNECTIONS_MAX, connections_max(SHARE))
        if full and not turn_out_strangers(self._sessions.values()):
            return None
        self._next_session += 1
        self._sessions[self._next_session] = session
        return self._next_session

    def dismiss(self, number: int, sure: bool) -> None:
        if self._sessions.pop(number, None) is not None:
            self.handle(machine.ClientEnded(number, sure))

    def handle(self, event: machine.Event) -> None:
        """Handle an event and carry out its effects. Writing the record blocks this thread, which is harmless: it
        happens only while the lock is not held, so no holder waits for an answer to its pings."""
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
            return m.Owner("an unknown engine, until the window ends" if unknown else "", waiting=waiting)
        client = grant.client
        return m.Owner(client.engine, client.pid, client.start_ticks, grant.since_unix_s, waiting)

    # -- effects

    def _do(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Save(record):
                self._record.save(record)
            case machine.GrantTo(connection, grant, back, waited_s):
                how = "is back with" if back else "has"
                _log.info("%s %s the lock, grant %d, after %.3f s", grant.client.engine, how, grant.number, waited_s)
                self._send(connection, m.Granted(grant.number))
            case machine.GrantFreed(grant, why, held_s):
                _log.info("grant %d of %s is over after %.3f s: %s", grant.number, grant.client.engine, held_s, why)
            case machine.Missing(grant, until_s):
                left_s = until_s - self._loop.time()
                _log.warning("lost sight of %s, grant %d; waiting %.1f s", grant.client.engine, grant.number, left_s)
            case machine.ConfirmRelease(connection):
                self._send(connection, m.Released())
            case machine.Refuse(connection, code, reason):
                if (session := self._sessions.get(connection)) is not None:
                    session.refuse(code, reason)
            case machine.DropClient(connection):
                if (old := self._sessions.pop(connection, None)) is not None:
                    old.close()

    def _send(self, connection: int, message: m.ToClient) -> None:
        if (session := self._sessions.get(connection)) is not None:
            session.send(message)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = machine.next_deadline_s(self.state)
        self._timer = None if due_s is None else self._loop.call_at(due_s, self.handle, machine.Tick())


class LockSession(ServerConnection):
    """A client's connection, from accept to close."""

    def __init__(self, server: LockServer) -> None:
        super().__init__(
            m.decode_to_server,
            hello_timeout_s=HELLO_TIMEOUT_S,
            unsent_bytes_max=UNSENT_BYTES_MAX,
            message_bytes_max=m.MESSAGE_BYTES_MAX,
        )
        self._server = server
        self._number: int | None = None
        self._client: machine.Client | None = None
        self._ended_by_client = False

    @property
    def greeted(self) -> bool:
        return self._client is not None

    def peer_name(self) -> str:
        return self._client.engine if self._client else "a connection"

    def eof_received(self) -> bool:
        self._ended_by_client = True
        return False

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def on_connected(self) -> None:
        self._number = self._server.admit(self)
        if self._number is None:
            self.refuse(FULL, "this lock server has all the connections it can bear")
        elif self._is_unix() and (uid := peer_uid(self.transport.get_extra_info("socket"))) not in (os.geteuid(), 0):
            # Root is allowed: it could take the lock by other means anyway.
            self.refuse(m.WRONG_USER, f"the client runs as user {uid}, and the lock is another's")

    def on_left(self, exc: Exception | None, *, refused: bool) -> None:
        """Report the end to the server. If the server refused the connection, it proves nothing about the client."""
        if self._number is not None:
            by_client = self._ended_by_client or (self._is_unix() and isinstance(exc, ConnectionError))
            self._server.dismiss(self._number, sure=by_client and not refused)

    def on_message(self, message: m.ToServer) -> None:
        assert self._number is not None
        if isinstance(message, m.Hello):
            self._greet(message)
            return
        if self._client is None:
            self.refuse(NO_HELLO, "the first message must be Hello")
            return
        match message:
            case m.AskLock(grant):
                self._server.handle(machine.Acquire(self._number, self._client, grant))
            case m.GiveBack():
                self._server.handle(machine.Release(self._number))
            case m.Ping(number):
                self.send(m.Pong(number, self._server.state.holds(self._number)))
            case m.AskOwner():
                self.send(self._server.owner())

    def _greet(self, hello: m.Hello) -> None:
        version = m.VERSIONS.agree(hello)
        if version is None:
            self.refuse(WRONG_VERSION, m.VERSIONS.refusal(hello, "this server"))
        elif not self._is_unix() and not _equal(hello.token, self._server.token):
            self.refuse(m.WRONG_TOKEN, "the token is wrong" if hello.token else "a token is needed on TCP")
        elif self.greeted or not hello.id:
            self.refuse(MALFORMED, "Hello was said already" if self.greeted else "Hello without an id")
        else:
            self._client = machine.Client(hello.id, hello.engine, hello.pid, hello.start_ticks)
            self.welcome(m.Welcome(version, self._server.window_s, m.VERSIONS.common_features(hello)))

    def _is_unix(self) -> bool:
        return isinstance(self._server.address, UnixAddress)


def _equal(one: str, other: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(one.encode(errors="surrogatepass"), other.encode(errors="surrogatepass"))


# Two thirds of a shorter window are too short for two pings and a late scheduler.
WINDOW_S_MIN = 0.2


async def serve_lock(
    address: Address,
    state_path: Path,
    *,
    window_s: float,
    token: str,
    world: World,
    on_ready: Callable[[Address], None] | None = None,
) -> None:
    """Serve one lock until cancelled. Call `on_ready` with the bound address once clients can connect. A cancelled
    server leaves its record: the holder may return to the next one within `window_s`."""
    if not window_s >= WINDOW_S_MIN:
        raise UserError(f"a lock server's window must be {WINDOW_S_MIN:g} s or more, not {window_s:g} s")
    if isinstance(address, TcpAddress) and not token:
        raise UserError(f"a lock server on {address} needs a token: any client that can connect could take the lock")
    record, unix_s = LockRecord(state_path), world.clock.unix_s
    server = LockServer(address, world.network, record, window_s=window_s, token=token, unix_s=unix_s)
    try:
        bound = await server.start()
    except OSError as error:
        server.close()
        raise UserError(f"the lock server cannot serve {address} with {state_path}: {error}") from error
    except BaseException:
        server.close()
        raise
    if on_ready is not None:
        on_ready(bound)
    await server.run()
