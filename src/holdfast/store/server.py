"""Runs the embedded store: sockets and the durable file around `StoreMachine`.

Always true: nothing that a client sends, or does not read, ends the process or grows it without bound. For a client
that does not read, the server queues at most a fixed backlog plus one snapshot, and meanwhile reads nothing from it. A
malformed message is answered with `Refused` and the cause, and its connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.core.address import Address
from holdfast.core.errors import UserError
from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.ports import Listener, Network
from holdfast.store import messages as m
from holdfast.store.machine import DEFAULT_LIMITS, Effects, Send, StoreLimits, StoreMachine
from holdfast.wire.accepting import SHARE, connections_max
from holdfast.wire.connection import FULL, Refused, ServerConnection, turn_out_strangers

FORMAT = "holdfast-store-1"


class _Content(msgspec.Struct, frozen=True, array_like=True):
    format: str
    items: dict[str, bytes]


class DurableFile:
    """The file with the unleased keys.

    Always true: it holds one complete state, never a mixture (written beside, synced, renamed); a file that cannot be
    read is never overwritten: the store refuses to start."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, bytes]:
        mend = "restore it from a backup, or move it away to start with an empty store"
        try:
            content = msgspec.msgpack.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the store's file {self._path}: {error}; {mend}") from error
        if content.format != FORMAT:
            raise UserError(f"the store's file {self._path} has format {content.format!r}, not {FORMAT!r}; {mend}")
        return content.items

    async def save(self, items: dict[str, bytes]) -> None:
        """Return once `items` would survive a power cut; raise OSError otherwise."""
        # A sync can take long on a busy disk; pings must be answered meanwhile.
        await asyncio.to_thread(self._replace, msgspec.msgpack.encode(_Content(FORMAT, items)))

    def _replace(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(self._path.name + ".new")
        with open(beside, "wb", opener=_private) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


_log = logging.getLogger(__name__)

# A connection is one process of the deployment. Fewer where the descriptor limit is low: the file needs some, too.
CONNECTIONS_MAX = 4096
# With more unsent bytes a receiver counts as not reading: a few seconds of a busy store's changes.
UNSENT_BYTES_MAX = 4 * 1024 * 1024
# Durable writes of one connection that wait for the disk; few are needed, because clients wait for each answer.
UNSAVED_PER_CONNECTION_MAX = 64
# A client sends Hello at once; a port scanner does not.
HELLO_TIMEOUT_S = 10.0
# Between attempts to write after a disk error.
SAVE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    limits: StoreLimits = DEFAULT_LIMITS
    connections_max: int = CONNECTIONS_MAX
    unsent_bytes_max: int = UNSENT_BYTES_MAX


DEFAULT_SETTINGS = ServerSettings()


class StoreServer:
    """A listening store. `run` serves until cancelled."""

    def __init__(
        self, address: Address, network: Network, durable: DurableFile, settings: ServerSettings = DEFAULT_SETTINGS
    ) -> None:
        self.settings = settings
        self._address = address
        self._network = network
        self._durable = durable
        self._peers: dict[int, StoreSession] = {}
        self._next_peer = 0
        self._listener: Listener | None = None
        self._unsaved: list[Send] = []
        self._save_wanted = asyncio.Event()
        self.machine = StoreMachine({}, settings.limits)

    def __repr__(self) -> str:
        return f"store {self._address} serving: {self.machine!r}"

    async def start(self) -> Address:
        """Load the durable keys, then listen; return the bound address."""
        self.machine = StoreMachine(self._durable.load(), self.settings.limits)
        self._listener = await self._network.listen(self._address, lambda: StoreSession(self))
        self._address = self._listener.address
        return self._address

    async def run(self) -> None:
        """Keep the durable file up to date until cancelled; then close all connections."""
        try:
            while True:
                await self._save_wanted.wait()
                await self._save()
        finally:
            self.close()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for peer in list(self._peers.values()):
            peer.transport.abort()

    async def _save(self) -> None:
        self._save_wanted.clear()
        waiting, self._unsaved = self._unsaved, []
        try:
            await self._durable.save(self.machine.durable_items())
        except OSError as error:
            _log.error("cannot write the durable keys: %s", error)
            reason = f"the store could not write its file: {error}"
            waiting = [Send(send.connection, m.Failed(_call_of(send), reason)) for send in waiting]
            asyncio.get_running_loop().call_later(SAVE_RETRY_S, self._save_wanted.set)
        for send in waiting:
            if (peer := self._peers.get(send.connection)) is not None:
                peer.unsaved -= 1
        self.deliver(Effects(waiting))
        for number in {send.connection for send in waiting}:
            if (peer := self._peers.get(number)) is not None:
                peer.work()

    @property
    def connections_max(self) -> int:
        return min(self.settings.connections_max, connections_max(SHARE))

    def admit(self, peer: StoreSession) -> int | None:
        """Return a new connection's number, or None if there are too many. Connections without a Hello make room."""
        if len(self._peers) >= self.connections_max and not turn_out_strangers(self._peers.values()):
            return None
        self._next_peer += 1
        self._peers[self._next_peer] = peer
        self.machine.connect(self._next_peer)
        return self._next_peer

    def dismiss(self, number: int) -> None:
        if self._peers.pop(number, None) is not None:
            self.deliver(self.machine.disconnect(number))

    def deliver(self, effects: Effects) -> None:
        for send in effects.sends:
            if (peer := self._peers.get(send.connection)) is not None:
                peer.deliver(send.message)
        for send in effects.after_save:
            self._peers[send.connection].unsaved += 1
            self._unsaved.append(send)
            self._save_wanted.set()


async def serve(address: Address, durable_path: Path, network: Network, on_ready: Callable[[Address], None]) -> None:
    """Serve until cancelled. Call `on_ready` with the bound address once clients can connect."""
    raise_descriptor_limit()
    server = StoreServer(address, network, DurableFile(durable_path))
    try:
        bound = await server.start()
    except OSError as error:
        mend = "stop what uses it or choose another"
        raise UserError(f"the store cannot listen on {address}: {error}; {mend}") from error
    on_ready(bound)
    await server.run()


class StoreSession(ServerConnection):
    def __init__(self, server: StoreServer) -> None:
        super().__init__(
            m.decode_to_server, hello_timeout_s=HELLO_TIMEOUT_S, unsent_bytes_max=server.settings.unsent_bytes_max
        )
        self._server = server
        # Unhandled frames of one read; reading pauses while they cannot be handled, so there are no more.
        self._inbox: deque[memoryview] = deque()
        self._number: int | None = None
        self._blocked = False
        self.unsaved = 0

    def on_connected(self) -> None:
        self._number = self._server.admit(self)
        if self._number is None:
            self.refuse(FULL, f"this store has its {self._server.connections_max} connections already")

    def on_left(self, exc: Exception | None, *, refused: bool) -> None:
        number, self._number = self._number, None
        self._inbox.clear()
        if number is not None:
            self._server.dismiss(number)

    def on_frames(self, payloads: list[memoryview]) -> None:
        self._inbox.extend(payloads)
        self.work()

    def work(self) -> None:
        """Handle received frames until the answers have no room; then pause reading."""
        while self._inbox and not self._held():
            assert self._number is not None
            if (message := self.read(self._inbox.popleft())) is None:
                return
            self._server.deliver(self._server.machine.handle(self._number, message))
        if self._number is None or self.transport.is_closing():
            return
        if self._held():
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self._blocked = True
        if self._number is not None:
            self._server.machine.block(self._number)

    def resume_writing(self) -> None:
        self._blocked = False
        if self._number is None:
            return
        self._server.machine.unblock(self._number)
        while not self._blocked:
            effects = self._server.machine.refresh(self._number)
            if not effects.sends:
                break
            self._server.deliver(effects)
        self.work()

    def deliver(self, message: m.ToClient) -> None:
        if isinstance(message, Refused):
            self.refuse(message.code, message.reason)
        elif isinstance(message, m.Welcome):
            self.welcome(message)
        else:
            self.send(message)

    def _held(self) -> bool:
        return self._blocked or self.unsaved >= UNSAVED_PER_CONNECTION_MAX


def _call_of(send: Send) -> int:
    assert isinstance(send.message, m.Done)
    return send.message.call
