"""Whose process is at the other end of a Unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_uid(transport: asyncio.BaseTransport) -> int:
    sock = transport.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def may_connect(uid: int) -> bool:
    """The server's own user, and root, who could take the lock by other means anyway."""
    return uid in (os.geteuid(), 0)
