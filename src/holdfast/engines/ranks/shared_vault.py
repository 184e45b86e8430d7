"""A rank at its leader's vault: it maps the weights there and works under the leader's epoch, like a further process
of an engine with one pool. `python -m holdfast.engines.ranks.shared_vault '{"socket": …}'`.

Always true: it joins an epoch only when its leader orders it. While it lives, the CPU fence of that epoch is closed.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from holdfast.core.tasks import Tasks
from holdfast.engines.ranks.follower import LeaderLink, RankOrders, Tether, end, tie_to_leader
from holdfast.memory.client.calls import Notice
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import RO, MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.protocol import LetGo, Superseded

LOAD_MS = 7_200_000  # very long: the leader waits for this with its own, shorter bound
CONNECT_S = 30.0  # for the vault's socket: it is started together with its engines


class SharedVaultLaunch(msgspec.Struct, frozen=True):
    socket: str
    device: str
    engine_id: int
    vault_uids: tuple[int, ...]
    tether: Tether


class SharedVaultRank(RankOrders):
    """A rank without a pool at its leader's vault. It ignores `hold`, `go_on`, `sleep` and `fence`: it keeps its
    mappings while its leader is unmapped, and computes nothing."""

    def __init__(self, launch: SharedVaultLaunch) -> None:
        device = open_device(launch.device)
        self._client = MemoryClient(launch.socket, device, launch.engine_id, vault_uids=launch.vault_uids)
        self._pool = PoolClient(self._client, device)
        self._client_notice = self._client.on_notice
        self._client.on_notice = self._on_notice
        self._tasks = Tasks("rank", lambda error: end(f"no weights: {error}"))

    async def load(self) -> None:
        await self._client.connect(CONNECT_S)
        await self._map()
        await self._client.register_mapping(None)

    async def unmap(self) -> None:
        await self._client.unmap()

    async def remap(self) -> None:
        if await self._client.remap() != RO:
            raise ConnectionError("the vault has no weights")

    async def wake(self, epoch: int) -> None:
        await self._client.register_mapping(epoch)

    async def become_standby(self) -> None:
        await self._pool.quiesce()

    async def hold(self) -> None:
        return

    go_on = sleep = fence = hold

    async def _map(self) -> None:
        if await self._client.acquire("ro", LOAD_MS, wait_for_writer=True) != RO:
            raise ConnectionError("the vault has no weights")

    def _on_notice(self, notice: Notice) -> None:
        self._client_notice(notice)
        mapped = self._client.mapped
        newer = isinstance(notice, Superseded) and mapped is not None and notice.by_hash == mapped.layout.hash()
        if newer or isinstance(notice, LetGo):
            self._tasks.spawn(self._renew(), "renew")

    async def _renew(self) -> None:
        await self._client.release()
        await self._map()


def main(text: str) -> int:
    launch = msgspec.json.decode(text, type=SharedVaultLaunch)
    if not tie_to_leader(launch.tether):
        return 1
    asyncio.run(LeaderLink(launch.tether).obey(SharedVaultRank(launch)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
