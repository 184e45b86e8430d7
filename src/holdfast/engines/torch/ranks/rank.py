"""Runs one rank of a torch engine beside its leader: `python -m holdfast.engines.torch.ranks.rank '{"tether": …}'`.

It has a share of the weights and of every KV block. Always true: it computes steps in the order they were sent.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import torch

from holdfast.engines.host.rank import VaultRank
from holdfast.engines.ranks.follower import LeaderLink, RankLaunch, run_rank
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.memory_plan import private_blocks
from holdfast.engines.torch.model.decoder import forward
from holdfast.engines.torch.model.weights import TorchWeights
from holdfast.engines.torch.ranks.share import Compute, RankGroup, RankWork, SharePiece, decode_work
from holdfast.engines.torch.stepper import threads_for, use_threads
from holdfast.memory.torch.tensors import torch_device

_decoder = msgspec.msgpack.Decoder(Compute)


class TorchRank(VaultRank):
    """A rank of a torch engine. It adds the order that makes the group."""

    def __init__(self, launch: RankLaunch, work: RankWork, link: LeaderLink) -> None:
        self._work, self._geometry = work, work.geometry
        private_bytes = self._geometry.block_bytes * private_blocks(work.settings.block_tokens)
        super().__init__(launch, link, self._geometry.rank, work.failover, private_bytes)
        self._device = torch_device(work.failover.device)
        share = {"rank": self._geometry.rank, "ranks": self._geometry.rank_count}
        self._weights = TorchWeights(work.checkpoint, work.dtype, self._device, lambda *_: None, **share)
        self._group: RankGroup | None = None
        self._awake: Computer | None = None
        self._tried: tuple[Computer, int] | None = None  # for a canary; and the first private block

    async def join(self, folder: str) -> None:
        self._group = await asyncio.to_thread(RankGroup.join, Path(folder), self._work, self._device)
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

    async def become_standby(self) -> None:
        self._awake = None
        await super().become_standby()

    # -- steps

    def prepare_steps(self) -> None:
        use_threads(threads_for(self._work.settings.threads), self._device)

    def compute(self, work: bytes, *, answered: bool) -> bytes:
        asked = _decoder.decode(work)
        computer, pieces = self._awake, asked.pieces
        if asked.private:
            assert self._tried is not None, "a canary before its order"
            computer, first = self._tried
            pieces = [SharePiece(each.tokens, each.start, [at + first for at in each.blocks]) for each in pieces]
        assert computer is not None, "a step before its order"
        forward(computer.model, computer.batch(pieces), computer.kv)
        return b""

    def drain_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _computer(self, address: int, size: int) -> Computer:
        assert self._group is not None, "join first"
        work, settings = self._work, self._work.settings
        model = work.model(self._weights.tensors, self._group.all_reduce)
        return Computer(model, work.kv(address, size, self._device), settings.block_tokens, settings.rows)


def rank_for(launch: RankLaunch, link: LeaderLink) -> TorchRank:
    return TorchRank(launch, decode_work(launch.read_work()), link)


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1], rank_for))
