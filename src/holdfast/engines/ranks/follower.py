"""Runs one further process (rank) of an engine, which maps memory and decides nothing: it obeys its leader and dies
with it.

An order is the name of a rank's method, with its arguments. Orders come over a socket pair as JSON, each with a number
and perhaps descriptors. The rank runs them concurrently, and answers each by its number.

Always true:
- The process ends when its leader ends (a death signal, and EOF on the socket pair).
- The process ends when an order fails, which ends the engine too.
- Descriptors that it receives are close-on-exec. It closes them on `become_standby`: they hold the election's lock, and
  only then may another engine win the election (facts 2, 4d).
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.log_files import say
from holdfast.core.tasks import Tasks
from holdfast.engines.contract import FATAL_ERRORS
from holdfast.memory.fdsocket import close_all, receive

PR_SET_PDEATHSIG = 1
ORDER_BYTES_MAX = 4096


class RankOrders(Protocol):
    """The orders that every rank obeys; an engine's rank class may add more."""

    async def load(self) -> None:
        """Map everything and stand by."""

    async def hold(self) -> None:
        """Keep all mappings unchanged, for a canary, until `go_on`."""

    async def go_on(self) -> None: ...

    async def sleep(self) -> None:
        """Unmap everything, if this rank stands by unmapped."""

    async def unmap(self) -> None:
        """Unmap everything."""

    async def remap(self) -> None:
        """Map everything again, as a standby."""

    async def wake(self, epoch: int) -> None:
        """Work under the leader's epoch from now on."""

    async def fence(self) -> None:
        """Return when no queued GPU work of an earlier owner can still write here."""

    async def become_standby(self) -> None:
        """Leave the epoch, and stand by again."""


class Tether(msgspec.Struct, frozen=True):
    """Ties a rank's process to its leader's."""

    control: int  # the descriptor of its end of the socket pair
    parent: int  # the leader's pid
    dies_with_parent: bool = True  # False in tests, which leave a rank process behind


class RankLaunch(msgspec.Struct, frozen=True):
    """The descriptors that a rank with its own vault inherits from its leader."""

    tether: Tether
    steps: int  # its end of the steps' socket pair
    table: int  # its end of the socket pair on which the ranks agree
    work: int  # a file, written by the leader: what this rank holds and computes

    def read_work(self) -> bytes:
        with os.fdopen(self.work, "rb") as file:
            file.seek(0)
            return file.read()


def tie_to_leader(tether: Tether) -> bool:
    """Have this process die with its leader; return False if the leader has already ended. Call it first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader handles a terminal's Ctrl-C
    raise_descriptor_limit()
    if not tether.dies_with_parent:
        return True
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == tether.parent  # the leader may have died before prctl


def run_rank(text: str, rank: Callable[[RankLaunch, LeaderLink], RankOrders]) -> int:
    """Run a rank's process until its leader is gone. `text` is its launch (JSON); `rank` makes the rank."""
    launch = msgspec.json.decode(text, type=RankLaunch)

    async def obey() -> None:
        link = LeaderLink(launch.tether)
        await link.obey(rank(launch, link))
        os._exit(0)  # nothing needs cleaning up, and a thread may hang in an all-reduce

    if tie_to_leader(launch.tether):
        asyncio.run(obey())
    return 1


class LeaderLink:
    """A rank's end of the socket pair for orders."""

    def __init__(self, tether: Tether) -> None:
        self._control = socket.socket(fileno=tether.control)
        self._control.setblocking(False)
        # Few at a time: the leader waits for its orders.
        self._tasks = Tasks("rank", lambda error: end(f"{type(error).__name__}: {error}"))
        self._fds: list[int] = []

    def note(self, what: str, words: str) -> None:
        """Send the leader an unsolicited message."""
        self._control.send(json.dumps([0, what, words[: ORDER_BYTES_MAX // 8]]).encode())

    async def obey(self, rank: RankOrders) -> None:
        while True:
            text, fds = await self._receive()
            if not text:
                return
            self._fds += fds
            number, do, fields = json.loads(text)
            self._tasks.spawn(self._answer(number, do, getattr(rank, do)(**fields)), do)

    async def _answer(self, number: int, do: str, work: Awaitable[Any]) -> None:
        try:
            answer = await work
        except FATAL_ERRORS as error:  # external failures: one line, no traceback
            end(f"{do} failed: {str(error) or type(error).__name__}")
            return
        if do == "become_standby":
            close_all(self._fds)
            self._fds = []
        self._control.send(json.dumps([number, answer]).encode())

    async def _receive(self) -> tuple[bytes, list[int]]:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._control, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._control)
        try:
            return receive(self._control)
        except EOFError:
            return b"", []


def end(why: str) -> None:
    """End this process after a failure; its leader sees that, and ends too."""
    say(f"rank process {os.getpid()} ends: {why}")
    os._exit(1)
