"""The torch engine: a real model as a shadow engine, its weights and KV pages in a vault.

Always true: steps are made in a thread of their own, so beats and connections never wait for the model; before `wake`
only private memory is written; a wake binds what is mapped already and computes nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.engines.contract import Canary, ClosedSink, Limits, Progress, StepSink, Woken
from holdfast.engines.place import Place
from holdfast.engines.torch import checkpoint as checkpoints
from holdfast.engines.torch.canary import canary_request, known_answer, private_blocks, run_canary
from holdfast.engines.torch.geometry import pool_geometry
from holdfast.engines.torch.kv_blocks import PoolBlocks
from holdfast.engines.torch.linear import Arithmetic
from holdfast.engines.torch.model import Model, bind
from holdfast.engines.torch.paged import kv_view
from holdfast.engines.torch.scheduler import Scheduler, SchedulerSettings
from holdfast.engines.torch.settings import TorchSettings
from holdfast.engines.torch.stepper import PREFILL_BUDGET_MS, Computer, Stepper, threads_for, use_threads
from holdfast.engines.torch.weights import TorchWeights
from holdfast.engines.vault_memory import VaultMemory
from holdfast.memory.devices import open_device
from holdfast.memory.torch_tensors import dtype_name, storage_at, tensor_in, torch_device

# The event loop must get its turn while the step thread runs Python between two products.
SWITCH_INTERVAL_S = 0.0005


class TorchEngine:
    """`load`, `start`, then any number of (`wake`, `rest`)."""

    def __init__(
        self, checkpoint: checkpoints.Checkpoint, settings: TorchSettings, place: Place, progress: checkpoints.Progress
    ) -> None:
        self.settings = settings
        self.config = config = checkpoint.config
        device = torch_device(place.device)
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._device = device
        self.weights = TorchWeights(checkpoint, self._dtype, device, progress)
        self.geometry = pool_geometry(checkpoint, settings, self._dtype)
        reach = self.geometry.block_count * settings.block_tokens
        self.context_tokens_max = min(settings.context_tokens_max or config.context_tokens_max, reach)
        self.on_fatal: Callable[[str], None] = _die
        self.on_owner_gone: Callable[[], None] = lambda: None
        self.on_memory: Callable[[str], None] = lambda why: None
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
            on_owner_gone=lambda: self.on_owner_gone(),
            on_memory=lambda why: self.on_memory(why),
            on_fatal=lambda why: self.on_fatal(why),
            on_room=lambda: self._stepper.poke(),
        )
        self.gpu_fence = self.memory.gpu_fence
        self.canary = Canary(canary_request(config.vocabulary), ())
        self._answers = Path(place.vault_socket).parent
        self._stepper = Stepper(self._deliver, self._step_failed, threads_for(settings.threads))
        self._blocks: PoolBlocks | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sink: StepSink = lambda outputs: True
        self._closed: ClosedSink = lambda streams: None
        self._keeping_up = True
        self._right = False

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
    def deterministic(self) -> bool:
        return self.settings.exact

    @property
    def last_epoch(self) -> int:
        return self.memory.client.last_epoch

    @property
    def recomputed_tokens_max(self) -> int:
        return self._blocks.recomputed_tokens_max if self._blocks is not None else 0

    def progress(self) -> Progress:
        stepper, scheduler = self._stepper, self._stepper.scheduler
        recent = sorted(stepper.recent_s)
        return Progress(
            steps=stepper.steps,
            running=len(scheduler.running) if scheduler is not None else 0,
            waiting=len(scheduler.waiting) if scheduler is not None else 0,
            step_ms_p99=recent[(len(recent) * 99 - 1) // 100] * 1000 if recent else 0.0,
            budget_ms=PREFILL_BUDGET_MS if stepper.prefilling else 0.0,
            thread=stepper.thread,
        )

    # -- loading and standing by

    async def load(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        await self.memory.load(self.weights)
        if not await self.check():
            return  # its caller checks too, and says so
        if self.memory.unmapped:
            await self.memory.sleep()

    async def start(self, sink: StepSink, closed: ClosedSink) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink, self._closed = sink, closed
        self._stepper.start()

    async def stop(self) -> None:
        self._loop = None
        await asyncio.to_thread(self._stepper.stop)
        self._blocks = None
        await self.memory.close()

    async def check(self) -> bool:
        """The canary, alone, in private blocks. Asleep there is nothing to read: the last outcome stands."""
        if not self.memory.asleep:
            await self.memory.settled.wait()
            await self.memory.still.acquire()
            running = asyncio.get_running_loop().run_in_executor(None, self._check)
            # By its end, not by ours: who waits here may be cancelled, the thread goes on reading what is mapped.
            running.add_done_callback(lambda _: self.memory.still.release())
            self._right = await asyncio.shield(running)
        return self._right

    def _check(self) -> bool:
        use_threads(threads_for(self.settings.threads))
        tokens = self._run_canary()
        self.canary = Canary(self.canary.request, known_answer(self._answers, self._kind, tokens))
        return tokens == self.canary.tokens

    def _run_canary(self) -> tuple[int, ...]:
        mapping = self.memory.pool.mapping
        assert mapping is not None, "private memory is mapped from the first load on"
        kv = self._kv(mapping.private_address, mapping.private_size)
        computer = Computer(self._bind(), kv, self.settings.block_tokens)
        blocks = range(kv.shape[0])
        return run_canary(self.canary.request, self._scheduler_settings(), computer, blocks, self.settings.block_tokens)

    @property
    def _kind(self) -> str:
        """Engines of one kind answer alike."""
        how = "exact" if self.settings.exact else "fast"
        where = f"{self._device.type}, torch {torch.__version__}, {threads_for(self.settings.threads)} threads"
        return f"{self.weights.identity}, {how}, {where}"

    # -- awake

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        owned = await self.memory.own(epoch)
        geometry = self.geometry
        kv = self._kv(owned.pages_address, geometry.block_bytes * geometry.block_count)
        blocks = self._blocks = PoolBlocks(owned.pool)
        scheduler = Scheduler(self._scheduler_settings(), blocks)
        self._stepper.serve(scheduler, Computer(self._bind(), kv, self.settings.block_tokens))
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
        await self.memory.rest()

    def submit(self, stream: int, request: GenerateRequest) -> None:
        with self._stepper.lock:
            scheduler = self._stepper.scheduler
            if scheduler is None:
                raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine is not awake")
            scheduler.submit(stream, request)
        self._stepper.poke()

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

    # -- parts

    def _bind(self) -> Model:
        arithmetic = Arithmetic(exact=self.settings.exact)
        return bind(self.weights.tensors, self.config, positions_max=self.context_tokens_max, arithmetic=arithmetic)

    def _kv(self, address: int, size: int) -> torch.Tensor:
        flat = tensor_in(
            storage_at(address, size, self._device, self), self._dtype, 0, (size // self._dtype.itemsize,), (1,)
        )
        config = self.config
        return kv_view(flat, config.layers, config.kv_heads, config.head_size, self.settings.block_tokens)

    def _scheduler_settings(self) -> SchedulerSettings:
        settings = self.settings
        return SchedulerSettings(
            self.config.vocabulary,
            frozenset(self.config.eos_token_ids),
            self.context_tokens_max,
            settings.concurrency,
            settings.queue,
            settings.step_tokens_max,
        )


def _die(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(1)
