"""A seat: one further process of an engine, which maps memory and decides nothing. It hangs on its leader, takes
orders, and dies with it.

There are nine orders, the methods of `Seat`. They come over a socket pair as JSON, each with a number and perhaps
descriptors; they are carried out side by side, and each is answered by its number. Always true: the process ends when
its leader does (a death signal, and EOF on the socket pair) and when an order fails, which ends the engine too;
descriptors it gets are close-on-exec, and closed when it rests: with them it holds the election's lock, and only then
may another win it (facts 2, 4d).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.tasks import Tasks
from holdfast.core.unwritten import say
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.memory.devices import DeviceError
from holdfast.memory.errors import StaleMemoryLayoutError, VaultRefused
from holdfast.memory.fdsocket import close_all, receive

PR_SET_PDEATHSIG = 1
ORDER_BYTES_MAX = 4096
FAILURES = (TimeoutError, OSError, DeviceError, VaultRefused, StaleMemoryLayoutError)  # anything else is our own bug

Order = Callable[..., Awaitable[Any]]


class Seat(Protocol):
    """What every seat can be told."""

    async def load(self) -> None:
        """Have everything mapped, and stand by."""

    async def hold(self) -> None:
        """Keep what is mapped where it is, for a canary, until `go_on`."""

    async def go_on(self) -> None: ...

    async def sleep(self) -> None:
        """Give the mappings up, if it is asked to stand by without them."""

    async def let_go(self) -> None:
        """Give the mappings up, however it stands by."""

    async def stand_up(self) -> None:
        """Have again what was let go of, as it stands by."""

    async def wake(self, epoch: int) -> None:
        """Work under the leader's epoch from now on."""

    async def fence(self) -> None:
        """Answer once no earlier owner's queued work can land here any more."""

    async def rest(self) -> None:
        """Step back from the epoch, and stand by again."""


def orders_of(seat: Seat) -> dict[str, Order]:
    pause: dict[str, Order] = {"hold": seat.hold, "go_on": seat.go_on, "sleep": seat.sleep}
    pause |= {"let_go": seat.let_go, "stand_up": seat.stand_up}
    return pause | {"load": seat.load, "wake": seat.wake, "fence": seat.fence, "rest": seat.rest}


class Tether(msgspec.Struct, frozen=True):
    """What a seat hangs on."""

    control: int  # the descriptor of its end of the socket pair
    parent: int  # the leader's pid
    dies_with_parent: bool = True  # False in tests: an engine of several processes may leave one behind


def tied(tether: Tether) -> bool:
    """To be called first; False: the leader is gone already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the leader's to answer
    raise_descriptor_limit()
    if not tether.dies_with_parent:
        return True
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == tether.parent  # it may have died before the signal was asked for


class Orders:
    """A seat's end of the socket pair."""

    def __init__(self, tether: Tether) -> None:
        self._control = socket.socket(fileno=tether.control)
        self._control.setblocking(False)
        # A leader gives a few at a time, and waits for them.
        self._tasks = Tasks("seat", lambda error: end(f"{type(error).__name__}: {error}"))
        self._fds: list[int] = []

    def note(self, what: str, words: str) -> None:
        """Tell the leader something it did not ask for."""
        self._control.send(json.dumps([0, what, words[: ORDER_BYTES_MAX // 8]]).encode())

    async def obey(self, orders: dict[str, Order]) -> None:
        """Until the leader is gone."""
        while True:
            text, fds = await self._receive()
            if not text:
                return
            self._fds += fds
            number, do, fields = json.loads(text)
            self._tasks.spawn(self._answer(number, do, orders[do](**fields)), do)

    async def _answer(self, number: int, do: str, work: Awaitable[Any]) -> None:
        try:
            answer = await work
        except FAILURES as error:  # the outside world's: a line is enough
            end(f"{do} failed: {str(error) or type(error).__name__}")
            return
        if do == "rest":
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


class SeatInhabitant:
    """What a seat's memory tells: its leader hears it, or the process ends."""

    books: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def __init__(self, orders: Orders) -> None:
        self._note = orders.note

    def fatal(self, why: str) -> None:
        end(why)

    def memory(self, why: str) -> None:
        self._note("memory", why)

    def loading(self, why: str) -> None:
        self._note("loading", why)

    def owner_gone(self, epoch: int) -> None:
        """The leader's own vault tells it."""

    def room(self) -> None:
        """Nobody waits here."""


def ends_when_emptied(memory: VaultMemory) -> None:
    """An engine of several pools that works when one of its vaults comes back empty gives back what it has mapped
    there, then ends: its standby goes on from memory the vault knows. One that stands by verifies, and stays."""
    give_back = memory.client.on_reattached
    assert give_back is not None, "a pool has its own way back"
    why = f"the vault at {memory.place.vault_socket} was restarted empty"

    async def reattached() -> None:
        try:
            await give_back()
        except VaultRefused as refused:
            if memory.owned is not None:
                memory.inhabitant.fatal(f"{why}, and takes nothing back: {refused}")
            raise
        if memory.owned is not None:
            memory.inhabitant.fatal(f"{why}; it has back what was mapped here")

    memory.client.on_reattached = reattached


def end(why: str) -> None:
    """This process cannot go on; its leader sees that, and ends too."""
    say(f"rank process {os.getpid()} ends: {why}")
    os._exit(1)
