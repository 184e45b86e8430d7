"""The torch engine hosts a real model in a vault's memory, which has its weights and KV pages.

Always true:
- Steps run in a separate thread, so heartbeats and connections never wait for the model.
- Before `wake` only private memory is written.
- A standby compiles kernels and captures graphs at the final addresses, and its canary tests them. So a wake computes
  nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from msgspec import structs

from holdfast import __version__
from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.engines.contract import Capabilities, Limits, Progress
from holdfast.engines.host.answers import answers_in, known_answer
from holdfast.engines.host.engine import VaultEngine
from holdfast.engines.host.memory import VaultMemory
from holdfast.engines.host.pool import Owned
from holdfast.engines.host.proving import TOLERANCE_NATS, Canary
from holdfast.engines.host.step_thread import SteppedEngine
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.canary import canary_request, canary_scheduler, canary_steps
from holdfast.engines.paged.scheduler import Scheduler, SchedulerSettings
from holdfast.engines.ranks.leader import RankProcesses
from holdfast.engines.torch.computer import Computer, warm_up
from holdfast.engines.torch.files import checkpoint as checkpoints
from holdfast.engines.torch.files.checkpoint import OnProgress
from holdfast.engines.torch.geometry import pool_geometry
from holdfast.engines.torch.launched import NotFiniteError
from holdfast.engines.torch.memory_plan import private_blocks
from holdfast.engines.torch.model.weights import TorchWeights
from holdfast.engines.torch.ranks.leader import TorchLeader
from holdfast.engines.torch.ranks.share import RankWork, share_of_one
from holdfast.engines.torch.stepper import TorchStepThread, threads_for
from holdfast.kv.pool import KvUse, Resumes
from holdfast.memory.client.pool import PoolMapping
from holdfast.memory.devices import OutOfMemory
from holdfast.memory.torch.arithmetic import arithmetic
from holdfast.memory.torch.tensors import torch_device
from holdfast.spec.engines import FailoverSettings, TorchSettings

TOP = 4  # likeliest tokens that a canary reports: if its answer rounds differently, the known token is among them


@dataclass(frozen=True, slots=True)
class ReadyComputer:
    """A computer made for one range of pages and for one set of mapped weights."""

    where: tuple[int, int, int]  # address, size, where in it private memory begins
    tensors: dict[str, torch.Tensor]
    computer: Computer
    blocks: range  # private ones, for canaries; behind them is one more, the filler


class Readiness:
    """Makes and tests what steps need, before a request waits for it: a computer with its graphs, and a canary's
    answer. `ready` is the last computer. Called in the step thread.

    Always true: a computer is used only for the same range (address, size, offset of private memory) and mapped weights
    it was made for. The address is not enough: another range may have it later, with pool blocks in the place of
    private ones. The canary writes only private blocks, which lie behind the pool's pages, so a standby may run it
    while an owner serves.
    """

    def __init__(
        self, work: RankWork, weights: TorchWeights, leader: TorchLeader, folder: Path, progress: OnProgress
    ) -> None:
        self._work, self._weights, self._leader = work, weights, leader
        self._answers, self._progress = answers_in(folder), progress
        request = canary_request(work.checkpoint.config.vocabulary)
        # With several ranks a serving engine has no separate steps for it: it is batched, and its answer may round.
        rounds = leader.count > 1 and not work.settings.exact
        if rounds:
            request = structs.replace(request, sampling=structs.replace(request.sampling, top_logprobs=TOP))
        self.canary = Canary(request, (), tolerance_nats=TOLERANCE_NATS if rounds else 0.0)
        self.ready: ReadyComputer | None = None
        self._filled: ReadyComputer | None = None  # the computer with the canary's prompt in its private blocks

    def found(self, address: int, size: int, private_at: int) -> ReadyComputer | None:
        """Return the computer for that range, or None."""
        ready, where = self.ready, (address, size, private_at)
        fits = ready is not None and ready.where == where and ready.tensors is self._weights.tensors
        return ready if fits else None

    def make(self, address: int, size: int, private_at: int) -> ReadyComputer:
        """Return the computer for a range; compile and capture if there is none. `private_at`: offset of private
        memory."""
        ready = self.found(address, size, private_at)
        if ready is not None:
            return ready
        work, tensors = self._work, self._weights.tensors
        computer = self._leader.computer(tensors, address, size)
        blocks = range(-(-private_at // work.geometry.block_bytes), computer.kv.shape[0] - 1)
        if computer.kv.is_cuda and self._leader.count == 1:  # a warm-up computes, and would need the other ranks
            width = -(-work.positions_max // work.settings.block_tokens)
            warm_up(computer, work.settings.step_tokens_max, width, blocks.stop, self._progress)
        self.ready = ReadyComputer((address, size, private_at), tensors, computer, blocks)
        return self.ready

    def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """Run the canary alone on this mapping; return the likely cause of a wrong answer, or "". Raise Dropped if
        `dropped()` is true between two steps."""
        ready = self.make(mapping.pages_address, mapping.range_size, mapping.private_at)
        computer = self._leader.canary_computer(ready.computer, ready.blocks.start)
        settings, size = self.settings_for(ready.computer), self._work.settings.block_tokens
        *_, tokens = canary_steps(self.canary.request, settings, computer.compute, ready.blocks, size, dropped)
        if tokens != self.canary.tokens:  # else the file was asked before, whatever it has by now
            known = known_answer(self._answers, self._kind(computer), tokens)
            self.canary = replace(self.canary, tokens=known, known_from=str(self._answers))
        is_right = tokens == self.canary.tokens
        self._filled = ready if is_right else None
        return "" if is_right else self.canary.suspects

    def alone(self, ready: ReadyComputer) -> Scheduler:
        """Return a scheduler for a canary in separate steps, of the same shapes as those of `check`."""
        settings, size = self.settings_for(ready.computer), self._work.settings.block_tokens
        filled, self._filled = self._filled is ready, None  # a second answer is computed from the prompt on
        return canary_scheduler(settings, ready.blocks, size, filled=filled)

    def settings_for(self, computer: Computer) -> SchedulerSettings:
        config, settings = self._work.checkpoint.config, self._work.settings
        return SchedulerSettings(
            config.vocabulary,
            frozenset(config.eos_token_ids),
            self._work.positions_max,
            settings.concurrency,
            settings.queue,
            settings.step_tokens_max,
            computer.ahead,
        )

    def _kind(self, computer: Computer) -> str:
        """Return a name for everything that can change the answer: engines of one kind give the same answer."""
        settings, device = self._work.settings, computer.kv.device
        how = f"{'exact' if settings.exact else 'fast'}, blocks of {settings.block_tokens}"
        how += f", {self._work.positions_max} positions, {self._leader.count} ranks, {settings.concurrency} streams"
        how += f", steps of {settings.step_tokens_max}, Holdfast {__version__}, code {code_identity()}"
        return f"{self._weights.identity}, {how}, {arithmetic(device, threads_for(settings.threads))}"


T = TypeVar("T")


@cache
def code_identity() -> str:
    """Return a hash of the source files that compute: engines of two versions may round differently."""
    digest = hashlib.sha256()
    engines = Path(__file__).parents[1]
    for source in sorted([*(engines / "torch").rglob("*.py"), *(engines / "paged").rglob("*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


class TorchEngine(SteppedEngine):
    """The hosted engine of torch models: `load`, `prepare`, then any number of (`begin`, `end`)."""

    _stepper: TorchStepThread

    def __init__(
        self,
        checkpoint: checkpoints.Checkpoint,
        settings: TorchSettings,
        failover: FailoverSettings,
        progress: checkpoints.OnProgress,
    ) -> None:
        ranks = 1 + len(failover.more_vaults)
        device = torch_device(failover.device)
        settings = self.settings = share_of_one(settings.for_device(device.type != "cpu"), ranks)
        self.config = config = checkpoint.config
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._device = device
        self.geometry = pool_geometry(checkpoint, settings, dtype)
        self.private_bytes = self.geometry.block_bytes * private_blocks(settings.block_tokens)
        self.weights: TorchWeights = TorchWeights(checkpoint, dtype, device, progress, ranks=ranks)
        reach = self.geometry.block_count * settings.block_tokens
        self.context_tokens_max = min(settings.context_tokens_max or config.context_tokens_max, reach)
        work = RankWork(checkpoint, settings, failover, self.geometry, self.context_tokens_max)
        self._leader = TorchLeader(work, device)
        self._readiness = Readiness(work, self.weights, self._leader, Path(failover.vault_socket).parent, progress)
        self._stepper = TorchStepThread(self._deliver, self._step_failed, threads_for(settings.threads), device)
        self._blocks: PoolBlocks | None = None
        self._keeping_up = True

    def __repr__(self) -> str:
        return f"TorchEngine {self.config.family} {self._stepper.scheduler!r}"

    # -- what it is

    @property
    def limits(self) -> Limits:
        return Limits(self.settings.concurrency, self.settings.queue, self.context_tokens_max)

    @property
    def capabilities(self) -> Capabilities:
        is_gpu = self._device.type == "cuda"
        return Capabilities(
            deterministic=self.settings.exact,
            build=f"torch {torch.__version__} {'exact' if self.settings.exact else 'fast'}",
            dtype=self.geometry.dtype,
            device=torch.cuda.get_device_name(self._device) if is_gpu else "cpu",
            vocabulary=self.config.vocabulary,
        )

    @property
    def canary(self) -> Canary:
        return self._readiness.canary

    @property
    def resumes(self) -> Resumes:
        return self._blocks.resumes if self._blocks is not None else Resumes()

    @property
    def books(self) -> AbstractContextManager[object]:
        return self._stepper.lock

    def progress(self) -> Progress:
        scheduler, blocks = self._stepper.scheduler, self._blocks
        return self._progress(
            running=len(scheduler.running) if scheduler is not None else 0,
            waiting=len(scheduler.waiting) if scheduler is not None else 0,
            kv=blocks.pool.use() if blocks is not None else KvUse(),
        )

    # -- standing by

    async def prepare(self, memory: VaultMemory, ranks: RankProcesses) -> None:
        await self._leader.start_ranks(memory, ranks)

    async def stop(self) -> None:
        self._loop = None
        await asyncio.to_thread(self._stepper.stop)
        self._blocks = None
        self._leader.stop()

    async def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """Run the canary, alone, in private blocks."""

        def checked() -> str:
            try:
                return self._readiness.check(mapping, dropped)
            finally:
                self._leader.sync()

        return await self._in_step_thread(checked)

    async def _in_step_thread(self, work: Callable[[], T]) -> T:
        """Run work in the step thread. Numbers that are not finite end the process, as in a step: that is worse than a
        wrong answer of a canary."""
        try:
            return await super()._in_step_thread(work)
        except NotFiniteError as error:
            self._events.fatal(f"the device cannot be made ready: {error}")
            raise
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"the device has no room for a step: {error}", "use a smaller --kv-gib") from error

    # -- awake

    async def begin(self, owned: Owned) -> None:
        where = (owned.pages_address, owned.range_bytes, owned.private_at)
        ready = self._readiness.found(*where)
        if ready is None:
            if self._device.type == "cuda":  # minutes, where nothing was compiled on this machine before
                self._events.loading("kernels are compiled for pages at another address")
            ready = await self._in_step_thread(lambda: self._readiness.make(*where))
        blocks = self._blocks = PoolBlocks(owned.pool)
        scheduler = self._leader.scheduler(self._readiness.settings_for(ready.computer), blocks, owned.pool)
        self._stepper.serve(scheduler, ready.computer)

    async def end(self) -> list[int]:
        left = await asyncio.to_thread(self._stepper.drain)
        self._blocks = None
        if self._leader.count > 1:
            await asyncio.to_thread(self._leader.end_lead)
        return left

    def submit(self, stream: int, request: GenerateRequest) -> None:
        with self._stepper.lock:
            scheduler = self._stepper.scheduler
            if scheduler is None:
                raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine is not awake")
            if self._device.type == "cuda":
                self._stepper.note_request(request.sampling)
            # The canary's known answer holds for steps of the same shape: only under `exact` may it be batched.
            ready, is_canary = self._readiness.ready, request is self.canary.request
            if is_canary and not self.settings.exact and self._leader.count == 1 and ready is not None:
                scheduler = self._stepper.serve_alone(self._readiness.alone(ready))
            scheduler.submit(stream, request)
        self._stepper.poke()

    def cancel(self, stream: int) -> None:
        self._stepper.cancel(stream)

    def withdraw(self, stream: int) -> bool:
        with self._stepper.lock:
            scheduler = self._stepper.scheduler
            return scheduler is not None and scheduler.cancel(stream, unbegun=True)

    # -- from the step thread

    def _deliver(self) -> bool:
        self._in_loop(self._hand_over)
        return self._keeping_up

    def _hand_over(self) -> None:
        outputs = self._stepper.made.popleft()
        if outputs and self._loop is not None:
            self._keeping_up = self._events.outputs(outputs)


def torch_engine(
    checkpoint: checkpoints.Checkpoint,
    settings: TorchSettings,
    failover: FailoverSettings,
    progress: checkpoints.OnProgress,
) -> VaultEngine[TorchEngine]:
    return VaultEngine(TorchEngine(checkpoint, settings, failover, progress), failover)
