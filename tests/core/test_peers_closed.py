"""Who is at the other end of a connection that its client has closed already."""

from __future__ import annotations

import socket

from holdfast.core.procfs import peer_uid


def test_who_asks_and_closes_at_once_is_nobody() -> None:
    """The kernel lists a closed socket as root's: whoever sent a request and left would be root."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = socket.socket()
        client.connect(listener.getsockname())
        client.sendall(b"POST /engine/sleep")
        server, _ = listener.accept()
        with server:
            assert peer_uid(server) is not None
            client.close()
            assert server.recv(99)
            assert server.recv(99) == b""
            assert peer_uid(server) is None
