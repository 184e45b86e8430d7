"""The torch engine: a real model as a shadow engine, its weights and KV pages in a vault.

Always true: steps are made in a thread of their own, so beats and connections never wait for the model; before `wake`
only private memory is written; what a wake needs, compiled kernels and captured graphs too, was made while it stood by,
at the addresses that stay, and was tried by the canary: a wake computes nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.core.tasks import Tasks
from holdfast.core.unwritten import say
from holdfast.engines.contract import Canary, ClosedSink, Limits, Progress, StepSink, Woken
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.place import Place
from holdfast.engines.torch.canary import private_blocks
from holdfast.engines.torch.files import checkpoint as checkpoints
from holdfast.engines.torch.geometry import pool_geometry
from holdfast.engines.torch.launched import NotFiniteError
from holdfast.engines.torch.model.weights import TorchWeights
from holdfast.engines.torch.ranks.leader import Ranks
from holdfast.engines.torch.ranks.share import RankWork, share_of_one
from holdfast.engines.torch.readiness import Readiness
from holdfast.engines.torch.settings import TorchSettings
from holdfast.engines.torch.stepper import Stepper, threads_for
from holdfast.kv.resumes import Resumes
from holdfast.kv.usage import KvUse
from holdfast.memory.devices import OutOfMemory, open_device
from holdfast.memory.torch.tensors import dtype_name, torch_device

# The event loop must get its turn while the step thread runs Python between two products.
SWITCH_INTERVAL_S = 0.0005

T = TypeVar("T")


class TorchEngine:
    """`load`, `start`, then any number of (`wake`, `rest`)."""

    def __init__(
        self, checkpoint: checkpoints.Checkpoint, settings: TorchSettings, place: Place, progress: checkpoints.Progress
    ) -> None:
        ranks = 1 + len(place.more)
        settings = self.settings = share_of_one(settings, ranks)
        self.config = config = checkpoint.config
        device = torch_device(place.device)
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._device = device
        self.geometry = pool_geometry(checkpoint, settings, self._dtype)
        self.weights = TorchWeights(checkpoint, self._dtype, device, progress, 0, ranks)
        reach = self.geometry.block_count * settings.block_tokens
        self.context_tokens_max = min(settings.context_tokens_max or config.context_tokens_max, reach)
        self.on_fatal: Callable[[str], None] = _die
        self.on_owner_gone: Callable[[int], None] = lambda epoch: None
        self.on_memory: Callable[[str], None] = lambda why: None
        self.on_loading: Callable[[str], None] = lambda why: None
        self.memory = VaultMemory(
            socket_path=place.vault_socket,
            device=open_device(place.device),
            host=open_device("host-0"),
            engine_id=place.engine_id,
            who=place.who,
            lock_dir=Path(place.vault_socket).parent,
            geometry=self.geometry,
            private_bytes=self.geometry.block_bytes * private_blocks(settings.block_tokens),
            unmapped=place.unmapped,
            direct=place.direct,
            own_s=place.wake_s,
            load_s=place.load_s,
            vault_uids=place.vault_uids,
            on_owner_gone=lambda epoch: self.on_owner_gone(epoch),
            on_memory=lambda why: self._ranks.memory_told(0, why),
            on_fatal=lambda why: self.on_fatal(why),
            on_loading=lambda why: self.on_loading(why),
            on_room=lambda: self._stepper.poke(),
            on_moved=self._pool_moved,
        )
        self.gpu_fence = self.memory.gpu_fence
        work = RankWork(checkpoint, settings, place, self.geometry, self.context_tokens_max, self._dtype)
        self._ranks = Ranks(work, self.memory, device, lambda why: self.on_fatal(why), lambda why: self.on_memory(why))
        folder = Path(place.vault_socket).parent
        self._readiness = Readiness(work, self.weights, self._ranks, folder, progress)
        self._stepper = Stepper(self._deliver, self._step_failed, threads_for(settings.threads), device)
        self.memory.books = self._stepper.lock
        self._blocks: PoolBlocks | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sink: StepSink = lambda outputs: True
        self._closed: ClosedSink = lambda streams: None
        self._keeping_up = True
        self._right = False
        self._beside = Tasks("engine", lambda error: self.on_fatal(f"the device cannot be made ready: {error}"))

    def __repr__(self) -> str:
        return f"<TorchEngine {self.config.family} {self._stepper.scheduler!r}, {self.memory!r}>"

    # -- what it is

    @property
    def limits(self) -> Limits:
        return self.settings.limits(self.context_tokens_max)

    @property
    def dtype_name(self) -> str:
        return dtype_name(self._dtype)

    @property
    def canary(self) -> Canary:
        return self._readiness.canary

    @property
    def deterministic(self) -> bool:
        return self.settings.exact

    @property
    def last_epoch(self) -> int:
        return self.memory.client.last_epoch

    @property
    def resumes(self) -> Resumes:
        return self._blocks.resumes if self._blocks is not None else Resumes()

    def progress(self) -> Progress:
        stepper, scheduler = self._stepper, self._stepper.scheduler
        recent = sorted(stepper.recent_s)
        budget_ms = stepper.budget_ms  # before `steps`: see there
        return Progress(
            steps=stepper.steps,
            running=len(scheduler.running) if scheduler is not None else 0,
            waiting=len(scheduler.waiting) if scheduler is not None else 0,
            step_ms_p99=recent[(len(recent) * 99 - 1) // 100] * 1000 if recent else 0.0,
            budget_ms=budget_ms,
            thread=stepper.thread,
            kv=blocks.pool.use() if (blocks := self._blocks) is not None else KvUse(),
        )

    # -- loading and standing by

    async def load(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._stepper.start()
        await asyncio.gather(self.memory.load(self.weights), self._ranks.load())
        if not await self.check():
            return  # its caller checks too, and says so
        if self.memory.unmapped:
            await asyncio.gather(self.memory.sleep(), self._ranks.sleep())

    async def start(self, sink: StepSink, closed: ClosedSink) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink, self._closed = sink, closed

    async def stop(self) -> None:
        self._loop = None
        await asyncio.to_thread(self._stepper.stop)
        self._blocks = None
        await self._beside.stop()
        self._ranks.stop()
        await self.memory.close()

    async def check(self) -> bool:
        """The canary, alone, in private blocks. Asleep there is nothing to read: the last outcome stands."""
        if not self.memory.asleep:
            await self.memory.settled.wait()
            self._right = await self._ranks.checking(lambda: self._in_step_thread(self._check))
        return self._right

    def _check(self) -> bool:
        assert self.memory.pool.mapping is not None, "private memory is mapped from the first load on"
        return self._readiness.check(self.memory.pool.mapping)

    async def _in_step_thread(self, work: Callable[[], T]) -> T:
        """In the step thread, while nothing that is mapped moves. Numbers that are not finite end the process, as in a
        step: a canary that cannot be computed is no mere wrong answer."""
        await self.memory.still.acquire()
        running = asyncio.wrap_future(self._stepper.run(work))
        # By its end, not by ours: who waits here may be cancelled, the thread goes on reading what is mapped.
        running.add_done_callback(lambda _: self.memory.still.release())
        try:
            return await asyncio.shield(running)
        except NotFiniteError as error:
            self.on_fatal(f"the device cannot be made ready: {error}")
            raise
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"the device has no room for a step: {error}", "use a smaller --kv-gib") from error

    def _pool_moved(self) -> None:
        """A GPU's graphs know addresses: they are captured again, and tried, before anybody needs them."""
        if self._readiness.ready is not None and self._device.type == "cuda":
            self._beside.spawn(self._check_again(), "check again")

    async def _check_again(self) -> None:
        if not await self.check():
            self.on_fatal("the canary's answer was wrong after the pool was mapped anew")

    # -- awake

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        owned = await self._ranks.wake(epoch, pass_fds)
        where = (owned.pages_address, owned.range_bytes, owned.private_at)
        ready = self._readiness.found(*where)
        if ready is None:
            if self._device.type == "cuda":  # minutes, where nothing was compiled on this machine before
                self.on_loading("kernels are compiled for pages at another address")
            ready = await self._in_step_thread(lambda: self._readiness.make(*where))
        blocks = self._blocks = PoolBlocks(owned.pool)
        scheduler = self._ranks.scheduler(self._readiness.settings_for(ready.computer), blocks, owned.pool)
        self._stepper.serve(scheduler, ready.computer)
        return Woken(owned.blocks, owned.reason, owned.marks)

    def canary_passed(self) -> None:
        if self.memory.owned is not None:
            with self._stepper.lock:
                self.memory.owned.pool.canary_passed()

    async def rest(self) -> None:
        left = await asyncio.to_thread(self._stepper.rest)
        if left:
            self._closed(left)
        self._blocks = None
        await self._ranks.rest()
        await self.memory.rest()

    def submit(self, stream: int, request: GenerateRequest) -> None:
        with self._stepper.lock:
            scheduler = self._stepper.scheduler
            if scheduler is None:
                raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine is not awake")
            self._scheduler_for(request, scheduler).submit(stream, request)
        self._stepper.poke()

    def _scheduler_for(self, request: GenerateRequest, scheduler: Scheduler) -> Scheduler:
        """The canary's known answer holds for steps of the same shape: only `exact` may batch it with others."""
        ready = self._readiness.ready
        if request is not self.canary.request or self.settings.exact or self._ranks.count > 1 or ready is None:
            return scheduler
        return self._stepper.serve_alone(self._readiness.alone(ready))

    def cancel(self, stream: int) -> None:
        self._stepper.cancel(stream)

    # -- from the step thread

    def _deliver(self) -> bool:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._hand_over)
        return self._keeping_up

    def _hand_over(self) -> None:
        outputs = self._stepper.made.popleft()
        if outputs and self._loop is not None:
            self._keeping_up = self._sink(outputs)

    def _step_failed(self, why: str) -> None:
        self.on_fatal(f"a step failed: {why}")


def _die(why: str) -> None:
    say(why)
    os._exit(1)
