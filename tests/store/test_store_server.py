"""The embedded server among bad and slow clients, and with a bad disk. Real sockets; the fuzz hits a real process."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.core.address import UnixAddress, parse_address
from holdfast.core.errors import UserError
from holdfast.store import client as store_client
from holdfast.store import messages as m
from holdfast.store import server as store_server
from holdfast.store.client import EmbeddedStore
from holdfast.store.contract import Lost, Snapshot
from holdfast.store.machine import StoreLimits
from holdfast.store.opening import open_store
from holdfast.store.server import DurableFile, ServerSettings, StoreServer
from holdfast.store.shared import LeasedKey
from holdfast.testing.waiting import until
from holdfast.wire import accepting
from holdfast.wire.frames import FRAME_BYTES_MAX, FrameSplitter, encode, frame
from holdfast.wire.net import SocketNetwork
from tests.rigs.store.stores import (
    BOUND_S,
    EmbeddedRig,
    end,
    has,
    refused,
    registered,
    unavailable,
    until_snapshot,
    upcoming,
)


class Inside:
    """A server in this process, and clients for it."""

    def __init__(self, directory: Path, settings: ServerSettings) -> None:
        self.address = UnixAddress(f"{directory}/store.sock")
        self.network = SocketNetwork()
        self.file = DurableFile(directory / "sub" / "durable")
        self.server = StoreServer(self.address, self.network, self.file, settings)
        self.clients: list[EmbeddedStore] = []

    async def client(self) -> EmbeddedStore:
        store = EmbeddedStore(self.address, self.network, random.Random(3))
        self.clients.append(store)
        await store.start()
        return store

    async def raw(self) -> socket.socket:
        """A connection that has said Hello and otherwise only does what the test does."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, self.address.path)
        await loop.sock_sendall(sock, encode(m.Hello(m.VERSION)))
        return sock


@pytest.fixture
async def inside(tmp_path: Path) -> AsyncIterator[Inside]:
    inside = Inside(tmp_path, ServerSettings(connections_max=8, unsent_bytes_max=64 * 1024))
    await inside.server.start()
    running = asyncio.create_task(inside.server.run())
    yield inside
    for client in inside.clients:
        await client.close()
    running.cancel()
    await asyncio.wait([running])


async def messages_until_closed(sock: socket.socket) -> list[m.ToClient]:
    loop = asyncio.get_running_loop()
    splitter, received = FrameSplitter(), []
    async with asyncio.timeout(BOUND_S):
        while data := await loop.sock_recv(sock, 65536):
            received += [m.decode_to_client(payload) for payload in splitter.feed(data)]
    sock.close()
    return received


async def test_a_receiver_that_does_not_read_costs_little_and_catches_up(inside: Inside) -> None:
    """Changes for a stuck receiver are not kept; when it reads again a snapshot gives it the truth."""
    writer = await inside.client()
    sock = await inside.raw()
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, encode(m.WatchPrefix(1, "s/")))
    for index in range(300):
        await writer.put("s/1", bytes([index % 256]) * 50_000, BOUND_S)
    (peer,) = [peer for peer in inside.server._peers.values() if peer._blocked]
    assert peer.transport.get_write_buffer_size() < 512 * 1024
    view: dict[str, bytes] = {}
    splitter, snapshots = FrameSplitter(), 0
    async with asyncio.timeout(BOUND_S):
        while view != {"s/1": bytes([299 % 256]) * 50_000}:
            for payload in splitter.feed(await loop.sock_recv(sock, 65536)):
                message = m.decode_to_client(payload)
                if isinstance(message, m.WatchItems):
                    view, snapshots = dict(message.items), snapshots + 1
                elif isinstance(message, m.Changed) and message.value is not None:
                    view[message.key] = message.value
    assert snapshots >= 2
    sock.close()


async def test_requests_wait_while_answers_are_not_read(inside: Inside) -> None:
    """A client that asks and asks without reading is itself not read: no answers pile up."""
    writer = await inside.client()
    await writer.put("s/1", b"v" * 1_000_000, BOUND_S)
    sock = await inside.raw()
    loop = asyncio.get_running_loop()
    sending = asyncio.create_task(loop.sock_sendall(sock, b"".join(encode(m.Get(call, "s/1")) for call in range(200))))
    await writer.get("s/1", BOUND_S)
    async with asyncio.timeout(BOUND_S):
        while not any(peer._blocked for peer in inside.server._peers.values()):
            await writer.get("s/1", BOUND_S)
    (peer,) = [peer for peer in inside.server._peers.values() if peer._blocked]
    assert peer.transport.get_write_buffer_size() < 4_000_000
    splitter, answers = FrameSplitter(), 0
    async with asyncio.timeout(BOUND_S):
        while answers < 200:
            for payload in splitter.feed(await loop.sock_recv(sock, 1 << 20)):
                answers += isinstance(m.decode_to_client(payload), m.Value)
    await sending
    sock.close()


async def test_too_many_connections_are_refused_by_name(inside: Inside) -> None:
    """The house has a number of places; who comes then is told so, and finds a place later by itself."""
    guests = [await inside.raw() for _ in range(8)]
    known = inside.server._peers
    await until(lambda: len(known) == 8 and not any(peer.is_stranger for peer in known.values()), "eight known clients")
    client = await inside.client()
    await refused(client, "Full")
    for guest in guests:
        guest.close()
    assert await client.get("k", BOUND_S) is None


@pytest.mark.parametrize("descriptors", [False, True], ids=["connections", "descriptors"])
async def test_silent_connections_make_room_for_a_client(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, descriptors: bool
) -> None:
    """A connection without a Hello is closed for the next one, the oldest first, whichever limit is reached."""
    monkeypatch.setattr(store_server, "HELLO_TIMEOUT_S", 2 * BOUND_S)
    if descriptors:
        monkeypatch.setattr(accepting, "descriptor_limit", lambda: 8)  # 5/8 of them are for connections
    places = 5 if descriptors else 8
    silent = [socket.socket(socket.AF_UNIX) for _ in range(places)]
    loop = asyncio.get_running_loop()
    for sock in silent:
        sock.setblocking(False)
        await loop.sock_connect(sock, inside.address.path)
    await until(lambda: len(inside.server._peers) == places, "the silent connections")
    client = await inside.client()
    assert await client.get("k", BOUND_S) is None
    async with asyncio.timeout(BOUND_S):
        assert await loop.sock_recv(silent[0], 1) == b""
    assert len(inside.server._peers) == places
    for sock in silent:
        sock.close()


async def test_a_refused_registration_is_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full store refuses it at every tick, which the log says once; with room again it is there."""
    inside = Inside(tmp_path, ServerSettings(StoreLimits(keys_max=1)))
    await inside.server.start()
    client, other = await inside.client(), await inside.client()
    held = await registered(other, "k/1", b"first")
    refused, become_refused = [], LeasedKey.become_refused
    monkeypatch.setattr(LeasedKey, "become_refused", lambda *given: refused.append(become_refused(*given)))
    monkeypatch.setattr(store_client, "TICK_S", 0.02)
    client.register("k/2", b"second")
    await until(lambda: len(refused) > 2, "it to be tried again")
    assert caplog.text.count("registration k/2 pending: refused: the store is full") == 1
    await held.withdraw()
    await has(other, "k/2", b"second")
    for store in inside.clients:
        await store.close()
    inside.server.close()


async def test_a_disk_that_cannot_be_written_fails_the_put(inside: Inside, tmp_path: Path) -> None:
    """A durable put is acknowledged only when it is on disk; the reason says what is wrong, and it heals by itself."""
    client = await inside.client()
    (tmp_path / "sub").write_bytes(b"in the way")
    error = await unavailable(client.put("k", b"1", 2 * BOUND_S))
    assert "could not write" in str(error)
    (tmp_path / "sub").unlink()
    await client.put("k", b"2", BOUND_S)
    assert DurableFile(tmp_path / "sub" / "durable").load() == {"k": b"2"}


async def test_many_puts_share_a_write(inside: Inside) -> None:
    """Puts that wait for the disk together are all on it when they return."""
    client = await inside.client()
    await asyncio.gather(*(client.put(f"k/{index}", b"v", BOUND_S) for index in range(500)))
    assert len(inside.file.load()) == 500


def test_a_spoilt_file_is_never_overwritten(tmp_path: Path) -> None:
    """A durable file that cannot be read stops the start, in one line that says what to do."""
    path = tmp_path / "durable"
    assert DurableFile(path).load() == {}
    for content in (b"", b"garbage", b"\x92\xa3abc\x80"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="move it away"):
            DurableFile(path).load()
        assert path.read_bytes() == content


async def test_a_wrong_version_is_told_to_the_caller(tmp_path: Path) -> None:
    """A client of another version learns from its first call why it is not served."""

    class OtherVersion(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.write(encode(m.Refused("WrongVersion", "upgrade")))  # type: ignore[attr-defined]
            transport.close()

    network = SocketNetwork()
    listener = await network.listen(UnixAddress(f"{tmp_path}/s.sock"), OtherVersion)
    client = EmbeddedStore(listener.address, network, random.Random(1))
    await client.start()
    await refused(client, "WrongVersion: upgrade")
    await client.close()
    listener.close()


async def test_nobody_there_is_lost_after_a_while(tmp_path: Path) -> None:
    """A store that never appears is told as lost, once, after ~3 s; a wrong URL at once, as the person's mistake."""
    url = f"unix://{tmp_path}/none.sock"
    client = open_store(url, SocketNetwork(), random.Random(1))
    await client.start()
    assert isinstance(await upcoming(client.watch("k")), Lost)
    assert "cannot connect" in repr(client)
    assert isinstance(await upcoming(client.watch("k")), Lost)
    await client.close()
    for wrong in ("http://x", "etcd://", "etcd://host", "unix://relative"):
        with pytest.raises(UserError, match="etcd://"):
            open_store(wrong, SocketNetwork(), random.Random(1))


@pytest.mark.processes
class TestFuzz:
    """Nothing sent to the server's socket ends its process or disturbs an honest client."""

    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[EmbeddedRig]:
        rig = EmbeddedRig(tmp_path)
        await rig.start()
        yield rig
        end(rig.process)

    async def test_every_refusal_names_its_cause(self, rig: EmbeddedRig) -> None:
        """Malformed, oversized, wrong-version, wrong-typed and deeply nested messages each get a reason."""
        hello = encode(m.Hello(m.VERSION))
        for sent, code in [
            (frame(b"\xc1garbage"), "Malformed"),
            (b"GET / HTTP/1.1\r\n\r\n", "Malformed"),
            (struct.pack(">I", FRAME_BYTES_MAX + 1) + os.urandom(100_000), "Malformed"),
            (encode(m.Hello(99)), "WrongVersion"),
            (encode(m.Ping()), "NoHello"),
            (hello + hello, "InvalidRequest"),
            (hello + frame(b"\x91" * 5000), "Malformed"),
            (hello + frame(b"\x93\x03\x01\xa2\xff\xfe"), "Malformed"),
            (hello + frame(b"\x93\x03\xa1x\xa1k"), "Malformed"),
            (hello + encode(m.Welcome(1)), "Malformed"),
            (hello + encode(m.PutKey(1, "k", b"v" * 1_100_000, True)), "InvalidRequest"),
        ]:
            received = await exchange(rig, sent)
            assert isinstance(received[-1], m.Refused), sent[:40]
            assert received[-1].code == code
            assert received[-1].reason
        assert rig.process.poll() is None

    async def test_random_bytes_harm_nobody(self, rig: EmbeddedRig) -> None:
        """Random, mutated and truncated input, while an honest client goes on working."""
        honest = rig.client()
        await honest.start()
        watch = honest.watch("h/")
        assert await upcoming(watch) == Snapshot({})
        loop = asyncio.get_running_loop()

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(sent=HOSTILE)
        def hit(sent: bytes) -> None:
            asyncio.run_coroutine_threadsafe(exchange(rig, sent, wait=False), loop).result(BOUND_S)

        await asyncio.to_thread(hit)
        honest.register("h/1", b"fine")
        await until_snapshot(watch, {"h/1": b"fine"})
        assert rig.process.poll() is None
        assert honest.state == "connected"
        await honest.close()


KEYS = st.text(max_size=5).map("x/".__add__)
MESSAGES = st.one_of(
    st.builds(m.PutKey, st.integers(0, 9), KEYS, st.binary(max_size=20), st.booleans()),
    st.builds(m.Get, st.integers(0, 9), st.text(max_size=5)),
    st.builds(m.DeleteKey, st.integers(0, 9), KEYS, st.booleans()),
    st.builds(m.WatchPrefix, st.integers(-(2**63), 2**63), st.text(max_size=5)),
    st.builds(m.Unwatch, st.integers(0, 9)),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good conversation, then some bytes changed and the end cut off."""
    good = bytearray(encode(m.Hello(m.VERSION)))
    for message in draw(st.lists(MESSAGES, max_size=8)):
        good += encode(message)
    for _ in range(draw(st.integers(0, 4))):
        good[draw(st.integers(0, len(good) - 1))] = draw(st.integers(0, 255))
    return bytes(good[: draw(st.integers(0, len(good)))])


HOSTILE = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(lambda payload: encode(m.Hello(m.VERSION)) + frame(payload)),
    mutated(),
)


async def exchange(rig: EmbeddedRig, sent: bytes, *, wait: bool = True) -> list[m.ToClient]:
    """Send bytes on a fresh connection; with `wait`, read until the server closes it."""
    address = parse_address(rig.url)
    assert isinstance(address, UnixAddress)
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, address.path)
    await loop.sock_sendall(sock, sent)
    if wait:
        return await messages_until_closed(sock)
    sock.close()
    return []
