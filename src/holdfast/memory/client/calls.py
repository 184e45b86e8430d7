"""The client's side of a connection to a vault: calls with bounded waits, notices, and loss.

Always true: every call ends, with its answer, a refusal, a time-out or the connection's loss; a wait that is given up
is cancelled at the vault too; descriptors that come with an answer nobody waits for are closed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from holdfast.core.peers import peer_uid
from holdfast.memory import protocol
from holdfast.memory.errors import VaultRefused
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, FdConnection, Frame, close_all


class MemoryLost(msgspec.Struct, frozen=True):
    """The vault does not keep what is mapped here, and does not take it back."""

    reason: str


Notice = protocol.Superseded | protocol.Fence | MemoryLost | protocol.PoolNews | protocol.Deposed | protocol.LetGo
OnNotice = Callable[[Notice], None]
OnLost = Callable[[str], None]
# Beyond the vault's own time-out, for its answer to travel: a tenth of it, and never less or more than this.
GRACE_S = (0.2, 2.0)


def patience_s(timeout_ms: int) -> float:
    """How long to wait for the answer to something the vault itself gives up after `timeout_ms`."""
    timeout_s = max(0, timeout_ms) / 1000
    shortest_s, longest_s = GRACE_S
    return timeout_s + min(longest_s, max(shortest_s, timeout_s / 10))


class VaultConnection:
    """One connection; made by `open_connection`."""

    def __init__(self, sock: socket.socket, on_notice: OnNotice, on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[tuple[Any, list[int]]]] = {}
        self._slabs: dict[int, tuple[list[int], list[int]]] = {}
        self._on_notice = on_notice
        self._on_lost = on_lost
        self.welcome: asyncio.Future[protocol.Welcome] = self._loop.create_future()
        self._connection = FdConnection(sock, self._take, self._lost)

    @property
    def open(self) -> bool:
        return self._connection.open

    def greet(self, client: str, engine_id: int, resume: protocol.Resume | None) -> None:
        pidfd = os.pidfd_open(os.getpid())
        try:
            self._connection.send(
                protocol.encode(protocol.Hello(protocol.VERSION, client, engine_id, os.getpid(), resume)), [pidfd]
            )
        finally:
            os.close(pidfd)

    async def call(self, make: Callable[[int], msgspec.Struct], timeout_s: float, fds: list[int] | None = None) -> Any:
        """Send what `make` makes of a call's number, and wait for its answer."""
        answer, received = await self.call_for_fds(make, timeout_s, fds)
        close_all(received)
        return answer

    async def call_for_fds(
        self, make: Callable[[int], msgspec.Struct], timeout_s: float, fds: list[int] | None = None
    ) -> tuple[Any, list[int]]:
        number = next(self._numbers)
        future: asyncio.Future[tuple[Any, list[int]]] = self._loop.create_future()
        if not self.open:
            raise ConnectionError("the connection to the vault is lost")
        self._answers[number] = future
        self._connection.send(protocol.encode(make(number)), fds)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except (TimeoutError, asyncio.CancelledError):
            if future.done() and not future.cancelled() and future.exception() is None:
                close_all(future.result()[1])  # the answer came in the very moment
            self._connection.send(protocol.encode(protocol.CancelCall(next(self._numbers), number)))
            raise
        finally:
            del self._answers[number]

    async def hand_over(
        self, make: Callable[[int, slice, bool], msgspec.Struct], timeout_s: float, fds: list[int]
    ) -> None:
        """Calls with as many descriptors each as a frame may have, made of (number, which ones, whether the last)."""
        for start in range(0, len(fds), FDS_PER_FRAME_MAX):
            which = slice(start, start + FDS_PER_FRAME_MAX)
            last = which.stop >= len(fds)
            await self.call(lambda n, which=which, last=last: make(n, which, last), timeout_s, fds[which])  # type: ignore[misc]

    def tell(self, make: Callable[[int], msgspec.Struct]) -> None:
        """A call whose answer nobody waits for."""
        self._connection.send(protocol.encode(make(next(self._numbers))))

    # -- receiving

    def _take(self, frame: Frame) -> None:
        try:
            message = protocol.from_vault.decode(frame.body)
        except protocol.READ_ERRORS:
            frame.close_fds()
            self.close("the vault sent what is not our protocol")
            return
        if isinstance(message, protocol.Welcome):
            if not self.welcome.done():
                self.welcome.set_result(message)
        elif isinstance(message, Notice):
            self._on_notice(message)
        elif isinstance(message, protocol.Failed) and message.call == 0:
            self._refused(message)
        else:
            self._answer(message, frame.fds)

    def _refused(self, message: protocol.Failed) -> None:
        if not self.welcome.done():
            self.welcome.set_exception(VaultRefused(message.code, message.reason))
            self.welcome.exception()  # it may be that nobody waits any more

    def _answer(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, protocol.Slabs):
            sizes, gathered = self._slabs.setdefault(message.call, ([], []))
            sizes += message.sizes
            gathered += fds
            if message.more:
                return
            del self._slabs[message.call]
            message, fds = msgspec.structs.replace(message, sizes=sizes), gathered
        future = self._answers.get(message.call)
        if future is None or future.done():
            close_all(fds)
        elif isinstance(message, protocol.Failed):
            error = TimeoutError(message.reason) if message.code == "timeout" else None
            future.set_exception(error or VaultRefused(message.code, message.reason))
        else:
            future.set_result((message, fds))

    def leave(self) -> None:
        """Close, and mean it: the vault is not to wait for this process's end."""
        self._connection.send(protocol.encode(protocol.Leave()))
        self.close()

    def close(self, why: str = "closed") -> None:
        self._connection.close(why)

    def _lost(self, why: str) -> None:
        for _, fds in self._slabs.values():
            close_all(fds)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(ConnectionError(f"the connection to the vault is lost: {why}"))
        if not self.welcome.done():
            self.welcome.set_exception(ConnectionError(f"the vault closed the connection: {why}"))
            self.welcome.exception()
        self._on_lost(why)


def check_uid(path: str, uid: int | None, allowed: Collection[int] | None) -> None:
    """Weights and KV are handed to whoever listens there: not to a stranger who was there first."""
    if allowed is not None and uid not in (os.getuid(), 0, *allowed):
        mend = f"if it is meant to, name it: --vault-uid {uid}"
        raise PermissionError(f"the vault at {path} belongs to uid {uid}, not to {os.getuid()}; {mend}")


async def open_connection(
    path: str,
    client: str,
    engine_id: int,
    timeout_s: float,
    *,
    on_notice: OnNotice = lambda notice: None,
    on_lost: OnLost = lambda why: None,
    resume: protocol.Resume | None = None,
    vault_uids: Collection[int] | None = (),
) -> tuple[VaultConnection, protocol.Welcome]:
    """Connect and greet; ConnectionError says whether the socket is missing, nobody listens, or it was refused. The
    vault must be this user's, root's, or one of `vault_uids` (None: anybody's, for who only looks)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, path)
        check_uid(path, peer_uid(sock), vault_uids)
    except FileNotFoundError:
        sock.close()
        raise ConnectionError(f"there is no vault at {path}; start one with `holdfast memory serve`") from None
    except BaseException:
        sock.close()
        raise
    connection = VaultConnection(sock, on_notice, on_lost)
    connection.greet(client, engine_id, resume)
    try:
        async with asyncio.timeout(timeout_s):
            return connection, await asyncio.shield(connection.welcome)
    except BaseException:
        connection.close()
        raise
