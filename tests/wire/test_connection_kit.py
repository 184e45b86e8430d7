"""The connection kit over real Unix sockets, with a small protocol of its own: echo by number."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from holdfast.core.address import UnixAddress
from holdfast.core.backoff import Backoff
from holdfast.wire import connection as kit
from holdfast.wire.connection import ClientConnection, ConnectionEnded, Refused, ServerConnection, Versions
from holdfast.wire.frames import FrameSplitter, encode, frame, reader
from holdfast.wire.net import SocketNetwork

BOUND_S = 20.0
MESSAGE_BYTES_MAX = 1024
SERVED = Versions(2, 4, ("colour", "sound"))


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    version: int
    last_version: int = 0
    features: tuple[str, ...] = ()


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=32):
    version: int
    features: tuple[str, ...]


class Call(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """`held`: it is answered by the test, later or never."""

    number: int
    held: bool = False


class Echo(msgspec.Struct, frozen=True, array_like=True, tag=34):
    number: int


to_server = reader(Hello | Call)
to_client = reader(Welcome | Echo | Refused)


class Server(ServerConnection):
    def __init__(self, sessions: list[Server], hello_timeout_s: float) -> None:
        super().__init__(
            to_server,
            hello_timeout_s=hello_timeout_s,
            unsent_bytes_max=64 * 1024,
            message_bytes_max=MESSAGE_BYTES_MAX,
        )
        self._sessions = sessions
        self.ends: list[bool] = []

    def on_connected(self) -> None:
        self._sessions.append(self)

    def on_left(self, exc: Exception | None, *, refused: bool) -> None:
        self.ends.append(refused)

    def on_frames(self, payloads: list[memoryview]) -> None:
        for payload in payloads:
            match self.read(payload):
                case Hello() as hello:
                    version = SERVED.agree(hello)
                    if version is None:
                        self.refuse(kit.WRONG_VERSION, SERVED.refusal(hello, "this server"))
                    else:
                        self.welcome(Welcome(version, SERVED.common_features(hello)))
                case Call(number, held) if not held:
                    self.send(Echo(number))


class Client(ClientConnection):
    def __init__(self) -> None:
        super().__init__("echo server", to_client, message_bytes_max=MESSAGE_BYTES_MAX)

    def on_message(self, message: Any) -> None:
        super().on_message(message)
        self.answer(message.number if isinstance(message, Echo) else type(message), message)

    async def greet(self, versions: Versions = SERVED) -> Welcome:
        return cast(Welcome, await self.ask(Welcome, Hello(versions.first, versions.last, versions.features)))

    async def call(self, *, held: bool = False) -> Echo:
        number = self.next_call()
        return cast(Echo, await self.ask(number, Call(number, held)))


class ServerRig:
    def __init__(self, address: UnixAddress) -> None:
        self.address = address
        self.network = SocketNetwork()
        self.sessions: list[Server] = []

    async def client(self) -> Client:
        client = Client()
        await self.network.connect(self.address, lambda: client, BOUND_S)
        return client

    @contextlib.asynccontextmanager
    async def serving(self, hello_timeout_s: float = BOUND_S) -> AsyncIterator[None]:
        listener = await self.network.listen(self.address, lambda: Server(self.sessions, hello_timeout_s))
        try:
            yield
        finally:
            listener.close()
            for session in self.sessions:
                session.close()


@pytest.fixture
def rig(tmp_path: Path) -> ServerRig:
    return ServerRig(UnixAddress(f"{tmp_path}/echo.sock"))


async def refusal(rig: ServerRig, *sent: bytes) -> Refused:
    """Return what a peer that sends these bytes is refused with; the connection closes after it."""
    loop, splitter = asyncio.get_running_loop(), FrameSplitter()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, rig.address.path)
        await loop.sock_sendall(sock, b"".join(sent))
        payloads: list[bytes] = []
        async with asyncio.timeout(BOUND_S):
            while data := await loop.sock_recv(sock, 4096):
                payloads += [bytes(payload) for payload in splitter.feed(data)]
    answer = to_client(memoryview(payloads[-1]))
    assert isinstance(answer, Refused)
    return answer


@pytest.mark.parametrize(
    ("first", "last", "agreed"),
    [(2, 4, 4), (1, 3, 3), (3, 9, 4), (2, 0, 2), (4, 4, 4), (1, 0, None), (5, 9, None), (0, 1, None)],
)
def test_the_newest_version_of_both_ranges_is_agreed_on(first: int, last: int, agreed: int | None) -> None:
    """Two ranges agree on the newest version that both have, or on none."""
    assert SERVED.agree(Hello(first, last)) == agreed


async def test_hello_agrees_on_a_version_and_on_features(rig: ServerRig) -> None:
    """After the hello both sides know version and common features."""
    async with rig.serving():
        client = await rig.client()
        assert await client.greet(Versions(1, 3, ("sound", "smell"))) == Welcome(3, ("sound",))


async def test_a_client_of_another_version_is_told_which_are_spoken(rig: ServerRig) -> None:
    """A refusal names the versions that the server speaks."""
    async with rig.serving():
        client = await rig.client()
        with pytest.raises(
            ConnectionEnded, match="speaks version 5, this server speaks versions 2 to 4; upgrade"
        ) as ended:
            await client.greet(Versions(5, 5))
        assert ended.value.code == kit.WRONG_VERSION
        with pytest.raises(ConnectionEnded):
            await client.call()


@pytest.mark.parametrize(
    "sent",
    [frame(b"x" * (MESSAGE_BYTES_MAX + 1)), frame(b"\xff garbage"), b"GET / HTTP/1.1\r\n\r\n", encode(Echo(1))],
    ids=["too large", "garbage", "http", "other side's message"],
)
async def test_what_cannot_be_read_is_refused_with_its_cause(rig: ServerRig, sent: bytes) -> None:
    """Garbage is refused with the reason, and the server goes on."""
    async with rig.serving():
        answer = await refusal(rig, encode(Hello(2)), sent)
        assert answer.code == kit.MALFORMED
        assert answer.reason
        assert rig.sessions[0].ends == [True], "told once"
        await (await rig.client()).greet()


async def test_a_peer_without_a_hello_is_refused(rig: ServerRig) -> None:
    """A peer that sends something else first is refused."""
    async with rig.serving(hello_timeout_s=0.05):
        assert (await refusal(rig)).code == kit.NO_HELLO


async def test_calls_are_answered_by_number_and_a_cancelled_one_disturbs_none(rig: ServerRig) -> None:
    """Each call gets its own answer; a cancelled one disturbs no other."""
    async with rig.serving():
        client = await rig.client()
        await client.greet()
        held = asyncio.create_task(client.call(held=True))
        await asyncio.sleep(0)  # it is sent
        async with asyncio.timeout(BOUND_S):
            assert (await client.call()).number == 2
            held.cancel()
            await asyncio.wait([held])
            rig.sessions[0].send(Echo(1))  # the late answer
            assert [(await client.call()).number for _ in range(2)] == [3, 4]


async def test_the_servers_end_fails_what_waits(rig: ServerRig) -> None:
    """Calls that wait fail when the server ends."""
    async with rig.serving():
        client = await rig.client()
        await client.greet()
        held = [asyncio.create_task(client.call(held=True)) for _ in range(3)]
        told: list[Any] = []
        client.expect("by callback", told.append)
        await client.call()
        rig.sessions[0].close()
        done, _ = await asyncio.wait(held, timeout=BOUND_S)
        assert [type(task.exception()) for task in done] == [ConnectionEnded] * 3
        assert client.closed.is_set()
        assert told == [None]


async def test_a_server_that_speaks_something_else_is_left(rig: ServerRig) -> None:
    """A client leaves a server that answers with garbage."""
    async with rig.serving():
        client = await rig.client()
        await client.greet()
        rig.sessions[0].transport.write(frame(b"\xff garbage"))
        with pytest.raises(ConnectionEnded, match="the echo server sent what is not our protocol"):
            await client.call(held=True)


async def test_a_silent_server_is_told_of_once_and_stays_connected(rig: ServerRig) -> None:
    """Silence is reported once; the connection stays."""
    async with rig.serving():
        client = await rig.client()
        await client.greet()
        silent = asyncio.Event()
        told: list[int] = []

        def on_silent() -> None:
            told.append(1)
            silent.set()

        def on_tick(tick: int, silent_ticks: int) -> None:
            if silent_ticks == 5:
                client.send(Call(99))  # an answer ends the silence, and it is told of again

        watching = asyncio.create_task(
            kit.watch_silence(client, tick_s=0.01, ticks_max=3, on_tick=on_tick, on_silent=on_silent)
        )
        async with asyncio.timeout(BOUND_S):
            for _ in range(2):
                await silent.wait()
                silent.clear()
            assert not client.closed.is_set()
            client.close()
            await watching


async def test_reconnects_until_the_server_is_back(rig: ServerRig) -> None:
    """A client connects again, with backoff, until the server is back."""
    failures: list[Exception] = []
    backs = asyncio.Event()

    def failed(error: Exception) -> None:
        failures.append(error)
        if len(failures) == 3:
            backs.set()

    async def session() -> bool:
        await (await rig.client()).greet()
        return True

    seeking = asyncio.create_task(kit.reconnect(session, Backoff(random.Random(1), 0.001, 0.01), failed))
    async with asyncio.timeout(BOUND_S):
        await backs.wait()
        async with rig.serving():
            await seeking
    assert all(isinstance(error, OSError) for error in failures)
