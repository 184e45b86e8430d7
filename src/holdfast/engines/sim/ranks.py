"""The other processes of a sim engine: started when it loads, joined when it wakes, fatal to it when one dies.

Always true: when `wake` returns every rank works under the epoch and holds the election lock's descriptors; a rank that
ends, or answers anything but what was asked, is told once (`on_gone`).
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

import msgspec

from holdfast.engines.sim.rank import ORDER_BYTES_MAX, RankLaunch

END_S = 5.0  # a rank that was told to end does so in milliseconds; then it is killed


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    control: socket.socket
    answers: asyncio.Queue[str] = field(default_factory=lambda: asyncio.Queue(4))  # one order at a time is open
    gone: bool = False


@dataclass(slots=True)
class Ranks:
    """`count` processes beside this one."""

    count: int
    on_gone: Callable[[str], None] = lambda why: None
    dies_with_parent: bool = True
    _children: list[_Child] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    async def start(self, vault_socket: str, device: str, engine_id: int, timeout_s: float) -> None:
        """Started and ready: each has the weights mapped and its seat at the vault."""
        for _ in range(self.count):
            self._children.append(self._spawn(vault_socket, device, engine_id))
        await self._all_answered("load", timeout_s)

    async def wake(self, epoch: int, fds: tuple[int, ...], timeout_s: float) -> None:
        for child in self._children:
            socket.send_fds(child.control, [json.dumps({"do": "wake", "epoch": epoch}).encode()], fds)
        await self._all_answered("wake", timeout_s)

    async def rest(self, timeout_s: float) -> None:
        for child in self._children:
            child.control.send(b'{"do":"rest"}')
        await self._all_answered("rest", timeout_s)

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

    # -- inside

    def _spawn(self, vault_socket: str, device: str, engine_id: int) -> _Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            fd = theirs.fileno()
            launch = RankLaunch(vault_socket, device, engine_id, fd, os.getpid(), self.dies_with_parent)
            command = [sys.executable, "-m", "holdfast.engines.sim.rank", msgspec.json.encode(launch).decode()]
            process = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL)
        finally:
            theirs.close()
        ours.setblocking(False)
        child = _Child(process, ours)
        asyncio.get_running_loop().add_reader(ours, self._heard, child)
        return child

    def _heard(self, child: _Child) -> None:
        try:
            text = child.control.recv(ORDER_BYTES_MAX)
        except ConnectionError:
            text = b""
        if text:
            child.answers.put_nowait(json.loads(text)["ok"])
            return
        asyncio.get_running_loop().remove_reader(child.control)
        if not child.gone:
            child.gone = True
            child.answers.put_nowait("")
            self.on_gone(f"rank process {child.process.pid} is gone")

    async def _all_answered(self, order: str, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            for child in self._children:
                answer = await child.answers.get()
                if answer != order:
                    raise ConnectionError(f"rank process {child.process.pid} did not {order}: {answer or 'it is gone'}")
