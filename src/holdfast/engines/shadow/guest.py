"""A seat at its leader's own vault: it maps the weights there and works under the leader's epoch, as a further process
of an engine with one pool does. `python -m holdfast.engines.shadow.guest '{"socket": …}'`.

Always true: it joins an epoch only when told to; while it lives, the CPU fence of that epoch is closed.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from holdfast.core.tasks import Tasks
from holdfast.engines.shadow.seat import Orders, Seat, Tether, end, orders_of, tied
from holdfast.memory.client.calls import Notice
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import RO, MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.protocol import LetGo, Superseded

LOAD_MS = 7_200_000  # the leader, which waits for this, has a bound of its own
STARTING_ROOM_S = 30.0  # for the vault's socket: it is started together with its engines


class GuestLaunch(msgspec.Struct, frozen=True):
    socket: str
    device: str
    engine_id: int
    vault_uids: tuple[int, ...]
    tether: Tether


class Guest(Seat):
    """It keeps its mappings while its leader sleeps, computes nothing that must be kept still, and has no pool."""

    def __init__(self, launch: GuestLaunch) -> None:
        device = open_device(launch.device)
        self._client = MemoryClient(launch.socket, device, launch.engine_id, vault_uids=launch.vault_uids)
        self._pool = PoolClient(self._client, device)
        self._client_notice = self._client.on_notice
        self._client.on_notice = self._noticed
        self._tasks = Tasks("guest", lambda error: end(f"no weights: {error}"))

    async def load(self) -> None:
        await self._client.connect(STARTING_ROOM_S)
        await self._map()
        await self._client.register_mapping(None)

    async def let_go(self) -> None:
        await self._client.unmap()

    async def stand_up(self) -> None:
        if await self._client.remap() != RO:
            raise ConnectionError("the vault has no weights")

    async def wake(self, epoch: int) -> None:
        await self._client.register_mapping(epoch)

    async def rest(self) -> None:
        await self._pool.quiesce()

    async def hold(self) -> None:
        return

    go_on = sleep = fence = hold

    async def _map(self) -> None:
        if await self._client.acquire("ro", LOAD_MS, wait_for_writer=True) != RO:
            raise ConnectionError("the vault has no weights")

    def _noticed(self, notice: Notice) -> None:
        self._client_notice(notice)
        mapped = self._client.mapped
        newer = isinstance(notice, Superseded) and mapped is not None and notice.by_hash == mapped.layout.hash()
        if newer or isinstance(notice, LetGo):
            self._tasks.spawn(self._renew(), "renew")

    async def _renew(self) -> None:
        await self._client.release()
        await self._map()


async def obey(launch: GuestLaunch) -> None:
    await Orders(launch.tether).obey(orders_of(Guest(launch)))


def main(text: str) -> int:
    launch = msgspec.json.decode(text, type=GuestLaunch)
    if not tied(launch.tether):
        return 1
    asyncio.run(obey(launch))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
