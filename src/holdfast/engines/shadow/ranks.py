"""The further processes of an engine, its seats, from the leader's side: started, given orders, fatal to it when one of
them is gone.

The leader is the engine's own process, and rank 0: it alone decides. Seats with a vault of their own wake together with
it, since all must agree on what they found; guests at its vault join its epoch once that is granted. Always true: an
order is over when every seat has answered it; a seat that ends is told once, and whoever waits for its answer gets a
ConnectionError; `stop` leaves none behind. With none all of this does nothing, at once.
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
from typing import Any, Protocol

import msgspec

from holdfast.engines.shadow.frames import ANSWER_S
from holdfast.engines.shadow.guest import GuestLaunch
from holdfast.engines.shadow.rank import RankLaunch
from holdfast.engines.shadow.seat import ORDER_BYTES_MAX, Tether
from holdfast.spec.engines import Place

END_S = 5.0  # a rank that was told to end does so in milliseconds; then it is killed
HOLD_S = 60.0  # for weights that are being mapped anew; a canary that cannot be tried has failed


class Listener(Protocol):
    """Who hears of the seats."""

    def fatal(self, why: str) -> None: ...

    def memory(self, why: str) -> None: ...

    def loading(self, why: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    gone: bool = False
    why: str = ""  # it is about to end


@dataclass(slots=True)
class Ranks:
    """Ranks 1, 2, … of this process's engine."""

    place: Place
    listener: Listener
    guests: bool = False  # seats at the leader's own vault
    dies_with_parent: bool = True
    # A canary holds every seat's memory still, a wake may move it on every one: never both.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _children: list[_Child] = field(default_factory=list)
    _numbers: int = 0
    _doubts: dict[int, str] = field(default_factory=dict)  # by rank: why its memory cannot be vouched for

    @property
    def count(self) -> int:
        return len(self._children)

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    # -- started and ended

    def seat_guests(self, count: int) -> None:
        self.guests = True
        place = self.place
        at = place.vault_socket, place.device, place.engine_id, place.vault_uids
        for _ in range(count):
            self.spawn("holdfast.engines.shadow.guest", lambda tether: msgspec.json.encode(GuestLaunch(*at, tether)))

    def seat(self, module: str, work: bytes) -> tuple[socket.socket, socket.socket]:
        """The next rank with a vault of its own, told `work`: our ends of the sockets for its steps and its table."""
        ours, theirs = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)), strict=True)
        told = os.memfd_create("rank")
        try:
            with os.fdopen(os.dup(told), "wb") as file:
                file.write(work)
            fds = theirs[0].fileno(), theirs[1].fileno(), told
            self.spawn(module, lambda tether: msgspec.json.encode(RankLaunch(tether, *fds)), fds)
        finally:
            theirs[0].close()
            theirs[1].close()
            os.close(told)
        steps, table = ours
        steps.settimeout(ANSWER_S)
        table.setblocking(False)
        return steps, table

    def spawn(self, module: str, launch: Callable[[Tether], bytes], pass_fds: tuple[int, ...] = ()) -> None:
        """The next rank: `python -m module LAUNCH`. From the main thread: the death signal is bound to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            tether = Tether(theirs.fileno(), os.getpid(), self.dies_with_parent)
            process = subprocess.Popen(
                [sys.executable, "-m", module, launch(tether).decode()],
                pass_fds=(tether.control, *pass_fds),
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        ours.setblocking(False)
        child = _Child(len(self._children) + 1, process, ours)
        self._children.append(child)
        asyncio.get_running_loop().add_reader(ours, self._heard, child)

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

    # -- orders

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

    async def load(self) -> None:
        await self.order("load", self.place.load_s)

    async def sleep(self) -> None:
        await self.order("sleep", self.place.load_s)

    async def let_go(self) -> None:
        await self.order("let_go", self.place.load_s)

    async def stand_up(self) -> None:
        await self.order("stand_up", self.place.load_s)

    async def wake(self, epoch: int, fds: tuple[int, ...]) -> None:
        """Guests answer at once; the others agree with the leader on the way, and whoever wakes it bounds that."""
        await self.order("wake", self.place.wake_s if self.guests else None, fds, epoch=epoch)

    async def fenced(self) -> None:
        # As unbounded as the leader's own wait: a process stuck in the kernel keeps its work, and so the fence.
        await self.order("fence", None)

    async def rest(self) -> None:
        await self.order("rest", self.place.wake_s)

    async def verify(self) -> list[str]:
        """What is wrong with each one's weights, or nothing. Guests have their leader's."""
        return [] if self.guests else await self.order("verify", self.place.load_s)

    async def renew(self) -> None:
        if not self.guests:
            await self.order("renew", self.place.load_s)

    # -- what they say

    def doubt(self, rank: int, why: str) -> None:
        """Health hears of the first rank whose memory is in doubt."""
        self._doubts[rank] = why
        doubts = [f"rank {at}: {doubt}" if at else doubt for at, doubt in self._doubts.items() if doubt]
        self.listener.memory(doubts[0] if doubts else "")

    def _noted(self, child: _Child, what: str, words: str) -> None:
        if what == "loading":
            self.listener.loading(f"rank {child.rank}: {words}")
        elif what == "end":
            child.why = words
        else:
            assert what == "memory", what
            self.doubt(child.rank, words)

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
            self._noted(child, *words)
        elif number in child.answers and not child.answers[number].done():
            child.answers[number].set_result(words[0])

    def _lost(self, child: _Child) -> None:
        asyncio.get_running_loop().remove_reader(child.control)
        if child.gone:
            return
        child.gone = True
        why = f"rank process {child.process.pid} is gone" + (f": {child.why}" if child.why else "")
        for answer in child.answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError(why))
                answer.exception()  # whoever waited may have been cancelled: nobody need look
        self.listener.fatal(why)
