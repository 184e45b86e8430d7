"""Who may pull an engine's levers over its status port: this user and root on this machine, or who has the token."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator

import pytest
import uvloop

from holdfast.core.address import TcpAddress
from holdfast.core.peers import peer_uid
from holdfast.failover.lifecycle import Lifecycle
from holdfast.spec.launch import WorkerLaunch
from holdfast.testing.place import fetch
from holdfast.wire.http.server import HttpServer
from holdfast.wire.net import SocketNetwork
from holdfast.worker.status import StatusPage

AS_NOBODY = """
import encodings.idna, http.client, os, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=10)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection.request("POST", "/engine/sleep")
print(connection.getresponse().status)
"""


class Levers:
    """A page with one lever, which counts."""

    def __init__(self, token: str = "") -> None:
        self.pulled = 0
        life, settings = Lifecycle(shadow=True, wake_s=30.0), WorkerLaunch(engine_token=token)
        page = StatusPage(dict, lambda: life, lambda: 0.0, lambda: 0.0, settings, {"sleep": self.pull})
        self.server = HttpServer(page.handle, SocketNetwork())

    async def pull(self) -> str:
        self.pulled += 1
        return "asleep"

    async def port(self) -> int:
        bound = await self.server.start(TcpAddress("127.0.0.1", 0))
        assert isinstance(bound, TcpAddress)
        return bound.port


@pytest.fixture
async def levers() -> AsyncIterator[Levers]:
    made = Levers(token="secret")
    yield made
    made.server.close()


def post(port: int, **headers: str) -> int:
    return fetch(f"127.0.0.1:{port}", "/engine/sleep", "POST", **headers)[0]


async def test_this_user_may_and_a_web_page_or_a_wrong_token_may_not(levers: Levers) -> None:
    """By the kernel's word for who is at the other end; a browser's page is not the user."""
    port = await levers.port()
    assert await asyncio.to_thread(post, port) == 200
    assert await asyncio.to_thread(post, port, Origin="http://elsewhere.example") == 403
    assert await asyncio.to_thread(post, port, Authorization="Bearer wrong") == 403
    assert await asyncio.to_thread(post, port, Authorization="secret") == 403
    assert levers.pulled == 1
    assert await asyncio.to_thread(post, port, Authorization="bearer secret", Origin="http://elsewhere.example") == 200


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_another_user_of_this_machine_may_not(levers: Levers) -> None:
    """That a port is on loopback does not make everybody there its owner."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AS_NOBODY, str(await levers.port())), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await child.communicate()
    assert (said, levers.pulled) == (b"403\n", 0)


def test_levers_work_on_the_loop_that_workers_run() -> None:
    """Whose sockets are not the standard library's."""

    async def pulled() -> tuple[int, int]:
        levers = Levers()
        port = await levers.port()
        status = await asyncio.to_thread(post, port)
        levers.server.close()
        return status, levers.pulled

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(pulled()) == (200, 1)


@pytest.mark.parametrize(("listen", "connect"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_owner_of_a_tcp_peer_is_told_by_the_kernel(listen: str, connect: str) -> None:
    """In both families, and for an IPv4 client of a socket that serves both."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with (
        socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::") as server,
        socket.create_connection((connect, server.getsockname()[1]), timeout=10),
        server.accept()[0] as accepted,
    ):
        assert peer_uid(accepted) == os.getuid()
