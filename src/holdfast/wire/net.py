"""The real network: asyncio sockets behind the `core.ports.Network` port.

Every TCP connection of ours is tuned, whoever opened it: small writes leave at once (facts 11), and a peer whose
machine is gone is noticed in 20 s. A stopped process's kernel still answers the probes, a vanished host does not: so a
connection ends with its host, and not because a process was frozen.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import termios
from collections.abc import Callable

from holdfast.core.address import Address, TcpAddress, UnixAddress
from holdfast.core.ports import Listener, ProtocolFactory
from holdfast.wire.accepting import SocketListener

# The state of a connection that the other side has reset, first byte of TCP_INFO.
_TCP_CLOSE = 7
# A burst of connects during a restart waits here instead of being refused.
BACKLOG = 1024

# Probes after 5 s of silence, every 5 s, three of them.
IDLE_S = 5
INTERVAL_S = 5
PROBES = 3
# What is sent and not acknowledged is given up as soon as unanswered probes would be: there are no probes meanwhile.
USER_TIMEOUT_MS = (IDLE_S + INTERVAL_S * PROBES) * 1000

# Below this nobody is looked at: the memory does not matter, and whether the peer lives is for others to judge. A peer
# that takes nothing of what waits above it for so long is never going to.
UNSENT_BYTES_MAX = 32 * 1024 * 1024
UNSENT_S = 5.0
LOOKS = 10  # in that time


class CannotListenError(OSError):
    """An address that cannot be listened on (`filename`); the kernel's number and words for why."""


class SocketNetwork:
    """Sockets of this machine."""

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
        try:
            return await self._listen(address, factory, share_port)
        except OSError as error:
            raise CannotListenError(error.errno, error.strerror or str(error), str(address)) from error

    async def _listen(self, address: Address, factory: ProtocolFactory, share_port: bool) -> Listener:
        if isinstance(address, UnixAddress):
            return SocketListener(address, [_unix_socket(address.path)], factory)
        sockets = await _tcp_sockets(address, share_port)
        port = sockets[0].getsockname()[1]
        return SocketListener(TcpAddress(address.host, port), sockets, factory)


def is_free(address: TcpAddress) -> bool:
    """Whether nobody listens there; what else speaks against listening is told when somebody does."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _unix_socket(path: str) -> socket.socket:
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
    """One for each address that the host has. `::` is everyone, IPv4 too."""
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
    """Make a connection ours; on a Unix socket there is nothing to do. A peer that `may_pause` its reading (a person's
    client) is not given up for it: the kernel counts what a full window holds back as not acknowledged."""
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
    """For libraries that open their own connections."""
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    tune_socket(sock)
    return sock


class Outgoing:
    """What was written to a transport, and whether the other side takes it. `written` is counted by whoever writes."""

    __slots__ = ("_since_s", "_taken", "written")

    def __init__(self) -> None:
        self.written = 0
        self._taken = -1
        self._since_s = 0.0

    def stalled_s(self, transport: asyncio.Transport, now_s: float) -> float:
        """For how long, by the looks taken here, nothing was taken of what waits; 0 where nothing waits."""
        waiting = transport.get_write_buffer_size()
        if not waiting:
            return 0.0
        taken = self.written - waiting - _kernel_bytes(transport)
        if taken != self._taken:
            self._taken, self._since_s = taken, now_s
        return now_s - self._since_s


class Unread:
    """Writes to one connection; `gives_up` is called with the reason, once, if its peer takes nothing for too long. How
    much is sent at once is no reason: a burst may be large, and a peer on a slow or busy machine may be far behind and
    catch up. One that takes nothing at all is stopped or gone."""

    def __init__(self, gives_up: Callable[[str], None]) -> None:
        self._gives_up = gives_up
        self._loop = asyncio.get_running_loop()
        self._outgoing = Outgoing()
        self._looking = False

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send, and look after it while much is unsent."""
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


def _kernel_bytes(transport: asyncio.BaseTransport) -> int:
    """What the kernel holds that the other side has not acknowledged. A slow reader shows here first: the kernel takes
    more from us only in large steps."""
    return _queue_bytes(transport, termios.TIOCOUTQ)


def has_unread(transport: asyncio.BaseTransport) -> bool:
    """Whether the other side has said something that nobody here has read yet."""
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
    """Whether the other side has ended a connection that nobody reads from, and so nobody hears of its end."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)


def _remove_dead_socket(path: str) -> None:
    """A socket file nobody listens on is left over from a crash; one with a listener is another server's."""
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
