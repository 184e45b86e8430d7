"""A streamed body as an independent client reads it: whatever pieces are written, it gets them all, and only its end
ends it."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.address import TcpAddress
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.server import HttpServer
from holdfast.wire.net import SocketNetwork

WAIT_S = 20.0


@dataclass
class Streamer:
    """A server that answers every request with the pieces it was given last."""

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
    """Served by a loop in a thread of its own, so that a blocking client can read."""
    made = Streamer()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> HttpServer:
        server = HttpServer(made.handle, SocketNetwork())
        address = await server.start(TcpAddress("127.0.0.1", 0))
        assert isinstance(address, TcpAddress)
        made.port = address.port
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    yield made
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)


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
