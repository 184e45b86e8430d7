"""The torch engine: a real model as a tenant of a vault's memory, its weights and KV pages there.

Always true: steps are made in a thread of their own, so beats and connections never wait for the model; before `wake`
only private memory is written; what a wake needs, compiled kernels and captured graphs too, was made while it stood by,
at the addresses that stay, and was tried by the canary: a wake computes nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import torch

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.engines.contract import Capabilities, EngineEvents, Limits, Progress, p99_ms
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.shadow.engine import Tenant, VaultEngine
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.pool import Owned
from holdfast.engines.shadow.proving import Canary
from holdfast.engines.shadow.ranks import Ranks
from holdfast.engines.torch.canary import private_blocks
from holdfast.engines.torch.files import checkpoint as checkpoints
from holdfast.engines.torch.geometry import pool_geometry
from holdfast.engines.torch.launched import NotFiniteError
from holdfast.engines.torch.model.weights import TorchWeights
from holdfast.engines.torch.ranks.leader import Leader
from holdfast.engines.torch.ranks.share import RankWork, share_of_one
from holdfast.engines.torch.readiness import Readiness
from holdfast.engines.torch.stepper import Stepper, threads_for
from holdfast.kv.pool import KvUse
from holdfast.kv.resumes import Resumes
from holdfast.memory.client.pool_mapping import PoolMapping
from holdfast.memory.devices import OutOfMemory
from holdfast.memory.torch.tensors import torch_device
from holdfast.spec.engines import Place, TorchSettings

# The event loop must get its turn while the step thread runs Python between two products.
SWITCH_INTERVAL_S = 0.0005

T = TypeVar("T")


class TorchTenant(Tenant):
    """`load`, `settle`, then any number of (`begin`, `end`)."""

    def __init__(
        self, checkpoint: checkpoints.Checkpoint, settings: TorchSettings, place: Place, progress: checkpoints.Progress
    ) -> None:
        ranks = 1 + len(place.more_vaults)
        device = torch_device(place.device)
        settings = self.settings = share_of_one(settings.for_device(device.type != "cpu"), ranks)
        self.config = config = checkpoint.config
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._device = device
        self.geometry = pool_geometry(checkpoint, settings, dtype)
        self.private_bytes = self.geometry.block_bytes * private_blocks(settings.block_tokens)
        self.weights: TorchWeights = TorchWeights(checkpoint, dtype, device, progress, ranks=ranks)
        reach = self.geometry.block_count * settings.block_tokens
        self.context_tokens_max = min(settings.context_tokens_max or config.context_tokens_max, reach)
        work = RankWork(checkpoint, settings, place, self.geometry, self.context_tokens_max)
        self._leader = Leader(work, device)
        self._readiness = Readiness(work, self.weights, self._leader, Path(place.vault_socket).parent, progress)
        self._stepper = Stepper(self._deliver, self._step_failed, threads_for(settings.threads), device)
        self._blocks: PoolBlocks | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: EngineEvents
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
        stepper, scheduler = self._stepper, self._stepper.scheduler
        budget_ms = stepper.budget_ms  # before `steps`: see there
        return Progress(
            steps=stepper.steps,
            running=len(scheduler.running) if scheduler is not None else 0,
            waiting=len(scheduler.waiting) if scheduler is not None else 0,
            step_ms_p99=p99_ms(stepper.recent_s),
            budget_ms=budget_ms,
            thread=(os.getpid(), stepper.thread) if stepper.thread else None,
            kv=blocks.pool.use() if (blocks := self._blocks) is not None else KvUse(),
        )

    def ping(self, answer: Callable[[], None]) -> None:
        self._stepper.ping(lambda: self._in_loop(answer))

    # -- standing by

    async def load(self, events: EngineEvents) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop, self._events = asyncio.get_running_loop(), events
        self._stepper.start()

    async def settle(self, memory: VaultMemory, ranks: Ranks) -> None:
        await self._leader.settle(memory, ranks)

    async def stop(self) -> None:
        self._loop = None
        await asyncio.to_thread(self._stepper.stop)
        self._blocks = None
        self._leader.stop()

    async def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """The canary, alone, in private blocks."""
        return await self._in_step_thread(lambda: self._check(mapping, dropped))

    def _check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        try:
            return self._readiness.check(mapping, dropped)
        finally:
            self._leader.settled()

    async def _in_step_thread(self, work: Callable[[], T]) -> T:
        """Numbers that are not finite end the process, as in a step: a canary that cannot be computed is no mere wrong
        answer."""
        try:
            return await asyncio.wrap_future(self._stepper.run(work))
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
        left = await asyncio.to_thread(self._stepper.rest)
        self._blocks = None
        if self._leader.count > 1:
            await asyncio.to_thread(self._leader.rest)
        return left

    def submit(self, stream: int, request: GenerateRequest) -> None:
        with self._stepper.lock:
            scheduler = self._stepper.scheduler
            if scheduler is None:
                raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine is not awake")
            if self._device.type == "cuda":
                self._stepper.meets(request.sampling)
            self._scheduler_for(request, scheduler).submit(stream, request)
        self._stepper.poke()

    def _scheduler_for(self, request: GenerateRequest, scheduler: Scheduler) -> Scheduler:
        """The canary's known answer holds for steps of the same shape: only `exact` may batch it with others."""
        ready = self._readiness.ready
        if request is not self.canary.request or self.settings.exact or self._leader.count > 1 or ready is None:
            return scheduler
        return self._stepper.serve_alone(self._readiness.alone(ready))

    def cancel(self, stream: int) -> None:
        self._stepper.cancel(stream)

    def withdraw(self, stream: int) -> bool:
        with self._stepper.lock:
            scheduler = self._stepper.scheduler
            return scheduler is not None and scheduler.cancel(stream, unbegun=True)

    def room(self) -> None:
        self._stepper.poke()

    # -- from the step thread

    def _in_loop(self, act: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(act)

    def _deliver(self) -> bool:
        self._in_loop(self._hand_over)
        return self._keeping_up

    def _hand_over(self) -> None:
        outputs = self._stepper.made.popleft()
        if outputs and self._loop is not None:
            self._keeping_up = self._events.outputs(outputs)

    def _step_failed(self, why: str) -> None:
        self._events.fatal(f"a step failed: {why}")


def torch_engine(
    checkpoint: checkpoints.Checkpoint, settings: TorchSettings, place: Place, progress: checkpoints.Progress
) -> VaultEngine[TorchTenant]:
    return VaultEngine(TorchTenant(checkpoint, settings, place, progress), place)
