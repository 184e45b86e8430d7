"""Implements the `core.ports.Network` port with asyncio sockets.

Every TCP connection is tuned on both sides: small writes leave at once (facts 11), and a vanished host is detected in
20 s. The kernel of a frozen process still answers keepalive probes, so a connection to it stays open.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import random
import socket
import termios
from collections.abc import Callable, Iterator

from holdfast.core.address import Address, TcpAddress, UnixAddress
from holdfast.core.ports import Listener, ProtocolFactory, SystemClock, World
from holdfast.wire.accepting import SocketListener

# State of a connection that the peer has reset: first byte of TCP_INFO.
_TCP_CLOSE = 7
# Large enough that a burst of connects during a restart waits instead of being refused.
BACKLOG = 1024

# TCP keepalive: three probes, every 5 s, after 5 s of silence.
IDLE_S = 5
INTERVAL_S = 5
PROBES = 3
# Unacknowledged data ends a connection after the same time: the kernel sends no probes meanwhile.
USER_TIMEOUT_MS = (IDLE_S + INTERVAL_S * PROBES) * 1000

# With fewer unsent bytes a peer is not watched: the memory does not matter, and health checks judge the peer. With
# more, a peer that reads nothing for `UNSENT_S` is given up.
UNSENT_BYTES_MAX = 32 * 1024 * 1024
UNSENT_S = 5.0
LOOKS = 10  # checks in that time


class CannotListenError(OSError):
    """The address in `filename` cannot be listened on; it carries the kernel's error number and text."""


@contextlib.contextmanager
def naming(address: Address) -> Iterator[None]:
    """Raise CannotListenError for an OSError."""
    try:
        yield
    except OSError as error:
        raise CannotListenError(error.errno, error.strerror or str(error), str(address)) from error


class SocketNetwork:
    """The network of this machine."""

    async def connect(self, address: Address, factory: ProtocolFactory, timeout_s: float) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            if isinstance(address, UnixAddress):
                transport, _ = await loop.create_unix_connection(factory, address.path)
            else:
                transport, _ = await loop.create_connection(factory, address.host, address.port)
                tune(transport)
        return transport

    async def listen(self, address: Address, factory: ProtocolFactory, *, share_port: bool = False) -> Listener:
        with naming(address):
            if isinstance(address, UnixAddress):
                return SocketListener(address, [unix_socket(address.path)], factory)
            sockets = await _tcp_sockets(address, share_port)
            port = sockets[0].getsockname()[1]
            return SocketListener(TcpAddress(address.host, port), sockets, factory)


def is_free(address: TcpAddress) -> bool:
    """Return False if the address is in use. Other errors are left to the later `listen`."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def unix_socket(path: str) -> socket.socket:
    """Return a listening socket that this user's processes alone may connect to."""
    _remove_dead_socket(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


async def _tcp_sockets(address: TcpAddress, share_port: bool) -> list[socket.socket]:
    """Return a listening socket for each of the host's addresses. `::` includes IPv4."""
    found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    dual = address.host == "::" and socket.has_dualstack_ipv6()
    sockets: list[socket.socket] = []
    try:
        for family, where in dict.fromkeys((family, where[:2]) for family, _, _, _, where in found):
            host, port = where[0], sockets[0].getsockname()[1] if sockets else address.port
            sock = socket.create_server(
                (host, port), family=family, backlog=BACKLOG, reuse_port=share_port, dualstack_ipv6=dual
            )
            sockets.append(sock)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def tune(transport: asyncio.BaseTransport, *, may_pause: bool = False) -> None:
    """Set the options of a TCP connection; do nothing for a Unix socket. `may_pause`: the peer may stop reading for a
    while (a user's client), so TCP_USER_TIMEOUT is not set: the kernel applies it to a full window, too."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        tune_socket(sock, may_pause=may_pause)


def tune_socket(sock: socket.socket, *, may_pause: bool = False) -> None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    if not may_pause:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def tuned_socket(family: int, kind: int, protocol: int) -> socket.socket:
    """Return a tuned socket, for libraries that open their own connections."""
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    tune_socket(sock)
    return sock


class Outgoing:
    """Measures whether the peer reads what is written to a transport. The writer adds to `written`."""

    __slots__ = ("_since_s", "_taken", "written")

    def __init__(self) -> None:
        self.written = 0
        self._taken = -1
        self._since_s = 0.0

    def stalled_s(self, transport: asyncio.Transport, now_s: float) -> float:
        """Return for how long, as seen by successive calls, the peer has taken nothing; 0 if nothing is unsent."""
        waiting = transport.get_write_buffer_size()
        if not waiting:
            return 0.0
        # Include the kernel's unacknowledged bytes: a slow reader's progress shows there first, because the transport's
        # buffer shrinks only in large steps.
        taken = self.written - waiting - _queue_bytes(transport, termios.TIOCOUTQ)
        if taken != self._taken:
            self._taken, self._since_s = taken, now_s
        return now_s - self._since_s


class WatchedWriter:
    """The writer of one connection. It calls `gives_up` once, with the reason, if the peer reads nothing for too long.
    The amount of unsent data alone is no reason: a burst may be large, and a slow peer may catch up. A peer that reads
    nothing is stopped or gone."""

    def __init__(self, gives_up: Callable[[str], None]) -> None:
        self._gives_up = gives_up
        self._loop = asyncio.get_running_loop()
        self._outgoing = Outgoing()
        self._looking = False

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send; watch the peer while more than `UNSENT_BYTES_MAX` is unsent."""
        self._outgoing.written += len(data)
        transport.write(data)
        if not self._looking and transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._looking = True
            self._look(transport)

    def _look(self, transport: asyncio.Transport) -> None:
        if transport.is_closing() or transport.get_write_buffer_size() <= UNSENT_BYTES_MAX:
            self._looking = False
        elif self._outgoing.stalled_s(transport, self._loop.time()) >= UNSENT_S:
            self._gives_up(f"took nothing for {UNSENT_S:g} s of what was sent to it")
        else:
            self._loop.call_later(UNSENT_S / LOOKS, self._look, transport)


def has_unread(transport: asyncio.BaseTransport) -> bool:
    """Return True if the kernel holds received bytes that were not read yet."""
    return _queue_bytes(transport, termios.FIONREAD) > 0


def _queue_bytes(transport: asyncio.BaseTransport, queue: int) -> int:
    sock = transport.get_extra_info("socket")
    if sock is None:
        return 0
    size = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock.fileno(), queue, size)
    return size[0]


def is_reset(transport: asyncio.BaseTransport) -> bool:
    """Return True if the peer has reset the connection. For connections that are not read, where nothing else shows
    it."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)


def _remove_dead_socket(path: str) -> None:
    """Remove a socket file without a listener, left over from a crash; raise OSError if another server listens on
    it."""
    if not os.path.exists(path):
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)
        probe.connect(path)
    except OSError:
        os.unlink(path)
        return
    finally:
        probe.close()
    raise OSError(98, f"{path} is in use by another process")


def real_world(rng: random.Random | None = None) -> World:
    """Return real sockets, system clocks, and `rng` or else a generator seeded by the system."""
    return World(SocketNetwork(), SystemClock(), rng or random.Random())
