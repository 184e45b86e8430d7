"""What a lock server refuses, what it survives, and what it has on disk when it answers. Real sockets, one process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.core.address import Address, TcpAddress, UnixAddress
from holdfast.core.errors import UserError
from holdfast.failover.lock_server import messages as m
from holdfast.failover.lock_server import server as lock_server
from holdfast.failover.lock_server.client import LockRefused, ServerLock
from holdfast.failover.lock_server.machine import Client, ElectionRecord, Grant
from holdfast.failover.lock_server.server import FoundRecord, LockRecord, serve_lock
from holdfast.wire import accepting
from holdfast.wire.frames import FRAME_BYTES_MAX, FrameSplitter, encode, frame
from holdfast.wire.net import real_world
from tests.rigs.failover.locks import BOUND_S, until
from tests.rigs.small_disks import fill, small_disk

pytestmark = pytest.mark.alone

TOKEN = "right"
WINDOW_S = 2 * BOUND_S  # no wait here is for its end
SHORT_S = 0.6  # unless it is


class Served:
    """A server in this process."""

    def __init__(self, address: Address, record: Path, running: asyncio.Task[None]) -> None:
        self.address, self.record, self.running = address, record, running

    def lock(self, who: str, token: str = TOKEN) -> ServerLock:
        return ServerLock(self.address, who, real_world(), token, give_up_s=BOUND_S)

    async def raw(self) -> socket.socket:
        """A connection that only does what the test does."""
        unix = isinstance(self.address, UnixAddress)
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        sock.setblocking(False)
        target = self.address.path if isinstance(self.address, UnixAddress) else (self.address.host, self.address.port)
        await asyncio.get_running_loop().sock_connect(sock, target)
        return sock


@contextlib.asynccontextmanager
async def served(directory: Path, *, tcp: bool = False, window_s: float = WINDOW_S) -> AsyncIterator[Served]:
    ready: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
    address: Address = TcpAddress("127.0.0.1", 0) if tcp else UnixAddress(f"{directory}/lock.sock")
    record = directory / "lock.record"
    settings = {"window_s": window_s, "token": TOKEN if tcp else "", "world": real_world()}
    running = asyncio.create_task(serve_lock(address, record, **settings, on_ready=ready.set_result))
    await asyncio.wait([ready, running], return_when=asyncio.FIRST_COMPLETED, timeout=BOUND_S)
    try:
        yield Served(ready.result(), record, running)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def granted(lock: ServerLock) -> asyncio.Event:
    return await asyncio.wait_for(lock.acquire(), BOUND_S)


async def say(sock: socket.socket, *messages: m.ToServer) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, b"".join(encode(message) for message in messages))


def hello(who: str, token: str = TOKEN, version: int = m.VERSION) -> m.Hello:
    return m.Hello(version, f"id of {who}", who, 0, 0, token)


async def heard(sock: socket.socket, wanted: type[m.ToClient]) -> m.ToClient:
    """The next message of that kind."""
    splitter = FrameSplitter()
    async with asyncio.timeout(BOUND_S):
        while data := await asyncio.get_running_loop().sock_recv(sock, 4096):
            for payload in splitter.feed(data):
                if isinstance(message := m.decode_to_client(payload), wanted):
                    return message
    raise AssertionError(f"closed without {wanted.__name__}")


# -- who may connect


@pytest.mark.parametrize(("token", "why"), [("wrong", "the token is wrong"), ("", "a token is needed")])
async def test_wrong_token_on_tcp(tmp_path: Path, token: str, why: str) -> None:
    """Refused by name, to whoever wants the lock; and it sees no owner either."""
    async with served(tmp_path, tcp=True) as server:
        await granted(holder := server.lock("holder"))
        with pytest.raises(LockRefused, match=f"WrongToken: {why}"):
            await granted(server.lock("stranger", token))
        assert await server.lock("stranger", token).owner() is None
        await until(server.lock("friend").owner, "a friend sees it")
        await holder.release()


async def test_tcp_without_a_token_is_not_served(tmp_path: Path) -> None:
    """A server that anyone could take the lock from does not start."""
    address = TcpAddress("127.0.0.1", 0)
    with pytest.raises(UserError, match="needs a token"):
        await serve_lock(address, tmp_path / "lock.record", window_s=WINDOW_S, token="", world=real_world())


async def test_other_user_on_a_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says who connects: another user is refused by name, the server's own and root are not."""
    own, other = os.geteuid(), os.geteuid() + 1
    async with served(tmp_path) as server:
        for uid in (own, 0):
            monkeypatch.setattr(lock_server, "peer_uid", lambda sock, uid=uid: uid)
            await granted(friend := server.lock("friend"))
            await friend.release()
        monkeypatch.setattr(lock_server, "peer_uid", lambda sock: other)
        with pytest.raises(LockRefused, match=f"WrongUser: the client runs as user {other}"):
            await granted(server.lock("stranger"))


# -- bad clients


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (struct.pack(">I", FRAME_BYTES_MAX + 1), m.MALFORMED),
        (struct.pack(">I", FRAME_BYTES_MAX - 1) + bytes(m.MESSAGE_BYTES_MAX), m.MALFORMED),
        (encode(hello("w" * m.MESSAGE_BYTES_MAX)), m.MALFORMED),
        (frame(b"\xc1"), m.MALFORMED),
        (encode(hello("w", version=99)), m.WRONG_VERSION),
        (encode(m.AskLock()), m.NO_HELLO),
        (encode(hello("w")) * 2, m.MALFORMED),
        (encode(hello("w")) + encode(m.AskLock()) * 2, "Busy"),
    ],
    ids=["huge", "long", "long hello", "garbage", "version", "no hello", "two hellos", "asks twice"],
)
async def test_bad_client_is_told_why_and_harms_nobody(tmp_path: Path, sent: bytes, code: str) -> None:
    """Refused by name; the holder holds on and the next one is granted the lock after it."""
    async with served(tmp_path) as server:
        lost = await granted(holder := server.lock("holder"))
        with await server.raw() as sock:
            await asyncio.get_running_loop().sock_sendall(sock, sent)
            refused = await heard(sock, m.Refused)
        assert isinstance(refused, m.Refused)
        assert refused.code == code
        assert not lost.is_set()
        await holder.release()
        await granted(other := server.lock("other"))
        await other.release()


@pytest.mark.parametrize("descriptors", [False, True], ids=["connections", "descriptors"])
async def test_full_house_makes_room_for_who_says_hello(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: bool
) -> None:
    """Silent connections give way, oldest first, so a holder can come back; greeted ones stay, and then it is full."""
    if descriptors:
        monkeypatch.setattr(accepting, "descriptor_limit", lambda: 5)  # 5/8 of them are for connections
    else:
        monkeypatch.setattr(lock_server, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(lock_server, "HELLO_TIMEOUT_S", 2 * BOUND_S)
    async with served(tmp_path) as server:
        with await server.raw() as one, await server.raw() as two, await server.raw() as three:
            for sock in (three, two):
                await say(sock, hello("known"))
                await heard(sock, m.Welcome)
            await granted(holder := server.lock("holder"))
            assert await asyncio.get_running_loop().sock_recv(one, 1) == b""
            with await server.raw() as more:
                refused = await heard(more, m.Refused)
            assert isinstance(refused, m.Refused)
            assert refused.code == m.FULL
            await holder.release()


# -- how a connection ends


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
async def test_only_an_end_by_the_holders_own_kernel_frees_at_once(tmp_path: Path, tcp: bool) -> None:
    """Over TCP a reset may be the network's doing, so it opens a window; an end of file, and a Unix socket, do not."""
    loop = asyncio.get_running_loop()
    for reset in (False, True):
        window = reset and tcp
        async with served(tmp_path, tcp=tcp, window_s=SHORT_S if window else WINDOW_S) as server:
            sock = await server.raw()
            await say(sock, hello("holder"), m.AskLock())
            await heard(sock, m.Granted)
            if reset and tcp:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif reset:
                await say(sock, m.Ping(1))  # an unread answer makes it one
            ended_s = loop.time()
            sock.close()
            await granted(other := server.lock("other"))
            assert not window or loop.time() >= ended_s + SHORT_S
            await other.release()


async def test_letting_go_is_said(tmp_path: Path) -> None:
    """A client that ends with something unread is a reset over TCP; it has let go in words before, so no window."""
    async with served(tmp_path, tcp=True) as server:
        link, _ = await server.lock("leaver")._connect()
        asking = asyncio.create_task(link.ask(m.Granted, m.AskLock()))
        await asyncio.sleep(0)
        link.transport.pause_reading()
        await until(server.record.exists, "it was granted")
        asking.cancel()
        link.release()
        await granted(other := server.lock("other"))
        await other.release()


# -- what is on disk


async def test_on_disk_before_it_is_told_and_cleared_by_a_release(tmp_path: Path) -> None:
    """Whoever has a grant is on record by its id; whoever gave it back is not."""
    async with served(tmp_path) as server:
        with await server.raw() as sock:
            await say(sock, hello("holder"), m.AskLock())
            await heard(sock, m.Granted)
            record = LockRecord(server.record).load().record
            assert record is not None
            assert record.grant is not None
            assert (record.grant.number, record.grant.client.id) == (1, "id of holder")
            assert server.record.stat().st_mode & 0o077 == 0
            await say(sock, m.GiveBack())
            await heard(sock, m.Released)
            assert LockRecord(server.record).load().record == ElectionRecord(1, None)


def test_a_grant_is_recorded_on_a_full_disk() -> None:
    """Again and again, each replacing the one before, whatever others take of the room that comes free; a shorter
    record keeps nothing of the room that was reserved, or of a longer one."""
    with small_disk(64 * 1024) as disk:
        record = LockRecord(disk / "lock.state")
        record.open()
        fill(disk)
        for number, who in enumerate(("engine", "a name that is rather long", "b"), 1):
            wanted = ElectionRecord(number, Grant(number, Client("id", who, 1, 2), 3.0, 3.0))
            record.save(wanted)
            assert record.load() == FoundRecord(wanted)
        record.close()


async def test_disk_that_fails_grants_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant that cannot be recorded is not told; the server ends and says what is wrong."""

    def full(self: LockRecord, record: ElectionRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LockRecord, "save", full)
    async with served(tmp_path) as server:
        waiting = asyncio.create_task(server.lock("holder").acquire())
        with pytest.raises(UserError, match="No space left"):
            await asyncio.wait_for(asyncio.shield(server.running), BOUND_S)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_one_server_per_record(tmp_path: Path) -> None:
    """A second server with the same file, at another address, is refused."""
    async with served(tmp_path) as server:
        address = UnixAddress(f"{tmp_path}/other.sock")
        with pytest.raises(UserError, match="another lock server uses"):
            await serve_lock(address, server.record, window_s=WINDOW_S, token="", world=real_world())


# -- the client


async def test_holder_that_comes_back_keeps_the_stricter_bound(tmp_path: Path) -> None:
    """A restarted server with a shorter window is given up sooner, one with a longer window no later than before."""
    bounds, window_s = [], BOUND_S  # shorter than the lock's own patience, longer than any pause
    async with served(tmp_path, window_s=window_s) as server:
        lost = await granted(lock := server.lock("holder"))
        bounds.append(lock._bound_s)
    for other_s in (window_s / 2, window_s * 10):
        link = lock._link
        async with served(tmp_path, window_s=other_s):
            await until(lambda: lock._link not in (None, link), "it is back")  # noqa: B023
            bounds.append(lock._bound_s)
            assert not lost.is_set()
    assert bounds == pytest.approx([window_s * 2 / 3, window_s / 3, window_s / 3])
    await lock.release()


async def test_acquire_waits_for_a_server_that_is_not_there_yet(tmp_path: Path) -> None:
    """No server is no error: whoever waits is granted the lock once there is one."""
    lock = ServerLock(UnixAddress(f"{tmp_path}/lock.sock"), "early", real_world())
    waiting = asyncio.create_task(granted(lock))
    assert await lock.owner() is None
    async with served(tmp_path):
        assert not (await waiting).is_set()
        await lock.release()
        await until(lambda: len(asyncio.all_tasks()) <= 2, "no task is left")
