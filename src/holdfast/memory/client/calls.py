"""The client's side of a connection to a vault: calls with bounded waits, notices, and loss.

Always true:
- Every call ends: with its answer, a refusal, a time-out or the loss of the connection.
- If a caller gives up a wait, the wait is cancelled at the vault too.
- If no caller waits for an answer any more, its descriptors are closed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from holdfast.core.procfs import peer_uid
from holdfast.memory import protocol
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, FdConnection, Frame, close_all


class StaleMemoryLayoutError(Exception):
    """Raised if the vault keeps other weights than this process had mapped: its pointers are no longer valid."""


class VaultRefused(Exception):
    """Raised if the vault refused a call; `code` names the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason


class MemoryLost(msgspec.Struct, frozen=True):
    """Notice: the vault does not have the memory that is mapped here, and does not take it back."""

    reason: str


Notice = protocol.Superseded | protocol.Fence | MemoryLost | protocol.PoolNews | protocol.Deposed | protocol.LetGo
OnNotice = Callable[[Notice], None]
OnLost = Callable[[str], None]
# Bounds of the time added to the vault's own time-out for its answer to arrive: a tenth of it, within these.
GRACE_S = (0.2, 2.0)
# Moving all of a GPU's memory, pinned first at a few GB/s, takes half a minute; the machine may be busy.
MOVE_S = 300.0
CONNECT_S = 5.0


def patience_s(timeout_ms: int) -> float:
    """Return how long to wait for the answer to a call that the vault itself gives up after `timeout_ms`."""
    timeout_s = max(0, timeout_ms) / 1000
    shortest_s, longest_s = GRACE_S
    return timeout_s + min(longest_s, max(shortest_s, timeout_s / 10))


class VaultConnection:
    """A connection to a vault, made by `open_connection`."""

    def __init__(self, sock: socket.socket, on_notice: OnNotice, on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[tuple[Any, list[int]]]] = {}
        self._slabs: dict[int, tuple[list[int], list[int]]] = {}
        self._on_notice = on_notice
        self._on_lost = on_lost
        self.welcome: asyncio.Future[protocol.Welcome] = self._loop.create_future()
        self._connection = FdConnection(sock, self._on_frame, self._lost)

    @property
    def open(self) -> bool:
        return self._connection.open

    def greet(self, client: str, engine_id: int, resume: protocol.Resume | None) -> None:
        pidfd = os.pidfd_open(os.getpid())
        try:
            ours = protocol.VERSIONS
            hello = protocol.Hello(ours.first, client, engine_id, os.getpid(), resume, ours.last, ours.features)
            self._connection.send(protocol.encode(hello), [pidfd])
        finally:
            os.close(pidfd)

    async def call(self, make: Callable[[int], msgspec.Struct], timeout_s: float, fds: list[int] | None = None) -> Any:
        """Send the message that `make` builds from the call's number, and wait for the answer."""
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
                close_all(future.result()[1])  # the answer came at the same moment
            self._connection.send(protocol.encode(protocol.CancelCall(next(self._numbers), number)))
            raise
        finally:
            del self._answers[number]

    async def send_with_fds(
        self, make: Callable[[int, slice, bool], msgspec.Struct], timeout_s: float, fds: list[int]
    ) -> None:
        """Send descriptors in as many calls as needed. `make` gets the call's number, the slice, and True for the
        last."""
        for start in range(0, len(fds), FDS_PER_FRAME_MAX):
            which = slice(start, start + FDS_PER_FRAME_MAX)
            last = which.stop >= len(fds)
            await self.call(lambda n, which=which, last=last: make(n, which, last), timeout_s, fds[which])  # type: ignore[misc]

    def tell(self, make: Callable[[int], msgspec.Struct]) -> None:
        """Send a call without waiting for its answer."""
        self._connection.send(protocol.encode(make(next(self._numbers))))

    # -- receiving

    def _on_frame(self, frame: Frame) -> None:
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
            if not self.welcome.done():
                self.welcome.set_exception(VaultRefused(message.code, message.reason))
                self.welcome.exception()  # perhaps no caller waits: mark the exception as retrieved
        else:
            self._answer(message, frame.fds)

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
        """Close on purpose, so that the vault does not wait for this process to end."""
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
    """Raise PermissionError if another user runs the vault: it would get the weights and the KV pool."""
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
    """Connect and send the hello. ConnectionError says whether the socket is missing, no process listens, or the vault
    refused. The vault must run as this user, root or one of `vault_uids` (None: any user, for read-only callers)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, path)
        check_uid(path, peer_uid(sock), vault_uids)
    except FileNotFoundError:
        sock.close()
        raise ConnectionError(f"there is no vault at {path}; start one with `holdfast run vault`") from None
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


# -- calls of a process that has no device


async def call_once(
    path: str,
    make: Callable[[int], protocol.Call],
    timeout_s: float,
    *,
    connect_s: float = CONNECT_S,
    vault_uids: Collection[int] | None = (),
) -> Any:
    """Connect, make one call, and close. Raises TimeoutError, ConnectionError or VaultRefused, like every call."""
    connection, _ = await open_connection(path, f"once-{os.getpid()}", -1, connect_s, vault_uids=vault_uids)
    try:
        return await connection.call(make, timeout_s)
    finally:
        connection.close()


class VaultStatus(msgspec.Struct, frozen=True):
    weights: str  # EMPTY, RW, COMMITTED, RO on the device; WARM, DEMOTING, PROMOTING; LOST from host memory
    device_bytes: int = 0
    host_bytes: int = 0


async def vault_status(path: str, timeout_s: float = CONNECT_S) -> VaultStatus:
    """Return where the weights of the vault at this socket are."""
    status = await call_once(path, protocol.GetStatus, timeout_s, connect_s=timeout_s)
    return msgspec.json.decode(status.facts, type=VaultStatus)


async def demote(path: str, timeout_s: float = MOVE_S) -> protocol.Moved:
    """Move the weights of the vault at this socket from the device to host memory, and drop a KV pool without owner.
    Return when the device's memory is free. VaultRefused names the reason (`empty`, `mapped` with the sessions, `busy`,
    `warm`, `over_budget`, `failed`). After TimeoutError or ConnectionError the move may still continue."""
    moved: protocol.Moved = await call_once(path, protocol.Demote, timeout_s)
    return moved


async def promote(path: str, timeout_s: float = MOVE_S) -> protocol.Moved:
    """Move the weights back to the device, as they were committed. Return when they can be read. VaultRefused names the
    reason (`hot`, `busy`, `over_budget`, `failed`)."""
    moved: protocol.Moved = await call_once(path, protocol.Promote, timeout_s)
    return moved
