"""The base class of a small hosted engine: a subclass supplies weights, a geometry and `compute`, which makes one step
over KV pages.

The paged scheduler keeps streams, batches and blocks. Steps run in the event loop, one after the other, so this suits
engines whose steps are short or run elsewhere.

Always true: a step is one call of `compute` and ends in one call of `outputs`. No step is scheduled without work.
"""

from __future__ import annotations

import asyncio
import os
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.engines.contract import Capabilities, EngineEvents, Limits, Progress, p99_ms
from holdfast.engines.host.engine import HostedEngine
from holdfast.engines.host.loading import WeightsPlan
from holdfast.engines.host.pool import Owned
from holdfast.engines.host.proving import Canary
from holdfast.engines.paged.blocks import PoolBlocks, blocks_for
from holdfast.engines.paged.canary import PROMPT_TOKENS, TOKENS, canary_steps, run_canary_in_loop
from holdfast.engines.paged.scheduler import Scheduler, SchedulerSettings
from holdfast.engines.paged.sequences import StepPlan
from holdfast.kv.geometry import Geometry
from holdfast.kv.pool import KvUse, Resumes
from holdfast.memory.client.pool import PoolMapping
from holdfast.memory.devices import view

EASE_OFF_S = 0.001  # a congested receiver drains a socket buffer in about this time
RECENT_STEPS = 256  # enough for a p99 to mean a few steps


class PagedEngine(HostedEngine):
    """A hosted engine with a paged scheduler. `canary` has a prompt of `PROMPT_TOKENS` tokens and a known answer of
    `TOKENS` tokens (`paged.canary`)."""

    def __init__(self, weights: WeightsPlan, geometry: Geometry, settings: SchedulerSettings, canary: Canary) -> None:
        self.weights, self.geometry, self.settings, self._canary = weights, geometry, settings, canary
        self.private_bytes = blocks_for(PROMPT_TOKENS + TOKENS, geometry.block_tokens) * geometry.block_bytes
        self._scheduler: Scheduler | None = None  # while there is a pool
        self._blocks: PoolBlocks | None = None
        self._pages = memoryview(b"")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: EngineEvents
        self._timer: asyncio.Handle | None = None
        self._steps, self._recent_s = 0, deque[float](maxlen=RECENT_STEPS)
        self._thread = (os.getpid(), threading.get_native_id())

    @abstractmethod
    def compute(self, plan: StepPlan, pages: memoryview) -> Mapping[int, int]:
        """Write the KV of every segment's positions into its blocks; return the next token of each stream that wants
        one. Block n begins at byte n * `geometry.block_bytes`. Keep no view of the pages."""

    @property
    def limits(self) -> Limits:
        return Limits(self.settings.concurrency, self.settings.queue, self.settings.context_tokens_max)

    @property
    def capabilities(self) -> Capabilities:
        build, vocabulary = type(self).__name__, self.settings.vocabulary
        return Capabilities(deterministic=True, build=build, dtype=self.geometry.dtype, vocabulary=vocabulary)

    @property
    def canary(self) -> Canary:
        return self._canary

    @property
    def resumes(self) -> Resumes:
        return self._blocks.resumes if self._blocks is not None else Resumes()

    def progress(self) -> Progress:
        scheduler, blocks = self._scheduler, self._blocks
        return Progress(
            steps=self._steps,
            running=len(scheduler.running) if scheduler is not None else 0,
            waiting=len(scheduler.waiting) if scheduler is not None else 0,
            step_ms_p99=p99_ms(self._recent_s),
            budget_ms=0.0,
            thread=self._thread,
            kv=blocks.use() if blocks is not None else KvUse(),
        )

    def ping(self, answer: Callable[[], None]) -> None:
        """Answer in the event loop's next turn, which is between two steps."""
        if self._loop is not None:
            self._loop.call_soon(answer)

    # -- standing by

    async def load(self, events: EngineEvents) -> None:
        self._loop, self._events = asyncio.get_running_loop(), events

    async def stop(self) -> None:
        await self.end()

    async def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        with view(mapping.private_address, mapping.private_size, writable=True) as pages:
            blocks, size = range(len(pages) // self.geometry.block_bytes), self.geometry.block_tokens
            asked, settings = self._canary.request, self.settings
            steps = canary_steps(asked, settings, lambda plan: (self.compute(plan, pages), {}), blocks, size, dropped)
            tokens = await run_canary_in_loop(steps)
        return "" if tokens == self._canary.tokens else self._canary.suspects

    # -- awake

    async def begin(self, owned: Owned) -> None:
        size = self.geometry.block_bytes * self.geometry.block_count
        self._pages = view(owned.pages_address, size, writable=True)
        self._blocks = PoolBlocks(owned.pool)
        self._scheduler = Scheduler(self.settings, self._blocks)

    async def end(self) -> list[int]:
        if self._timer is not None:
            self._timer.cancel()
        scheduler, self._scheduler, self._blocks, self._timer = self._scheduler, None, None, None
        self._pages.release()
        return scheduler.clear() if scheduler is not None else []

    def submit(self, stream: int, request: GenerateRequest) -> None:
        if self._scheduler is None:
            raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine stands by")
        self._scheduler.submit(stream, request)
        self.room()

    def cancel(self, stream: int) -> None:
        if self._scheduler is not None:
            self._scheduler.cancel(stream)

    def withdraw(self, stream: int) -> bool:
        return self._scheduler is not None and self._scheduler.cancel(stream, unbegun=True)

    def room(self) -> None:
        if self._timer is None and self._scheduler is not None and self._loop is not None:
            self._timer = self._loop.call_soon(self._step)

    def _step(self) -> None:
        scheduler, loop = self._scheduler, self._loop
        assert scheduler is not None
        assert loop is not None
        began_s = loop.time()
        outputs, plan = scheduler.take_early(), scheduler.plan()
        if plan is not None:
            outputs += scheduler.retire(plan, self.compute(plan, self._pages))
            self._steps += 1
            self._recent_s.append(loop.time() - began_s)
        keeping_up = self._events.outputs(outputs) if outputs else True
        self._timer = None
        if self._scheduler is scheduler and (plan is not None or scheduler.early):
            self._timer = loop.call_later(0.0 if keeping_up else EASE_OFF_S, self._step)
