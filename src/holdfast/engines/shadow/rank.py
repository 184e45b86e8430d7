"""What every further process of an engine (a rank) does: sit beside its engine, take orders, die with it.

Orders come over a socket pair as JSON, each with a number and perhaps descriptors; they are carried out side by side,
and each is answered by its number. Always true: the process ends when its engine does (a death signal, and EOF on the
socket pair) and when an order fails, which ends the engine too; descriptors it gets are close-on-exec.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.tasks import Tasks
from holdfast.core.unwritten import say
from holdfast.memory.fdsocket import receive

PR_SET_PDEATHSIG = 1
ORDER_BYTES_MAX = 4096

# Takes an order's name, its fields and its descriptors; what it gives is the answer.
CarryOut = Callable[[str, dict[str, Any], list[int]], Awaitable[Any]]


class Seat(msgspec.Struct, frozen=True):
    """Where a rank sits."""

    control: int  # the descriptor of its end of the socket pair
    parent: int  # the engine's pid
    dies_with_parent: bool = True  # False in tests: an engine of several processes may leave one behind


def sit(seat: Seat) -> bool:
    """To be called first; False: the engine is gone already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the engine's to answer
    raise_descriptor_limit()
    if not seat.dies_with_parent:
        return True
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == seat.parent  # it may have died before the signal was asked for


class Orders:
    """A rank's end of the socket pair."""

    def __init__(self, seat: Seat) -> None:
        self._control = socket.socket(fileno=seat.control)
        self._control.setblocking(False)
        # An engine gives a few at a time, and waits for them.
        self._tasks = Tasks("rank", lambda error: end(f"{type(error).__name__}: {error}"))

    def note(self, what: str, words: str) -> None:
        """Tell the engine something it did not ask for."""
        self._control.send(json.dumps([0, what, words[: ORDER_BYTES_MAX // 8]]).encode())

    async def obey(self, carry_out: CarryOut) -> None:
        """Until the engine is gone."""
        while True:
            text, fds = await self._receive()
            if not text:
                return
            number, do, fields = json.loads(text)
            self._tasks.spawn(self._answer(number, carry_out(do, fields, fds)), do)

    async def _answer(self, number: int, work: Awaitable[Any]) -> None:
        self._control.send(json.dumps([number, await work]).encode())

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
    """This process cannot go on; its engine sees that, and ends too."""
    say(f"rank process {os.getpid()} ends: {why}")
    os._exit(1)
