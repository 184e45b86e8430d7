"""The clients of a vault: their processes, connections and pending calls.

Always true:
- The vault's replies to a client are sent in order, each only after the keeper has acknowledged every record put before
  it. Hints do not wait.
- A client's record has only what a restarted vault must know: the weights it reads, if it is a mapper, and its epoch.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from holdfast.core.procfs import is_ending, is_over, pid_of
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, FdConnection, close_all, copy_all
from holdfast.memory.protocol import Failed, Hello, Slabs, encode
from holdfast.memory.vault.records import VaultRecords

PREFIX = "client/"


@dataclass(slots=True)
class _Process:
    pidfd: int
    identity: int | None
    members: set[int] = field(default_factory=set)  # sessions, by number


class Processes:
    """The registry of client processes, each watched through its pidfd until it ends. Then `over` is called once, with
    the process's number and sessions.

    A session sends the pidfd of its process; the kernel reports the process that connected (`SO_PEERPIDFD`). If they
    differ, the session belongs to both, so no client passes a fence by sending another process's pidfd.

    Always true: all connections of one process count as one process, so when it quiesces, this covers its earlier
    connections. Processes are compared by the pidfd's inode, where the kernel gives each process its own."""

    def __init__(self, over: Callable[[int, set[int]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = over
        self._numbers = itertools.count(1)
        self._known: dict[int, _Process] = {}

    def join(self, session: int, pidfds: list[int]) -> tuple[int, ...]:
        """Add a session to these processes and return their numbers. The registry owns the pidfds from now on."""
        return tuple(dict.fromkeys(self._join(session, pidfd) for pidfd in pidfds))

    def _join(self, session: int, pidfd: int) -> int:
        identity = _identity(pidfd)
        for number, process in self._known.items():
            if identity is not None and process.identity == identity:
                os.close(pidfd)
                process.members.add(session)
                return number
        number = next(self._numbers)
        self._known[number] = _Process(pidfd, identity, {session})
        self._loop.add_reader(pidfd, self._ended, number)
        return number

    def live(self, numbers: tuple[int, ...]) -> bool:
        return any(number in self._known for number in numbers)

    def running(self, numbers: tuple[int, ...]) -> bool:
        """Return True if any of these processes may still run code. One that cannot be inspected (another PID
        namespace, no free descriptor, a hidden /proc) counts as running until its pidfd is readable."""
        pidfds = [self._known[number].pidfd for number in numbers if number in self._known]
        return any(_runs_on(pidfd) for pidfd in pidfds)

    def has(self, numbers: tuple[int, ...], pidfd: int) -> bool:
        """Return True if the pidfd refers to one of these processes, or if the kernel cannot tell."""
        identity = _identity(pidfd)
        known = [self._known[number].identity for number in numbers if number in self._known]
        return identity is None or None in known or identity in known

    def copies(self, numbers: tuple[int, ...]) -> list[int]:
        """Return duplicated pidfds, for a record, of those processes that have not ended."""
        return copy_all([self._known[number].pidfd for number in numbers if number in self._known])

    def leave(self, session: int, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            process = self._known.get(number)
            if process is not None:
                process.members.discard(session)
                if not process.members:
                    self._forget(number)

    def _ended(self, number: int) -> None:
        self._over(number, self._forget(number).members)

    def _forget(self, number: int) -> _Process:
        process = self._known.pop(number)
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        return process


def _runs_on(pidfd: int) -> bool:
    """Return True if the process may still run code.

    A killed process closes its connections 50 to 150 ms before its pidfd is readable (fact 1). /proc shows that it is
    ending before both, but not for a process in a sibling namespace (pid 0): there the fence waits for the pidfd."""
    pid = pid_of(pidfd)
    return not is_over(pidfd) and (not pid or (pid > 0 and not is_ending(pid)))


def _identity(pidfd: int) -> int | None:
    """Return the pidfd's inode. None before Linux 6.9, where all pidfds share one anonymous inode."""
    status, link = os.fstat(pidfd), os.readlink(f"/proc/self/fd/{pidfd}")
    return status.st_ino if link.startswith("pidfd:[") else None


@dataclass(slots=True)
class Upload:
    sizes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def add(self, sizes: list[int], fds: list[int]) -> None:
        self.sizes += sizes
        self.fds += fds

    def take(self) -> Upload:
        taken = Upload(self.sizes, self.fds)
        self.sizes, self.fds = [], []
        return taken

    def drop(self) -> None:
        close_all(self.take().fds)


class ClientRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a restarted vault must know of a client. The keeper stores its pidfds with it."""

    number: int
    client: str
    engine_id: int
    pid: int
    generation: int | None  # the weights it reads
    maps: bool  # it is one of the device's mappers
    epoch: int | None  # the epoch it works under
    closed: bool  # only its connection has ended: it keeps the GPU fence closed and will not reconnect


decode_client = msgspec.msgpack.Decoder(ClientRecord).decode


class Session:
    """A client that is connected, or expected to reconnect after a restart of the vault."""

    def __init__(
        self, number: int, hello: Hello, processes: tuple[int, ...], registry: Processes, records: VaultRecords
    ) -> None:
        self.number = number
        self.client = hello.client
        self.engine_id = hello.engine_id
        self.pid = hello.pid
        self.processes = processes
        self._registry = registry
        self._records = records
        self.connection: FdConnection | None = None
        self.generation: int | None = None
        self.maps = False
        self.epoch: int | None = None
        self.closed = False
        self.leaving = False  # it sent `Leave`: it closes the connection on purpose
        self.weights_call = 0  # the call that waits for the weights lock; 0: none
        self.pool_call = 0
        self.weights_granted = 0  # the call granted last; the client may have given it up in the meantime
        self.pool_granted = 0
        self.donation = Upload()  # of weights
        self.pool_donation = Upload()
        self._unacknowledged = 0
        self._unsaid: deque[tuple[msgspec.Struct, list[int]]] = deque()

    # -- sending

    def reply(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        """Send a message once the keeper has all records. Descriptors are copied now, before their record can
        change."""
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
        """Send a hint at once, ahead of messages that wait for the keeper."""
        if self.connection is not None:
            self.connection.send(encode(hint))

    def reply_slabs(self, call: int, sizes: list[int], fds: list[int], made_epoch: int = 0, geometry: str = "") -> None:
        for start in range(0, max(1, len(sizes)), FDS_PER_FRAME_MAX):
            end = start + FDS_PER_FRAME_MAX
            self.reply(Slabs(call, sizes[start:end], end < len(sizes), made_epoch, geometry), fds[start:end])

    def fail(self, call: int, code: str, reason: str) -> None:
        self.reply(Failed(call, code, reason))

    def wait_for_keeper(self) -> None:
        """Hold back further messages until `acknowledge` is called."""
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
        """Store this client's record in the keeper. Further messages wait for its acknowledgement."""
        key = f"{PREFIX}{self.number}"
        if self.generation is None and not self.maps and self.epoch is None:
            self._records.drop(key)
            return
        old = self._records.by_key.get(key)
        pidfds = old.fds if old is not None else self._registry.copies(self.processes)
        if not pidfds:
            return  # its process has ended; another process inherited the connection
        record = ClientRecord(
            self.number, self.client, self.engine_id, self.pid, self.generation, self.maps, self.epoch, self.closed
        )
        self.wait_for_keeper()
        self._records.put(key, msgspec.msgpack.encode(record), pidfds, self.acknowledge)

    def lives(self, process: int) -> bool:
        return self._registry.live((process,))

    def forget(self) -> None:
        """Drop this client's record: its process has ended, or it held nothing."""
        self._records.drop(f"{PREFIX}{self.number}")
        self._registry.leave(self.number, self.processes)

    def drop_unsaid(self) -> None:
        for _, fds in self._unsaid:
            close_all(fds)
        self._unsaid.clear()

    def __repr__(self) -> str:
        state = "ended" if self.closed else "connected" if self.connection is not None else "expected back"
        return f"<client {self.number} engine {self.engine_id} pid {self.pid} {state}>"
