"""An HTTP server that leaves, over real sockets: whoever was told that it may ask again may, and nobody is reset."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from holdfast.core.address import TcpAddress
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.server import NEXT_S, HttpServer
from holdfast.wire.net import SocketNetwork

WAIT_S = 60.0
ASKS = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"


class Serving:
    """A server of two bytes; who asks for `/slow` waits until the test answers."""

    def __init__(self) -> None:
        self.slow: list[HttpConnection] = []
        self.server = HttpServer(self._handle, SocketNetwork())

    def _handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        if request.path == "/slow":
            self.slow.append(connection)
        else:
            connection.respond(200, b"{}")

    async def start(self) -> int:
        address = await self.server.start(TcpAddress("127.0.0.1", 0))
        assert isinstance(address, TcpAddress)
        return address.port

    async def is_asked(self) -> HttpConnection:
        """Who waits."""
        while not self.slow:
            await asyncio.sleep(0.001)
        return self.slow[0]


async def read_answer(reader: asyncio.StreamReader) -> str:
    """Its head; its body is two bytes."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    assert await reader.readexactly(2) == b"{}"
    return head.decode().lower()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), WAIT_S)


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


async def test_who_was_told_that_it_may_ask_again_may() -> None:
    """A server that leaves answers one more request on every connection whose last answer did not say that it was the
    last; that one does, and then comes the end."""
    serving = Serving()
    port = await serving.start()
    streamed, idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    streamed[1].write(ASKS % b"slow")
    idle[1].write(ASKS % b"quick")
    assert "connection: close" not in await read_answer(idle[0])
    under_way = await serving.is_asked()
    under_way.start_stream(b"text/plain")
    serving.server.stop_accepting()
    under_way.end_stream()
    assert b"close" not in (await asyncio.wait_for(streamed[0].readuntil(b"\r\n\r\n0\r\n\r\n"), WAIT_S)).lower()
    for reader, writer in (streamed, idle):
        writer.write(ASKS % b"quick")
        assert "connection: close" in await read_answer(reader)
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
    await asyncio.wait_for(serving.server.emptied(), WAIT_S)
    serving.server.close()


async def test_every_client_has_its_time_to_ask_again() -> None:
    """It begins with the end of its answer, which may be long after its server began to leave. The server is kept from
    its work until connections that rest are due to be closed; by then one client has just been answered, and asks again
    a little later, and another, which had rested, has asked and was not read yet. Both are answered."""
    serving = Serving()
    port = await serving.start()
    with connect(port) as streamed, connect(port) as rested:
        streamed.sendall(ASKS % b"slow")
        rested.sendall(ASKS % b"quick")
        assert (await asyncio.to_thread(rested.recv, 4096)).endswith(b"{}")
        under_way = await serving.is_asked()
        under_way.start_stream(b"text/plain")
        serving.server.stop_accepting()
        time.sleep(1.1 * NEXT_S)  # noqa: ASYNC251 - that nothing is seen to meanwhile is the point
        under_way.end_stream()
        rested.sendall(ASKS % b"quick")
        for _ in range(10):  # what is due by now is done
            await asyncio.sleep(0)
        streamed.sendall(ASKS % b"quick")
        answers = [await asyncio.to_thread(read_all, sock) for sock in (streamed, rested)]
    assert [answer.endswith(b"\r\n\r\n{}") for answer in answers] == [True, True], answers
    serving.server.close()


async def test_who_rests_is_let_go_without_a_reset() -> None:
    """A connection that asks for nothing more ends, and by an end that its client can see before it asks."""
    serving = Serving()
    with connect(await serving.start()) as sock:
        sock.sendall(ASKS % b"quick")
        assert (await asyncio.to_thread(sock.recv, 4096)).endswith(b"{}")
        serving.server.stop_accepting()
        assert await asyncio.to_thread(sock.recv, 4096) == b""
        await asyncio.wait_for(serving.server.emptied(), WAIT_S)
    serving.server.close()


async def test_who_stands_at_the_door_is_let_in() -> None:
    """Clients that the kernel has greeted, and nobody has seen yet, when a server stops taking others: they are
    answered, once."""
    serving = Serving()
    port = await serving.start()
    with contextlib.ExitStack() as kept:
        waiting = [kept.enter_context(connect(port)) for _ in range(40)]
        for sock in waiting:
            sock.sendall(ASKS % b"quick")
        serving.server.stop_accepting()
        answers = await asyncio.gather(*(asyncio.to_thread(sock.recv, 4096) for sock in waiting))
    assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 200 OK"}
    assert all(b"connection: close" in answer.lower() for answer in answers)
    serving.server.close()
