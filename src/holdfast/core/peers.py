"""Which user is at the other end of a local connection, by the kernel's word.

Always true: who cannot be told is nobody (None), never this process's own user.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

from holdfast.core.procfs import read_text

_CREDENTIALS = struct.Struct("3i")


def peer_uid(sock: socket.socket) -> int | None:
    """Of a Unix socket: who connected, or (for who connected) who listens. Of a TCP connection within this machine:
    the owner of its other end. None: another machine's, or another network namespace's."""
    if sock.family == socket.AF_UNIX:
        return int(_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])
    try:
        ours, theirs = sock.getsockname()[:2], sock.getpeername()[:2]
    except OSError:
        return None
    return _tcp_uid(theirs, ours, 6 if sock.family == socket.AF_INET6 else 4)


def _tcp_uid(local: tuple[str, int], remote: tuple[str, int], version: int) -> int | None:
    """The kernel lists every TCP socket of this namespace with its owner: the other end is the one whose remote is us.
    An IPv4 client of a socket that serves both families is listed among the IPv4 ones."""
    for name in ("tcp6", "tcp") if version == 6 else ("tcp",):
        wanted = _written(local, name), _written(remote, name)
        if None in wanted:
            continue
        for line in (read_text(f"/proc/net/{name}") or "").splitlines()[1:]:
            fields = line.split()
            if (fields[1], fields[2]) == wanted:
                # One that its process has closed is nobody's, and is listed as root's, with no inode.
                return int(fields[7]) if fields[9] != "0" else None
    return None


def _written(address: tuple[str, int], name: str) -> str | None:
    """An address as that list writes it: 32-bit words in the machine's order; None: it has none there."""
    host: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address[0].partition("%")[0])
    if name == "tcp" and isinstance(host, ipaddress.IPv6Address):
        if host.ipv4_mapped is None:
            return None
        host = host.ipv4_mapped
    words = struct.unpack(f"={len(host.packed) // 4}I", host.packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
