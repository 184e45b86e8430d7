"""The last answer on a connection is the last: what came in one piece with its request is left alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.core.address import TcpAddress
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.server import HttpServer
from holdfast.wire.net import SocketNetwork

WAIT_S = 20.0
FIRST = b"GET /first HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "after",
    [
        b"GET /second HTTP/1.1\r\nhost: x\r\n\r\n" * 3,
        b"POST /second HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n",
    ],
)
async def test_nobody_is_asked_to_answer_after_the_last_answer(after: bytes) -> None:
    """The server closes (it drains, say): one answer and the end, and no write after it."""
    asked: list[str] = []
    broken: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))

    def handle(connection: HttpConnection, request: HttpRequest) -> None:
        asked.append(request.path)
        connection.closing = True
        connection.respond(200, b"{}")

    server = HttpServer(handle, SocketNetwork())
    address = await server.start(TcpAddress("127.0.0.1", 0))
    assert isinstance(address, TcpAddress)
    reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
    try:
        writer.write(FIRST + after)
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
    finally:
        writer.close()
        server.close()
    assert (asked, broken) == (["/first"], [])
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n{}")
    assert answer.count(b"HTTP/1.1") == 1
