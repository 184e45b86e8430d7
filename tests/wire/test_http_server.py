"""The HTTP server over real sockets: how long a client may take, what of a stream reaches it, and which answer is last.

A client is judged by whether it goes on, never by how slow it is. Whatever pieces of a body are written, an independent
client gets them all, and only its end ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.address import TcpAddress
from holdfast.wire.http.connection import Handler, HttpConnection
from holdfast.wire.http.request import HttpBounds, HttpRequest
from holdfast.wire.http.server import HttpServer, arrival_bound_s
from holdfast.wire.net import SocketNetwork

WAIT_S = 60.0
PATIENCE_S = 1.0
BODY = b"0123456789abcdef" * (512 * 1024)  # 8 MiB: more than the kernel's buffers hold


@contextlib.contextmanager
def served(handler: Handler, bounds: HttpBounds) -> Iterator[int]:
    """A server's port, served by a loop in a thread of its own, so that a blocking client can read; nothing may be left
    to that loop's handler of lost exceptions."""
    loop, lost = asyncio.new_event_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: lost.append(context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[HttpServer, int]:
        made = HttpServer(handler, SocketNetwork(), bounds)
        address = await made.start(TcpAddress("127.0.0.1", 0))
        assert isinstance(address, TcpAddress)
        return made, address.port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    yield port
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
    assert lost == []


def connect(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", port))
    return sock


@pytest.mark.parametrize(
    "after",
    [
        b"GET /second HTTP/1.1\r\nhost: x\r\n\r\n" * 3,
        b"POST /second HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n",
    ],
)
def test_nobody_is_asked_to_answer_after_the_last_answer(after: bytes) -> None:
    """The server closes (it drains, say): one answer and the end, and no write after it; what came in one piece with
    its request is left alone."""
    asked: list[str] = []

    def handle(connection: HttpConnection, request: HttpRequest) -> None:
        asked.append(request.path)
        connection.closing = True
        connection.respond(200, b"{}")

    with served(handle, HttpBounds()) as port, connect(port) as sock:
        sock.sendall(b"GET /first HTTP/1.1\r\nhost: x\r\n\r\n" + after)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert asked == ["/first"]
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n{}")
    assert answer.count(b"HTTP/1.1") == 1


# -- patience


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of one that answers every request at once, with the whole body or the length of what came."""

    def handle(connection: HttpConnection, request: HttpRequest) -> None:
        connection.respond(200, b"%d" % len(request.body) if request.body else BODY, b"text/plain")

    with served(handle, HttpBounds(request_s=PATIENCE_S, idle_s=PATIENCE_S, unread_s=PATIENCE_S)) as port:
        yield port


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


def test_a_request_has_a_bound_on_its_time_however_large_it_is() -> None:
    """More than `request_s` while it keeps up a modem's pace, and ten times that at most."""
    bounds = HttpBounds()
    assert arrival_bound_s(bounds, 0) == bounds.request_s
    assert bounds.request_s < arrival_bound_s(bounds, 100_000) < 10 * bounds.request_s
    assert arrival_bound_s(bounds, bounds.body_bytes_max) == 10 * bounds.request_s


@pytest.mark.long
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
    if not answer.startswith(b"HTTP/1.1 200 ") and not pace.was_steady:
        pytest.skip("the machine was too busy to send steadily")
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    assert answer.endswith(b"400000")


def test_a_client_that_reads_nothing_is_dropped(port: int) -> None:
    """Once its time has passed, and not before."""
    with connect(port) as sock:
        began_s = time.monotonic()
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
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


# -- streams


@dataclass
class Streamer:
    """Answers every request with the pieces it was given last."""

    port: int = 0
    pieces: list[bytes] = field(default_factory=list)
    first: bytes = b""
    last: bytes = b""
    breaks: bool = False  # answers again in the middle of its stream

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        connection.start_stream(b"text/plain", (), self.first)
        for piece in self.pieces:
            connection.write(piece)
        if self.breaks:
            connection.respond(500, b"a bug while answering")
        else:
            connection.end_stream(self.last)

    def whole(self) -> bytes:
        return self.first + b"".join(self.pieces) + self.last


@pytest.fixture(scope="module")
def streamer() -> Iterator[Streamer]:
    made = Streamer()
    with served(made.handle, HttpBounds()) as made.port:
        yield made


def ask(client: http.client.HTTPConnection) -> bytes:
    client.request("POST", "/", b"{}")
    response = client.getresponse()
    assert response.status == 200
    return response.read()


pieces = st.binary(max_size=40) | st.just(b"") | st.just(b"0\r\n\r\n")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(pieces, st.lists(pieces, max_size=8), pieces), min_size=1, max_size=3), st.booleans())
def test_any_pieces_arrive_whole_and_leave_the_connection_clean(
    streamer: Streamer, answers: list[tuple[bytes, list[bytes], bytes]], http10: bool
) -> None:
    """Empty pieces, first, last or between, are no end; the next answer on the same connection is the next answer."""
    client = http.client.HTTPConnection("127.0.0.1", streamer.port, timeout=WAIT_S)
    if http10:
        client._http_vsn, client._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    try:
        for streamer.first, streamer.pieces, streamer.last in answers:
            assert ask(client) == streamer.whole()
    finally:
        client.close()


def test_an_answer_inside_a_stream_breaks_it_rather_than_end_it(streamer: Streamer) -> None:
    """The client must see that something is missing: neither a whole body nor another answer's bytes in it."""
    streamer.first, streamer.pieces, streamer.last, streamer.breaks = b"", [b"some"], b"", True
    client = http.client.HTTPConnection("127.0.0.1", streamer.port, timeout=WAIT_S)
    try:
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(client)
    finally:
        streamer.breaks = False
        client.close()
