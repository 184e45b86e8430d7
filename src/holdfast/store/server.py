"""The embedded store's server: sockets and the durable file around `StoreMachine`.

Always true: nothing a client sends or fails to read ends the process or grows it without bound. A receiver that does
not read gets no more than a fixed backlog plus one snapshot, and is not read from meanwhile; a message we cannot
read gets a `Refused` with the cause, and its connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from holdfast.core.address import Address
from holdfast.core.errors import UserError
from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.ports import Listener, Network
from holdfast.store import messages as m
from holdfast.store.durable import DurableFile
from holdfast.store.machine import DEFAULT_LIMITS, Effects, Limits, Send, StoreMachine
from holdfast.wire.frames import FrameError, FrameSplitter, encode
from holdfast.wire.net import tune

_log = logging.getLogger(__name__)

# A connection is one process of the deployment; half of the usual descriptor limit after `serve` has raised it.
CONNECTIONS_MAX = 4096
# Over this many unsent bytes a receiver counts as not reading: a few seconds of a busy store's changes.
UNSENT_BYTES_MAX = 4 * 1024 * 1024
# Durable writes of one connection that wait for the disk; clients wait for each answer, so few are ever needed.
UNSAVED_PER_CONNECTION_MAX = 64
# Whoever connects says Hello at once; a port scanner does not.
HELLO_TIMEOUT_S = 10.0
# How long a refused peer may take to read why.
LINGER_S = 1.0
# Between attempts to write a disk that has failed.
SAVE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What one embedded store bears."""

    limits: Limits = DEFAULT_LIMITS
    connections_max: int = CONNECTIONS_MAX
    unsent_bytes_max: int = UNSENT_BYTES_MAX


DEFAULT_SETTINGS = ServerSettings()


class StoreServer:
    """One listening store. `run` serves until cancelled."""

    def __init__(
        self, address: Address, network: Network, durable: DurableFile, settings: ServerSettings = DEFAULT_SETTINGS
    ) -> None:
        self.settings = settings
        self._address = address
        self._network = network
        self._durable = durable
        self._peers: dict[int, _Peer] = {}
        self._next_peer = 0
        self._listener: Listener | None = None
        self._unsaved: list[Send] = []
        self._save_wanted = asyncio.Event()
        self.machine = StoreMachine({}, settings.limits)

    def __repr__(self) -> str:
        return f"store {self._address} serving: {self.machine!r}"

    async def start(self) -> Address:
        """Load the durable keys, then listen."""
        self.machine = StoreMachine(self._durable.load(), self.settings.limits)
        self._listener = await self._network.listen(self._address, lambda: _Peer(self))
        self._address = self._listener.address
        return self._address

    async def run(self) -> None:
        """Keep the durable file up to date; on the way out close everything."""
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
            peer.abort()

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

    def admit(self, peer: _Peer) -> int | None:
        """Give a new connection its number, or None when the house is full."""
        if len(self._peers) >= self.settings.connections_max:
            return None
        self._next_peer += 1
        self._peers[self._next_peer] = peer
        self.machine.connect(self._next_peer)
        return self._next_peer

    def dismiss(self, number: int) -> None:
        """A connection is over, and with it its lease."""
        if self._peers.pop(number, None) is not None:
            self.deliver(self.machine.disconnect(number))

    def deliver(self, effects: Effects) -> None:
        for send in effects.sends:
            if (peer := self._peers.get(send.connection)) is not None:
                peer.send(send.message)
        for send in effects.after_save:
            self._peers[send.connection].unsaved += 1
            self._unsaved.append(send)
            self._save_wanted.set()


async def serve(
    address: Address, durable_path: Path, network: Network, on_ready: Callable[[Address], None]
) -> None:
    """Serve until cancelled. `on_ready` is told the bound address once clients can connect."""
    raise_descriptor_limit()
    server = StoreServer(address, network, DurableFile(durable_path))
    try:
        bound = await server.start()
    except OSError as error:
        mend = "stop what uses it or choose another"
        raise UserError(f"the store cannot listen on {address}: {error}; {mend}") from error
    on_ready(bound)
    await server.run()


class _Peer(asyncio.Protocol):
    """One client's connection, from accept to close."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._splitter = FrameSplitter()
        # What one read brought and is not handled yet; reading pauses while it cannot be, so it stays that small.
        self._inbox: deque[memoryview] = deque()
        self._number: int | None = None
        self._blocked = False
        self._hello_timer: asyncio.TimerHandle | None = None
        self.unsaved = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._server.settings.unsent_bytes_max)
        tune(transport)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._no_hello)
        self._number = self._server.admit(self)
        if self._number is None:
            self._refuse("Full", f"this store has its {self._server.settings.connections_max} connections already")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_hello_timer()
        self._leave()

    def data_received(self, data: bytes) -> None:
        if self._number is None:
            return  # refused: what still comes is not read, so that the refusal can be
        try:
            self._inbox.extend(self._splitter.feed(data))
        except FrameError as error:
            self._refuse("Malformed", str(error))
            return
        self.work()

    def work(self) -> None:
        """Handle what was received, as long as the answers find room."""
        while self._inbox and not self._held():
            assert self._number is not None
            try:
                message = m.decode_to_server(self._inbox.popleft())
            except FrameError as error:
                self._refuse("Malformed", str(error))
                return
            self._server.deliver(self._server.machine.handle(self._number, message))
        if self._number is None or self._transport.is_closing():
            return
        if self._held():
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

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

    def send(self, message: m.ToClient) -> None:
        if isinstance(message, m.Refused):
            self._refuse(message.code, message.reason)
            return
        if isinstance(message, m.Welcome):
            self._stop_hello_timer()
        self._transport.write(encode(message))

    def abort(self) -> None:
        self._transport.abort()

    def _held(self) -> bool:
        return self._blocked or self.unsaved >= UNSAVED_PER_CONNECTION_MAX

    def _refuse(self, code: str, reason: str) -> None:
        _log.warning("refused a connection: %s: %s", code, reason)
        self._stop_hello_timer()
        self._transport.write(encode(m.Refused(code, reason)))
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        # Closing with unread input would reset the connection and the reason with it.
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)
        self._leave()

    def _leave(self) -> None:
        number, self._number = self._number, None
        self._inbox.clear()
        if number is not None:
            self._server.dismiss(number)

    def _no_hello(self) -> None:
        if self._number is not None:
            self._refuse("NoHello", f"no Hello within {HELLO_TIMEOUT_S:g} s")

    def _stop_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None


def _call_of(send: Send) -> int:
    assert isinstance(send.message, m.Done)
    return send.message.call
