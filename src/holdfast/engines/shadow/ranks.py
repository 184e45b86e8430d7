"""The further processes of an engine, from its side: started, given orders, fatal to it when one of them is gone.

Always true: an order is over when every rank has answered it; a rank that ends is told once (`on_gone`), and whoever
waits for its answer gets a ConnectionError; `stop` leaves none behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.engines.shadow.rank import ORDER_BYTES_MAX, Seat

END_S = 5.0  # a rank that was told to end does so in milliseconds; then it is killed


@dataclass(slots=True, eq=False)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    gone: bool = False


@dataclass(slots=True)
class RankProcesses:
    """Ranks 1, 2, … of this process's engine."""

    on_gone: Callable[[str], None] = lambda why: None
    on_note: Callable[[int, str, str], None] = lambda rank, what, words: None  # a rank's word that nobody asked for
    dies_with_parent: bool = True
    _children: list[_Child] = field(default_factory=list)
    _numbers: int = 0

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def spawn(self, module: str, launch: Callable[[Seat], bytes], pass_fds: tuple[int, ...] = ()) -> None:
        """The next rank: `python -m module LAUNCH`. From the main thread: the death signal is bound to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            seat = Seat(theirs.fileno(), os.getpid(), self.dies_with_parent)
            process = subprocess.Popen(
                [sys.executable, "-m", module, launch(seat).decode()],
                pass_fds=(seat.control, *pass_fds),
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        ours.setblocking(False)
        child = _Child(len(self._children) + 1, process, ours)
        self._children.append(child)
        asyncio.get_running_loop().add_reader(ours, self._heard, child)

    async def order(self, do: str, timeout_s: float | None, fds: tuple[int, ...] = (), **fields: Any) -> list[Any]:
        """What each rank answers, in their order. No `timeout_s`: for what only the outside world ends."""
        self._numbers += 1
        number, loop = self._numbers, asyncio.get_running_loop()
        text = json.dumps([number, do, fields]).encode()
        assert len(text) <= ORDER_BYTES_MAX, f"the order {do} is too long"
        try:
            async with asyncio.timeout(timeout_s):
                for child in self._children:
                    if child.gone:
                        raise ConnectionError(f"rank process {child.process.pid} is gone")
                    child.answers[number] = loop.create_future()
                    socket.send_fds(child.control, [text], fds)
                return [await child.answers[number] for child in self._children]
        finally:
            for child in self._children:
                child.answers.pop(number, None)

    def stop(self) -> None:
        """End them: EOF on the socket pair, then SIGKILL."""
        for child in self._children:
            child.gone = True
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(child.control)
            child.control.close()
        for child in self._children:
            try:
                child.process.wait(END_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._children.clear()

    def _heard(self, child: _Child) -> None:
        try:
            text = child.control.recv(ORDER_BYTES_MAX)
        except ConnectionError:
            text = b""
        if not text:
            self._lost(child)
            return
        number, *words = json.loads(text)
        if number == 0:
            self.on_note(child.rank, *words)
        elif number in child.answers and not child.answers[number].done():
            child.answers[number].set_result(words[0])

    def _lost(self, child: _Child) -> None:
        asyncio.get_running_loop().remove_reader(child.control)
        if child.gone:
            return
        child.gone = True
        why = f"rank process {child.process.pid} is gone"
        for answer in child.answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError(why))
                answer.exception()  # whoever waited may have been cancelled: nobody need look
        self.on_gone(why)
