"""One more process of a sim engine, as a tensor-parallel rank would be: it maps the device and lives under the epoch.

`python -m holdfast.engines.sim.rank '{"socket": …}'`. With `wake` come the election lock's descriptors: while this
process lives, the lock is not free (facts 2, 4d). Always true: it joins an epoch only when told to; descriptors it got
are closed at `rest`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable
from typing import Any

import msgspec

from holdfast.core.tasks import Tasks
from holdfast.engines.shadow.rank import Orders, Seat, end, sit
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import RO, MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.protocol import LetGo, Superseded

LOAD_MS = 7_200_000  # the engine, which waits for this, has a bound of its own
STARTING_ROOM_S = 30.0  # for the vault's socket; the engine itself has connected before


class RankLaunch(msgspec.Struct, frozen=True):
    socket: str
    device: str
    engine_id: int
    seat: Seat


class Rank:
    """What a rank can do; one method per order."""

    def __init__(self, launch: RankLaunch) -> None:
        device = open_device(launch.device)
        self._client = MemoryClient(launch.socket, device, launch.engine_id)
        self._pool = PoolClient(self._client, device)
        self._client_notice = self._client.on_notice
        self._client.on_notice = self._noticed
        self._fds: list[int] = []
        self._tasks = Tasks("rank", lambda error: end(f"no weights: {error}"))

    def carry_out(self, do: str, fields: dict[str, Any], fds: list[int]) -> Awaitable[None]:
        self._fds += fds
        work: Awaitable[None] = getattr(self, do)(**fields)
        return work

    async def load(self) -> None:
        await self._client.connect(STARTING_ROOM_S)
        await self._map()
        await self._client.register_mapping(None)

    async def wake(self, epoch: int) -> None:
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
        newer = isinstance(notice, Superseded) and mapped is not None and notice.by_hash == mapped.layout.hash()
        if newer or isinstance(notice, LetGo):
            self._tasks.spawn(self._renew(), "renew")

    async def _renew(self) -> None:
        await self._client.release()
        await self._map()


async def obey(launch: RankLaunch) -> None:
    await Orders(launch.seat).obey(Rank(launch).carry_out)


def main(text: str) -> int:
    launch = msgspec.json.decode(text, type=RankLaunch)
    if not sit(launch.seat):
        return 1
    asyncio.run(obey(launch))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
