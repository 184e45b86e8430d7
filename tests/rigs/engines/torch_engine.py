"""What the torch engine's tests share: an engine of the tiny model, awake in the test's own process, on one thread.

The model's steps run in a thread of theirs as always. Engines that are to be killed are children (any_engine.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast.core.requests import GenerateRequest
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.engine import ReadyComputer, TorchEngine
from holdfast.engines.torch.files.resolve import TINY
from holdfast.engines.torch.launched import LaunchedStep
from tests.rigs.engines import any_engine
from tests.rigs.engines.any_engine import BOUND_S, TINY_BLOCK_GIB, Vault, make_engine

BLOCK = 16
BLOCK_GIB = TINY_BLOCK_GIB
SETTINGS: dict[str, Any] = any_engine.SETTINGS["torch"]
# All that a stream may want: one of each.
WANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    {"top_logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5, "frequency_penalty": 0.3, "top_logprobs": 1},
    {"min_tokens": 6, "ignore_eos": False, "logit_bias": {3: 2.0}},
]


class Rig(any_engine.Rig):
    """One engine, and the progress of its loads."""

    def __init__(self, vault: Vault, engine_id: int = 0, **settings: Any) -> None:
        self.progress: list[tuple[str, int, int | None]] = []
        self.epoch = 2000
        note = lambda *words: self.progress.append(words)  # noqa: E731
        super().__init__(make_engine("torch", settings, vault.failover(engine_id), note))

    @property
    def hosted(self) -> TorchEngine:
        return self.engine.hosted

    @property
    def blocks(self) -> PoolBlocks:
        assert self.hosted._blocks is not None, "asleep"
        return self.hosted._blocks

    @property
    def scheduler(self) -> Scheduler:
        assert self.hosted._stepper.scheduler is not None, "asleep"
        return self.hosted._stepper.scheduler

    @property
    def ready(self) -> ReadyComputer:
        assert self.hosted._readiness.ready is not None
        return self.hosted._readiness.ready

    async def until_mapped(self, epoch: int) -> None:
        """Wait until the pool of that epoch is mapped."""
        async with asyncio.timeout(BOUND_S):
            while not self.engine.memory.pool.mapped_is(epoch):
                await asyncio.sleep(0.01)

    async def wake_again(self, **computer: Any) -> None:
        """It rests, and wakes with a computer that has these, such as a step ahead, as on a GPU."""
        await self.engine.become_standby()
        for name, value in computer.items():
            setattr(self.ready.computer, name, value)
        self.epoch += 1
        await self.engine.wake(self.epoch)


@asynccontextmanager
async def rig(vault: Vault, epoch: int = 1000, **given: Any) -> AsyncIterator[Rig]:
    made = Rig(vault, **given)
    try:
        await made.load()
        await made.engine.wake(epoch)
        yield made
    finally:
        await made.engine.stop()
    assert not made.heard("fatal"), made.told


@asynccontextmanager
async def rigs(*made: Rig) -> AsyncIterator[None]:
    """Stop engines that the test loads, however it ends."""
    try:
        yield
    finally:
        for each in made:
            await each.engine.stop()


@asynccontextmanager
async def doomed(vault: Vault, why: str, **given: Any) -> AsyncIterator[Rig]:
    """An engine that has to end by an error of its device."""
    async with rig(vault, **given) as r:
        yield r
        (fatal,) = r.heard("fatal")
        assert why in fatal
        r.told.clear()


def on_launch(monkeypatch: pytest.MonkeyPatch, heard: Callable[[StepPlan], object]) -> None:
    """`heard` is told of every step's plan just before it is launched; it may wait, or raise."""
    real = Computer.launch

    def launch(self: Computer, plan: StepPlan) -> LaunchedStep:
        heard(plan)
        return real(self, plan)

    monkeypatch.setattr(Computer, "launch", launch)


def request(tokens: list[int], max_tokens: int = 24, **given: Any) -> GenerateRequest:
    return any_engine.request(tokens, max_tokens, **{"temperature": 0.0, **given})


def prompt(length: int, number: int = 0) -> list[int]:
    """Return a prompt of which no two numbers share a block."""
    return [
        (7919 * number + 31 * failover * failover + 101 * failover + 17) % TINY.vocabulary for failover in range(length)
    ]
