"""Let the kernel notice a peer whose machine is gone.

A stopped process's kernel still answers keepalive probes, a vanished host does not: so a connection that is a lease
ends with its host, and never because a process was frozen.
"""

from __future__ import annotations

import asyncio
import socket

# Probes after 5 s of silence, every 5 s, three of them: a dead host is known in 20 s.
IDLE_S = 5
INTERVAL_S = 5
PROBES = 3
USER_TIMEOUT_MS = (IDLE_S + INTERVAL_S * PROBES) * 1000


def set_keepalive(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    # Unacknowledged data is given up as soon as unanswered probes would be.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
