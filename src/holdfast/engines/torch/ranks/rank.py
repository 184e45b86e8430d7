"""One rank of a torch engine beside its leader: `python -m holdfast.engines.torch.ranks.rank '{"tether": …}'`.

It has a share of the weights and of every KV block. Always true: it computes what it is told, in the order it is told.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import torch

from holdfast.engines.shadow.rank import Rank, RankLaunch
from holdfast.engines.shadow.seat import Order, Orders, tied
from holdfast.engines.torch.canary import private_blocks
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.model.decoder import forward
from holdfast.engines.torch.model.weights import TorchWeights
from holdfast.engines.torch.ranks.group import Group
from holdfast.engines.torch.ranks.share import RankWork, read
from holdfast.engines.torch.ranks.words import ANSWER, Compute, Piece, heard
from holdfast.engines.torch.stepper import threads_for, use_threads
from holdfast.memory.torch.tensors import torch_device


class TorchRank(Rank):
    """Besides a rank's orders it has that by which the group is made."""

    def __init__(self, launch: RankLaunch, work: RankWork, orders: Orders) -> None:
        self._work, self._geometry = work, work.geometry
        private_bytes = self._geometry.block_bytes * private_blocks(work.settings.block_tokens)
        super().__init__(launch, orders, self._geometry.rank, work.place, private_bytes)
        self._device = torch_device(work.place.device)
        share = {"rank": self._geometry.rank, "ranks": self._geometry.rank_count}
        self._weights = TorchWeights(work.checkpoint, work.dtype, self._device, lambda *_: None, **share)
        self._group: Group | None = None
        self._awake: Computer | None = None
        self._tried: tuple[Computer, int] | None = None  # for a canary; and the first private block

    def orders(self) -> dict[str, Order]:
        return super().orders() | {"join": self.join}

    async def join(self, folder: str) -> None:
        self._group = await asyncio.to_thread(Group.join, Path(folder), self._work, self._device)
        self.begin_steps()

    async def load(self) -> None:
        await self.memory.load(self._weights)
        await self.memory.stand_by(self._geometry)

    async def hold(self) -> None:
        await super().hold()
        mapping = self.memory.pool.mapping
        assert mapping is not None, "private memory is mapped from the first load on"
        first = -(-(mapping.private_address - mapping.pages_address) // self._geometry.block_bytes)
        self._tried = self._computer(mapping.pages_address, mapping.range_size), first

    async def go_on(self) -> None:
        self._tried = None
        await super().go_on()

    async def wake(self, epoch: int) -> None:
        await super().wake(epoch)
        owned = self.memory.owned
        assert owned is not None, "it owns its pool by now"
        self._awake = self._computer(owned.pages_address, owned.range_bytes)

    async def rest(self) -> None:
        self._awake = None
        await super().rest()

    # -- steps

    def make_steps(self) -> None:
        use_threads(threads_for(self._work.settings.threads), self._device)
        while self._step():
            pass

    def _step(self) -> bool:
        words = heard(self.steps)
        if words is None:
            return False
        self.do_again(words.acts)
        if not isinstance(words, Compute):
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            self.steps.sendall(ANSWER)
            return True
        computer, pieces = self._awake, words.pieces
        if words.private:
            assert self._tried is not None, "a canary before its order"
            computer, first = self._tried
            pieces = [Piece(each.tokens, each.start, [at + first for at in each.blocks]) for each in pieces]
        assert computer is not None, "a step before its order"
        forward(computer.model, computer.batch(pieces), computer.kv)
        return True

    def _computer(self, address: int, size: int) -> Computer:
        assert self._group is not None, "join first"
        work, settings = self._work, self._work.settings
        model = work.model(self._weights.tensors, self._group.all_reduce)
        return Computer(model, work.kv(address, size, self._device), settings.block_tokens, settings.rows)


def main(text: str) -> int:
    launch = msgspec.json.decode(text, type=RankLaunch)
    if not tied(launch.tether):
        return 1
    asyncio.run(live(launch, read(launch.told())))
    return 0


async def live(launch: RankLaunch, work: RankWork) -> None:
    orders = Orders(launch.tether)
    await orders.obey(TorchRank(launch, work, orders).orders())
    os._exit(0)  # the leader is gone: nothing is left to be put in order, and a thread may hang in a sum


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
