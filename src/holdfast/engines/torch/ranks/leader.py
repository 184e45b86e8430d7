"""The other ranks of a torch engine, from the leader's side. The leader is the engine's own process, and rank 0.

It alone has streams, a scheduler and a pool that decides. The others are told each step just before the leader computes
its own share, and the sums inside the forward pass keep all in step. Always true: one step at a time is on its way in
the group, whoever computes it (the step thread, a canary); what a step published is published on every rank before its
tokens are shown; one rank's end is the engine's. With one rank all of this does nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.core.requests import Output, TokenLogprobs
from holdfast.engines.paged.blocks import Blocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.paged.settings import SchedulerSettings
from holdfast.engines.shadow.acts import NotedIndex
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.ranks import Ranks
from holdfast.engines.shadow.seat import ends_when_emptied
from holdfast.engines.shadow.table import LeadersTable
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.launched import Launched
from holdfast.engines.torch.model.bound import Model
from holdfast.engines.torch.ranks.group import Group
from holdfast.engines.torch.ranks.share import RankWork, written
from holdfast.engines.torch.ranks.words import ANSWER, Compute, Piece, Settle, tell
from holdfast.kv.pool import Pool

START_S = 120.0  # a process that imports torch on a busy machine takes seconds


class Leader:
    """`settle` once; then what it makes computes on every rank."""

    def __init__(self, work: RankWork, device: torch.device) -> None:
        self.count = work.geometry.rank_count
        self.group: Group | None = None
        self._work, self._device = work, device
        self._steps: list[socket.socket] = []
        self._tables: list[socket.socket] = []
        self._index: NotedIndex | None = None
        self._lock = threading.Lock()  # over a step's words and its sums: their order is every rank's

    async def settle(self, memory: VaultMemory, ranks: Ranks) -> None:
        """Every rank started, joined to the group, loaded and standing by."""
        if self.count == 1:
            return
        ends_when_emptied(memory)
        folder = Path(tempfile.mkdtemp(prefix=".ranks-", dir=Path(self._work.place.vault_socket).parent))
        try:
            for rank in range(1, self.count):
                self._spawn(ranks, rank)
            await ranks.order("hello", START_S)
            joined = asyncio.to_thread(Group.join, folder, self._work, self._device)
            self.group, _ = await asyncio.gather(joined, ranks.order("join", START_S, folder=str(folder)))
        finally:
            shutil.rmtree(folder)
        memory.peers = LeadersTable(self._tables, self._work.place.wake_s, ranks.fenced)
        await ranks.load()

    def rest(self) -> None:
        """What the index says, every rank's says; nothing more is noted. In a thread."""
        self.settled()
        self._index = None

    def stop(self) -> None:
        for each in (*self._steps, *self._tables):
            each.close()
        self._steps.clear()
        self._tables.clear()

    def scheduler(self, settings: SchedulerSettings, blocks: Blocks, pool: Pool) -> Scheduler:
        if self.count == 1:
            return Scheduler(settings, blocks)
        pool.index = self._index = NotedIndex(pool.index)
        return _SettlingScheduler(settings, blocks, self)

    def computer(self, tensors: Mapping[str, torch.Tensor], address: int, size: int) -> Computer:
        """Over the leader's share, mapped at an address."""
        work, all_reduce = self._work, self.group.all_reduce if self.group is not None else None
        model, kv = work.model(tensors, all_reduce), work.kv(address, size, self._device)
        sizes = work.settings.block_tokens, work.settings.rows
        return Computer(model, kv, *sizes) if self.count == 1 else _LeadingComputer(self, None, model, kv, *sizes)

    def canary_computer(self, computer: Computer, first: int) -> Computer:
        """Over the private blocks, which begin with `first` here: their numbers may be others on another rank."""
        if self.count == 1:
            return computer
        return _LeadingComputer(self, first, computer.model, computer.kv, computer.block_tokens, computer.latest.rows)

    # -- in the threads that compute

    def lead(self, plan: StepPlan, first: int | None, launch: Callable[[StepPlan], Launched]) -> Launched:
        """A step on every rank; with `first`, over blocks counted from it."""
        pieces = [Piece(each.tokens, each.start, [at - (first or 0) for at in each.blocks]) for each in plan.segments]
        with self._lock:
            acts = self._index.taken() if self._index is not None and first is None else []
            tell(self._steps, Compute(first is not None, acts, pieces))
            return launch(plan)

    def settled(self) -> None:
        """Whatever was done to the index is done on every rank, and every step told so far is over there."""
        if not self._steps:
            return
        with self._lock:
            tell(self._steps, Settle(self._index.taken() if self._index is not None else []))
            for steps in self._steps:
                if steps.recv(1) != ANSWER:
                    raise ConnectionError("a rank is gone")

    @property
    def unsettled(self) -> bool:
        return self._index is not None and self._index.published

    # -- inside

    def _spawn(self, ranks: Ranks, rank: int) -> None:
        place, geometry = self._work.place.of_rank(rank), replace(self._work.geometry, rank=rank)
        work = written(replace(self._work, place=place, geometry=geometry))
        steps, table = ranks.seat("holdfast.engines.torch.ranks.rank", work)
        self._steps.append(steps)
        self._tables.append(table)


class _LeadingComputer(Computer):
    def __init__(self, leader: Leader, first: int | None, model: Model, kv: torch.Tensor, *sizes: int) -> None:
        super().__init__(model, kv, *sizes)
        self._leader, self._first = leader, first

    def launch(self, plan: StepPlan) -> Launched:
        return self._leader.lead(plan, self._first, super().launch)


class _SettlingScheduler(Scheduler):
    """What it published is settled before its tokens may be shown."""

    def __init__(self, settings: SchedulerSettings, blocks: Blocks, leader: Leader) -> None:
        super().__init__(settings, blocks)
        self._leader = leader

    def retire(
        self, plan: StepPlan, tokens: Mapping[int, int], logprobs: Mapping[int, TokenLogprobs] | None = None
    ) -> list[Output]:
        outputs = super().retire(plan, tokens, logprobs)
        if self._leader.unsettled:
            self._leader.settled()
        return outputs
