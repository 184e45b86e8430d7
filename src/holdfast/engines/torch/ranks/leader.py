"""The other ranks of a torch engine, from the leader's side. The leader is the engine's own process, and rank 0.

It alone has streams, a scheduler and a pool that decides. The others are told each step just before the leader computes
its own share, and the sums inside the forward pass keep all in step. Always true: one step at a time is on its way in
the group, whoever computes it (the step thread, a canary); what a step published is published on every rank before its
tokens are shown; one rank's end is the engine's. With one rank all of this does nothing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from holdfast.core.requests import Output, TokenLogprobs
from holdfast.core.tasks import Tasks
from holdfast.engines.paged.blocks import Blocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.paged.settings import SchedulerSettings
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.pool import Owned
from holdfast.engines.shadow.ranks import RankProcesses
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.launched import Launched
from holdfast.engines.torch.model.decoder import Model
from holdfast.engines.torch.ranks.books import NotedIndex
from holdfast.engines.torch.ranks.group import Group
from holdfast.engines.torch.ranks.memory import agree_in, ends_when_emptied
from holdfast.engines.torch.ranks.rank import RankLaunch
from holdfast.engines.torch.ranks.share import RankWork, written
from holdfast.engines.torch.ranks.words import ANSWER, ANSWER_S, Compute, Piece, Settle, tell
from holdfast.kv.pool import Pool

START_S = 120.0  # a process that imports torch on a busy machine takes seconds
CHECK_S = 60.0  # for weights that are being mapped anew; a canary that cannot be tried has failed


class Ranks:
    """`load`, then what the engine itself does: `checking`, `wake`, `rest`, `stop`."""

    def __init__(
        self,
        work: RankWork,
        memory: VaultMemory,
        device: torch.device,
        on_fatal: Callable[[str], None],
        on_memory: Callable[[str], None],
    ) -> None:
        self.count = work.geometry.rank_count
        self.processes = RankProcesses(on_fatal, self._noted)
        self._on_fatal, self._on_memory = on_fatal, on_memory
        self.group: Group | None = None
        self._work, self._memory, self._device = work, memory, device
        self._steps: list[socket.socket] = []
        self._index: NotedIndex | None = None
        # A canary holds every rank's memory still, a wake may move it on every rank: never both.
        self._turn = asyncio.Lock()
        self._tasks = Tasks("ranks")
        self._lock = threading.Lock()  # over a step's words and its sums: their order is every rank's
        self._doubts: dict[int, str] = {}  # by rank: why its memory cannot be vouched for

    # -- loading and standing by

    async def load(self) -> None:
        """Every rank started, joined to the group, loaded and standing by."""
        if self.count == 1:
            return
        ends_when_emptied(self._memory, self._on_fatal)
        folder = Path(tempfile.mkdtemp(prefix=".ranks-", dir=Path(self._work.place.vault_socket).parent))
        try:
            for rank in range(1, self.count):
                self._spawn(rank)
            await self.processes.order("hello", START_S)
            joined = asyncio.to_thread(Group.join, folder, self._work, self._device)
            self.group, _ = await asyncio.gather(joined, self.processes.order("join", START_S, folder=str(folder)))
        finally:
            shutil.rmtree(folder)
        self._memory.agree = agree_in(self.group)
        self._memory.others_fenced = self._fenced
        await self.processes.order("load", self._work.place.load_s)

    async def checking(self, canary: Callable[[], Awaitable[bool]]) -> bool:
        """Every rank keeps its memory still for a canary, to its end, even if nobody waits for it any more."""
        if self.count == 1:
            return await canary()
        return await asyncio.shield(self._tasks.spawn(self._checking(canary), "canary"))

    async def _checking(self, canary: Callable[[], Awaitable[bool]]) -> bool:
        async with self._turn:
            try:
                await self.processes.order("check", CHECK_S)
            except TimeoutError:
                return False
            right = await canary()
            await asyncio.to_thread(self.settle)
            await self.processes.order("checked", CHECK_S)
            return right

    async def sleep(self) -> None:
        await self.processes.order("sleep", self._work.place.load_s)

    def memory_told(self, rank: int, why: str) -> None:
        """Health hears of the first rank whose memory is in doubt."""
        self._doubts[rank] = why
        doubts = [f"rank {at}: {doubt}" if at else doubt for at, doubt in self._doubts.items() if doubt]
        self._on_memory(doubts[0] if doubts else "")

    # -- awake

    async def wake(self, epoch: int, fds: tuple[int, ...]) -> Owned:
        """All ranks at once: they agree with one another on the way. The caller bounds it."""
        if self.count == 1:
            return await self._memory.own(epoch)
        if self._turn.locked():
            self._memory.on_loading("a canary is under way on every rank")
        async with self._turn:
            owned: Owned
            order = self.processes.order("wake", None, fds, epoch=epoch)
            owned, _ = await asyncio.gather(self._memory.own(epoch), order)
        return owned

    async def rest(self) -> None:
        if self.count > 1:
            await asyncio.to_thread(self.settle)
            self._index = None
        await self.processes.order("rest", self._work.place.wake_s)

    def stop(self) -> None:
        self.processes.stop()
        for steps in self._steps:
            steps.close()
        self._steps.clear()

    def scheduler(self, settings: SchedulerSettings, blocks: Blocks, pool: Pool) -> Scheduler:
        if self.count == 1:
            return Scheduler(settings, blocks)
        pool.index = self._index = NotedIndex(pool.index)
        return _SettlingScheduler(settings, blocks, self)

    def computer(self, tensors: Mapping[str, torch.Tensor], address: int, size: int) -> Computer:
        """Over the leader's share, mapped at an address."""
        work, all_reduce = self._work, self.group.all_reduce if self.group is not None else None
        model, kv = work.model(tensors, all_reduce), work.kv(address, size, self._device)
        sizes = work.settings.block_tokens, work.settings.concurrency
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

    def settle(self) -> None:
        """Whatever was done to the index is done on every rank, and every step told so far is over there."""
        with self._lock:
            tell(self._steps, Settle(self._index.taken() if self._index is not None else []))
            for steps in self._steps:
                if steps.recv(1) != ANSWER:
                    raise ConnectionError("a rank is gone")

    @property
    def unsettled(self) -> bool:
        return self._index is not None and self._index.published

    # -- inside

    async def _fenced(self) -> None:
        # As unbounded as the leader's own wait: a process stuck in the kernel keeps its work, and so the fence.
        await self.processes.order("fence", None)

    def _noted(self, rank: int, what: str, words: str) -> None:
        if what == "loading":
            self._memory.on_loading(f"rank {rank}: {words}")
            return
        assert what == "memory", what
        self.memory_told(rank, words)

    def _spawn(self, rank: int) -> None:
        vault_socket, device = self._work.place.more[rank - 1]
        place = replace(self._work.place, vault_socket=vault_socket, device=device, more=())
        work = replace(self._work, place=place, geometry=replace(self._work.geometry, rank=rank))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        memory = os.memfd_create("rank")
        try:
            with os.fdopen(os.dup(memory), "wb") as file:
                file.write(written(work))
            steps = theirs.fileno()
            self.processes.spawn(
                "holdfast.engines.torch.ranks.rank",
                lambda seat: msgspec.json.encode(RankLaunch(seat, steps, memory)),
                (steps, memory),
            )
        finally:
            theirs.close()
            os.close(memory)
        ours.settimeout(ANSWER_S)
        self._steps.append(ours)


class _LeadingComputer(Computer):
    def __init__(
        self, ranks: Ranks, first: int | None, model: Model, kv: torch.Tensor, block_tokens: int, rows_max: int
    ) -> None:
        super().__init__(model, kv, block_tokens, rows_max)
        self._ranks, self._first = ranks, first

    def launch(self, plan: StepPlan) -> Launched:
        return self._ranks.lead(plan, self._first, super().launch)


class _SettlingScheduler(Scheduler):
    """What it published is settled before its tokens may be shown."""

    def __init__(self, settings: SchedulerSettings, blocks: Blocks, ranks: Ranks) -> None:
        super().__init__(settings, blocks)
        self._ranks = ranks

    def retire(
        self, plan: StepPlan, tokens: Mapping[int, int], logprobs: Mapping[int, TokenLogprobs] | None = None
    ) -> list[Output]:
        outputs = super().retire(plan, tokens, logprobs)
        if self._ranks.unsettled:
            self._ranks.settle()
        return outputs
