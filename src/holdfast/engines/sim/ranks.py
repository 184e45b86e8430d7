"""The other processes of a sim engine: started when it loads, joined when it wakes, fatal to it when one dies.

Always true: when `wake` returns every rank works under the epoch and holds the election lock's descriptors.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.engines.shadow.ranks import RankProcesses
from holdfast.engines.sim.rank import RankLaunch


class Ranks(RankProcesses):
    """`count` processes beside this one."""

    def __init__(self, count: int, on_gone: Callable[[str], None]) -> None:
        super().__init__(on_gone)
        self.count = count

    async def start(self, vault_socket: str, device: str, engine_id: int, timeout_s: float) -> None:
        """Started and ready: each has the weights mapped and its seat at the vault."""
        for _ in range(self.count):
            self.spawn(
                "holdfast.engines.sim.rank",
                lambda seat: msgspec.json.encode(RankLaunch(vault_socket, device, engine_id, seat)),
            )
        await self.order("load", timeout_s)

    async def wake(self, epoch: int, fds: tuple[int, ...], timeout_s: float) -> None:
        await self.order("wake", timeout_s, fds, epoch=epoch)

    async def rest(self, timeout_s: float) -> None:
        await self.order("rest", timeout_s)
