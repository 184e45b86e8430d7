"""One client of a vault: its connection, its process, and what it waits for.

Always true: what the vault says to a client goes out in the order it was said, and not before the keeper has every
record that was put before; a client's process is known by the pidfd it sent, and watched until it is over even
after its connection is gone, because the GPU fence needs that.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from holdfast.memory.protocol import Failed, Hello, encode

if TYPE_CHECKING:
    from holdfast.memory.fdsocket import FdConnection
    from holdfast.memory.kept import KeptRecords
    from holdfast.memory.vault_weights import Upload

PREFIX = "client/"


class ClientRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a restarted vault must know of a client; its pidfd is kept beside it."""

    number: int
    client: str
    engine_id: int
    pid: int
    generation: int | None  # the weights it reads
    maps: bool  # it has a seat among the device's mappers
    epoch: int | None  # the epoch it works under


decode_client = msgspec.msgpack.Decoder(ClientRecord).decode


class Session:
    """A client, connected or (after a vault's restart) expected back."""

    def __init__(self, number: int, hello: Hello, pidfd: int, kept: KeptRecords) -> None:
        self.number = number
        self.client = hello.client
        self.engine_id = hello.engine_id
        self.pid = hello.pid
        self._pidfd = pidfd  # its copy in the record is the record's own
        self._kept = kept
        self.connection: FdConnection | None = None
        self.generation: int | None = None
        self.maps = False
        self.epoch: int | None = None
        self.weights_call = 0  # the call that waits for the weights' machine, 0: none
        self.pool_call = 0
        self.donation: Upload | None = None
        self._unacknowledged = 0
        self._unsaid: deque[tuple[msgspec.Struct, list[int]]] = deque()

    # -- saying

    def reply(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        if self._unacknowledged:
            self._unsaid.append((message, fds or []))
        elif self.connection is not None:
            self.connection.send(encode(message), fds)

    def fail(self, call: int, code: str, reason: str) -> None:
        self.reply(Failed(call, code, reason))

    def remember(self) -> None:
        """Put what there is to know into the keeper; what is said from now on waits for that."""
        record = ClientRecord(
            self.number, self.client, self.engine_id, self.pid, self.generation, self.maps, self.epoch
        )
        self._unacknowledged += 1
        self._kept.put(f"{PREFIX}{self.number}", msgspec.msgpack.encode(record), [self._pidfd], self._acknowledged)

    def wait_for_keeper(self) -> None:
        """What is said from now on waits until `acknowledge` is called."""
        self._unacknowledged += 1

    def acknowledge(self) -> None:
        self._acknowledged()

    def _acknowledged(self) -> None:
        self._unacknowledged -= 1
        while self._unsaid and not self._unacknowledged:
            message, fds = self._unsaid.popleft()
            if self.connection is not None:
                self.connection.send(encode(message), fds)

    def forget(self) -> None:
        """Nothing of it is to be remembered: its process is over, or it held nothing."""
        self._kept.drop(f"{PREFIX}{self.number}")

    @property
    def holds_something(self) -> bool:
        return self.generation is not None or self.maps

    def __repr__(self) -> str:
        state = "connected" if self.connection is not None else "expected back"
        return f"<client {self.number} engine {self.engine_id} pid {self.pid} {state}>"
