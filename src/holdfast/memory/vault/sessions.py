"""One client of a vault: its connection, its process, and what it waits for.

Always true: what the vault answers a client goes out in the order it was said, and not before the keeper has every
record that was put before (hints do not wait); only what a restarted vault must know is recorded: weights it reads, a
seat it has.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, close_all, copy_all
from holdfast.memory.protocol import Failed, Hello, Slabs, encode
from holdfast.memory.vault.uploads import Upload

if TYPE_CHECKING:
    from holdfast.memory.fdsocket import FdConnection
    from holdfast.memory.vault.kept import KeptRecords
    from holdfast.memory.vault.processes import Processes

PREFIX = "client/"


class ClientRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a restarted vault must know of a client; its pidfds are kept beside it."""

    number: int
    client: str
    engine_id: int
    pid: int
    generation: int | None  # the weights it reads
    maps: bool  # it has a seat among the device's mappers
    epoch: int | None  # the epoch it works under
    closed: bool  # its connection had ended, its process had not: it fences the GPU, and is not expected back


decode_client = msgspec.msgpack.Decoder(ClientRecord).decode


class Session:
    """A client, connected or (after a vault's restart) expected back."""

    def __init__(
        self, number: int, hello: Hello, processes: tuple[int, ...], registry: Processes, kept: KeptRecords
    ) -> None:
        self.number = number
        self.client = hello.client
        self.engine_id = hello.engine_id
        self.pid = hello.pid
        self.processes = processes
        self._registry = registry
        self._kept = kept
        self.connection: FdConnection | None = None
        self.generation: int | None = None
        self.maps = False
        self.epoch: int | None = None
        self.closed = False
        self.leaving = False  # it said so: the end of its connection is its own
        self.weights_call = 0  # the call that waits for the weights' machine, 0: none
        self.pool_call = 0
        self.weights_granted = 0  # the call that was granted last: its waiter may have left meanwhile
        self.pool_granted = 0
        self.donation = Upload()  # of weights
        self.pool_donation = Upload()
        self._unacknowledged = 0
        self._unsaid: deque[tuple[msgspec.Struct, list[int]]] = deque()

    # -- saying

    def reply(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        """Say something once the keeper has all; descriptors are copied now, before their record can change."""
        if self.connection is None:
            return
        if not self._unacknowledged:
            self.connection.send(encode(message), fds)
            return
        try:
            self._unsaid.append((message, copy_all(fds or [])))
        except OSError as error:
            self.connection.close(f"no descriptors left: {error}")

    def tell_at_once(self, hint: msgspec.Struct) -> None:
        """Say something that nothing rests on, ahead of what waits for the keeper."""
        if self.connection is not None:
            self.connection.send(encode(hint))

    def reply_slabs(
        self, call: int, sizes: list[int], fds: list[int], made_epoch: int = 0, geometry: str = ""
    ) -> None:
        """Descriptors, in as few frames as can be."""
        for start in range(0, max(1, len(sizes)), FDS_PER_FRAME_MAX):
            end = start + FDS_PER_FRAME_MAX
            self.reply(Slabs(call, sizes[start:end], end < len(sizes), made_epoch, geometry), fds[start:end])

    def fail(self, call: int, code: str, reason: str) -> None:
        self.reply(Failed(call, code, reason))

    def wait_for_keeper(self) -> None:
        """What is said from now on waits until `acknowledge` is called."""
        self._unacknowledged += 1

    def acknowledge(self) -> None:
        self._unacknowledged -= 1
        while self._unsaid and not self._unacknowledged:
            message, fds = self._unsaid.popleft()
            if self.connection is not None:
                self.connection.send(encode(message), fds)
            close_all(fds)

    # -- the keeper's record

    def remember(self) -> None:
        """Put what there is to know into the keeper; what is said from now on waits for that."""
        key = f"{PREFIX}{self.number}"
        if self.generation is None and not self.maps and self.epoch is None:
            self._kept.drop(key)
            return
        kept = self._kept.records.get(key)
        pidfds = kept.fds if kept is not None else self._registry.copies(self.processes)
        if not pidfds:
            return  # its process is over; only somebody who inherited the connection still speaks
        record = ClientRecord(
            self.number, self.client, self.engine_id, self.pid, self.generation, self.maps, self.epoch, self.closed
        )
        self.wait_for_keeper()
        self._kept.put(key, msgspec.msgpack.encode(record), pidfds, self.acknowledge)

    def lives(self, process: int) -> bool:
        return self._registry.live((process,))

    def forget(self) -> None:
        """Nothing of it is to be remembered: its process is over, or it held nothing."""
        self._kept.drop(f"{PREFIX}{self.number}")
        self._registry.leave(self.number, self.processes)

    def drop_unsaid(self) -> None:
        """It is not there to hear it."""
        for _, fds in self._unsaid:
            close_all(fds)
        self._unsaid.clear()

    def __repr__(self) -> str:
        state = "ended" if self.closed else "connected" if self.connection is not None else "expected back"
        return f"<client {self.number} engine {self.engine_id} pid {self.pid} {state}>"
