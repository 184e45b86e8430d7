"""What the sim engine's tests share: an engine without a vault, in this process, and what its tokens must be."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from holdfast.core.requests import GenerateRequest
from holdfast.engines.sim.engine import SimEngine
from holdfast.engines.sim.faults import parse_fault
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.vocabulary import load
from holdfast.spec.engines import SimSettings
from tests.rigs.engines import any_engine
from tests.rigs.engines.any_engine import request

FAST = {"ttft_ms": 0.0, "tpot_ms": 0.0}


class Rig(any_engine.Rig):
    """One that is broken on command."""

    engine: SimEngine

    def fault(self, **command: Any) -> None:
        self.engine.inject(parse_fault(command))


@asynccontextmanager
async def rig(**settings: Any) -> AsyncIterator[Rig]:
    made = Rig(SimEngine(SimSettings(**settings), random.Random(1)))
    await made.load()
    try:
        yield made
    finally:
        await made.engine.stop()


def expected(asked: GenerateRequest, count: int) -> list[int]:
    sequence = Sequence(load(), asked.tokens, asked.prompt_len, asked.sampling, asked.stop_token_ids)
    return [sequence.advance() for _ in range(count)]


def right(tokens: list[int], count: int) -> list[int]:
    """What a request of these tokens is answered."""
    return expected(request(tokens, count), count)
