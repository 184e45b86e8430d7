"""How long a client may take: judged by whether it goes on, never by how slow it is. Real sockets, short bounds."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.core.address import TcpAddress
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.server import HttpPatience, HttpServer
from holdfast.wire.net import SocketNetwork

WAIT_S = 20.0
PATIENCE_S = 1.0
BODY = b"0123456789abcdef" * (512 * 1024)  # 8 MiB: more than the kernel's buffers hold


class Server:
    """Answers every request at once, with the whole body or the length of what came."""

    port = 0

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        connection.respond(200, b"%d" % len(request.body) if request.body else BODY, b"text/plain")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Served by a loop in a thread of its own."""
    server = Server()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> HttpServer:
        patience = HttpPatience(request_s=PATIENCE_S, idle_s=PATIENCE_S, unread_s=PATIENCE_S)
        made = HttpServer(server.handle, SocketNetwork(), patience=patience)
        address = await made.start(TcpAddress("127.0.0.1", 0))
        assert isinstance(address, TcpAddress)
        server.port = address.port
        return made

    made = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    yield server.port
    loop.call_soon_threadsafe(made.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)


def connect(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", port))
    return sock


class Pace:
    """Does a thing in steps that take far longer together than the server's patience, each of them far shorter; and
    knows the longest pause it really made, which a busy machine may stretch."""

    def __init__(self, steps: int) -> None:
        self.step_s = 4 * PATIENCE_S / steps
        self.longest_s = 0.0
        self._last_s = time.monotonic()

    def step(self) -> None:
        time.sleep(self.step_s)
        now_s = time.monotonic()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s

    @property
    def was_steady(self) -> bool:
        return self.longest_s < PATIENCE_S / 2


def test_a_slow_but_steady_reader_gets_all_of_its_answer(port: int) -> None:
    """It takes four times as long as a client may take nothing at all."""
    pace = Pace(100)
    received = 0
    with connect(port) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        try:
            while data := sock.recv(len(BODY) // 100):
                received += len(data)
                if received * 100 < len(BODY) * 98:
                    pace.step()
        except ConnectionError:
            assert not pace.was_steady
            pytest.skip("the machine was too busy to read steadily")
    assert received > len(BODY)


def test_a_slow_but_steady_sender_is_answered(port: int) -> None:
    """A body may take longer than a request is given, as long as it comes at a modem's pace."""
    pace = Pace(40)
    with connect(port) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 400000\r\n\r\n")
        for _ in range(40):
            sock.sendall(b"x" * 10_000)
            pace.step()
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    assert answer.endswith(b"400000")


def test_a_client_that_reads_nothing_is_dropped(port: int) -> None:
    """Once its time has passed, and not before."""
    with connect(port) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        began_s = time.monotonic()
        while is_open(sock):
            assert time.monotonic() - began_s < WAIT_S
        assert time.monotonic() - began_s > PATIENCE_S


def is_open(sock: socket.socket) -> bool:
    """Who is sent something on a connection that it has closed answers with a reset."""
    try:
        sock.sendall(b"x")
        time.sleep(0.02)
    except ConnectionError:
        return False
    return True
