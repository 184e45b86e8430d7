"""Leads the other ranks of a torch engine. The leader is the engine's own process, and rank 0.

Only the leader has streams, a scheduler, and a pool that decides about blocks. It sends each step to the others just
before it computes its own share; the all-reduces inside the forward pass keep the ranks in step.

Always true: only one step at a time is in flight, from the step thread or a canary. Blocks that a step published are
published on every rank before its tokens are shown. When one rank ends, the engine ends. With one rank all of this does
nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from holdfast.core.requests import Output, TokenLogprobs
from holdfast.engines.host.memory import VaultMemory
from holdfast.engines.paged.blocks import Blocks
from holdfast.engines.paged.scheduler import Scheduler, SchedulerSettings
from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.ranks.leader import RankProcesses, StepLeader
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.launched import LaunchedStep
from holdfast.engines.torch.model.decoder import BoundModel
from holdfast.engines.torch.ranks.share import Compute, RankGroup, RankWork, SharePiece, encode_work
from holdfast.kv.pool import Pool

START_S = 120.0  # a process that imports torch on a busy machine takes seconds


class TorchLeader(StepLeader):
    """The leader of a torch engine's ranks: call `start_ranks` once; its computers then compute on every rank."""

    def __init__(self, work: RankWork, device: torch.device) -> None:
        super().__init__(work.failover, START_S)
        self.group: RankGroup | None = None
        self._work, self._device = work, device
        self._lock = threading.Lock()  # held for a step's frames and all-reduces: all ranks must have the same order

    async def start_ranks(self, memory: VaultMemory, ranks: RankProcesses) -> None:
        """Start every rank; return when each has joined the group, is loaded and stands by."""
        if self.count == 1:
            return
        memory.join(self.agreement(ranks))
        folder = Path(tempfile.mkdtemp(prefix=".ranks-", dir=Path(self._work.failover.vault_socket).parent))
        try:
            await self.start(ranks, "holdfast.engines.torch.ranks.rank", self._work_of)
            joined = asyncio.to_thread(RankGroup.join, folder, self._work, self._device)
            self.group, _ = await asyncio.gather(joined, ranks.order("join", START_S, folder=str(folder)))
        finally:
            shutil.rmtree(folder)
        await ranks.load()

    def _work_of(self, rank: int) -> bytes:
        failover, geometry = self._work.failover.of_rank(rank), replace(self._work.geometry, rank=rank)
        return encode_work(replace(self._work, failover=failover, geometry=geometry))

    def scheduler(self, settings: SchedulerSettings, blocks: Blocks, pool: Pool) -> Scheduler:
        if self.count == 1:
            return Scheduler(settings, blocks)
        self.record(pool)
        return _SyncingScheduler(settings, blocks, self)

    def computer(self, tensors: Mapping[str, torch.Tensor], address: int, size: int) -> Computer:
        """Return the computer over the leader's share, mapped at an address."""
        work, all_reduce = self._work, self.group.all_reduce if self.group is not None else None
        model, kv = work.model(tensors, all_reduce), work.kv(address, size, self._device)
        sizes = work.settings.block_tokens, work.settings.rows
        return Computer(model, kv, *sizes) if self.count == 1 else _LeadingComputer(self, None, model, kv, *sizes)

    def canary_computer(self, computer: Computer, first: int) -> Computer:
        """Return the computer over the private blocks, here from `first` on; other ranks may number them
        differently."""
        if self.count == 1:
            return computer
        return _LeadingComputer(self, first, computer.model, computer.kv, computer.block_tokens, computer.latest.rows)

    # -- in the threads that compute

    def lead(self, plan: StepPlan, first: int | None, launch: Callable[[StepPlan], LaunchedStep]) -> LaunchedStep:
        """Compute a step on every rank; with `first`, over blocks counted from it."""
        pieces = [
            SharePiece(each.tokens, each.start, [at - (first or 0) for at in each.blocks]) for each in plan.segments
        ]
        with self._lock:
            self.send(msgspec.msgpack.encode(Compute(first is not None, pieces)), with_changes=first is None)
            return launch(plan)

    def sync(self, *, drained: bool = True) -> None:
        with self._lock:
            super().sync(drained=drained)

    def end_lead(self) -> None:
        """Make every rank's index equal to the leader's; then record nothing more."""
        self.sync()
        self.end_record()


class _LeadingComputer(Computer):
    def __init__(
        self, leader: TorchLeader, first: int | None, model: BoundModel, kv: torch.Tensor, *sizes: int
    ) -> None:
        super().__init__(model, kv, *sizes)
        self._leader, self._first = leader, first

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self._leader.lead(plan, self._first, super().launch)


class _SyncingScheduler(Scheduler):
    """A scheduler that has the ranks publish its blocks too before its tokens may be shown."""

    def __init__(self, settings: SchedulerSettings, blocks: Blocks, leader: TorchLeader) -> None:
        super().__init__(settings, blocks)
        self._leader = leader

    def retire(
        self, plan: StepPlan, tokens: Mapping[int, int], logprobs: Mapping[int, TokenLogprobs] | None = None
    ) -> list[Output]:
        outputs = super().retire(plan, tokens, logprobs)
        if self._leader.has_published:
            self._leader.sync()
        return outputs
