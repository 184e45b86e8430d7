"""One more process of a sim engine, as a tensor-parallel rank would be: it maps the device and lives under the epoch.

`python -m holdfast.engines.sim.rank '{"socket": …}'`. Orders come over a socket pair, one JSON message each, with the
election lock's descriptors at `wake`: while this process lives, the lock is not free (facts 2, 4d).

Always true: it dies with its parent (a death signal, and EOF on the socket pair); descriptors it got are close-on-exec
and closed at `rest`; it joins an epoch only when told to.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys

import msgspec

from holdfast.memory.client import RO, MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.pool_client import PoolClient
from holdfast.memory.protocol import Superseded

PR_SET_PDEATHSIG = 1
ORDER_BYTES_MAX = 4096
FDS_MAX = 16  # an election has one lock
LOAD_MS = 600_000  # as long as the engine itself may load
STARTING_ROOM_S = 30.0  # for the vault's socket; the engine itself has connected before


class RankLaunch(msgspec.Struct, frozen=True):
    socket: str
    device: str
    engine_id: int
    control: int  # the descriptor of its end of the socket pair
    parent: int  # the engine's pid
    dies_with_parent: bool = True  # False in tests: an engine of several processes may leave one behind


class Rank:
    """What a rank can do; one method per order."""

    def __init__(self, launch: RankLaunch) -> None:
        device = open_device(launch.device)
        self._client = MemoryClient(launch.socket, device, launch.engine_id)
        self._pool = PoolClient(self._client, device)
        self._client_notice = self._client.on_notice
        self._client.on_notice = self._noticed
        self._fds: list[int] = []
        self._renewing: asyncio.Task[None] | None = None

    async def load(self) -> None:
        await self._client.connect(STARTING_ROOM_S)
        await self._map()
        await self._client.register_mapping(None)

    async def wake(self, epoch: int, fds: list[int]) -> None:
        self._fds += fds
        await self._client.register_mapping(epoch)

    async def rest(self) -> None:
        await self._pool.quiesce()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    async def _map(self) -> None:
        if await self._client.acquire("ro", LOAD_MS, wait_for_writer=True) != RO:
            raise ConnectionError("the vault has no weights")

    def _noticed(self, notice: object) -> None:
        self._client_notice(notice)  # type: ignore[arg-type]
        mapped = self._client.mapped
        if isinstance(notice, Superseded) and mapped is not None and notice.by_hash == mapped.layout.hash():
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
            self._renewing.add_done_callback(_end_if_failed)

    async def _renew(self) -> None:
        await self._client.release()
        await self._map()


def _end_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        os._exit(1)  # without weights it is no use; the engine sees it and ends too


async def obey(launch: RankLaunch) -> None:
    """Load, then carry out orders until the engine is gone. Any failure ends the process, and so the engine."""
    control = socket.socket(fileno=launch.control)
    control.setblocking(False)
    rank = Rank(launch)
    await rank.load()
    control.send(b'{"ok":"load"}')
    while True:
        text, fds = await _receive(control)
        if not text:
            return
        order = json.loads(text)
        if order["do"] == "wake":
            await rank.wake(order["epoch"], fds)
        else:
            await rank.rest()
        control.send(json.dumps({"ok": order["do"]}).encode())


async def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(control, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(control)
    text, fds, flags, _ = socket.recv_fds(control, ORDER_BYTES_MAX, FDS_MAX, socket.MSG_CMSG_CLOEXEC)
    assert not flags & socket.MSG_CTRUNC, "descriptors were dropped on the way"
    return text, fds


def main(text: str) -> int:
    launch = msgspec.json.decode(text, type=RankLaunch)
    if launch.dies_with_parent:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launch.parent:  # it died before the signal was asked for
            return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the engine's to answer
    asyncio.run(obey(launch))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
