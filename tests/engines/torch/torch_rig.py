"""What the torch engine's tests share: an engine of the tiny model, awake in the test's own process, on one thread.

The model's steps run in a thread of theirs as always. Engines that are to be killed are children (engine_rig.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import engine_rig
from engine_rig import TINY_BLOCK_GIB, Vault, make_engine

from holdfast.core.requests import GenerateRequest
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.torch.engine import TorchTenant
from holdfast.engines.torch.files.tiny import TINY

BLOCK = 16
BLOCK_GIB = TINY_BLOCK_GIB
SETTINGS: dict[str, Any] = engine_rig.SETTINGS["torch"]


class Rig(engine_rig.Rig):
    """One engine, and the progress of its loads."""

    def __init__(self, vault: Vault, engine_id: int = 0, **settings: Any) -> None:
        self.progress: list[tuple[str, int, int | None]] = []
        note = lambda *words: self.progress.append(words)  # noqa: E731
        super().__init__(make_engine("torch", settings, vault.place(engine_id), note))

    @property
    def tenant(self) -> TorchTenant:
        return self.engine.tenant

    @property
    def blocks(self) -> PoolBlocks:
        assert self.tenant._blocks is not None, "asleep"
        return self.tenant._blocks

    @property
    def scheduler(self) -> Scheduler:
        assert self.tenant._stepper.scheduler is not None, "asleep"
        return self.tenant._stepper.scheduler


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


def request(tokens: list[int], max_tokens: int = 24, **given: Any) -> GenerateRequest:
    return engine_rig.request(tokens, max_tokens, **{"temperature": 0.0, **given})


def prompt(length: int, number: int = 0) -> list[int]:
    """No two numbers share a block."""
    return [(7919 * number + 31 * place * place + 101 * place + 17) % TINY.vocabulary for place in range(length)]
