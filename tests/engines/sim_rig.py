"""What the sim engine's tests share: an engine, everything it said, and waits with a bound."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.engines.sim import SimEngine, SimSettings, parse_fault
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.vocabulary import load

FAST = {"ttft_ms": 0.0, "tpot_ms": 0.0}
BOUND_S = 20.0  # far above what any of these takes, on a busy machine too


class Rig:
    """An engine and everything it said, with a way to wait for a state of that."""

    def __init__(self, **settings: Any) -> None:
        self.engine = SimEngine(SimSettings(**settings), random.Random(1))
        self.batches: list[list[Output]] = []
        self.closed: list[int] = []
        self.willing = True
        self.on_batch: Callable[[list[Output]], None] = lambda outputs: None
        self._changed = asyncio.Event()

    def sink(self, outputs: list[Output]) -> bool:
        self.batches.append(outputs)
        self._changed.set()
        self.on_batch(outputs)
        return self.willing

    def on_closed(self, streams: list[int]) -> None:
        self.closed.extend(streams)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def tokens(self, stream: int) -> list[int]:
        return [token for output in self.of(stream) for token in output.tokens]

    def of(self, stream: int) -> list[Output]:
        return [output for batch in self.batches for output in batch if output.stream == stream]

    def ended(self, *streams: int) -> bool:
        last = {output.stream for batch in self.batches for output in batch if output.finish or output.failure}
        return last.issuperset(streams)

    def fault(self, **command: Any) -> None:
        self.engine.inject(parse_fault(command))


@asynccontextmanager
async def rig(**settings: Any) -> AsyncIterator[Rig]:
    made = Rig(**settings)
    await made.engine.start(made.sink, made.on_closed)
    try:
        yield made
    finally:
        await made.engine.stop()


def request(
    tokens: list[int], max_tokens: int = 30, *, prompt_len: int | None = None, **kwargs: Any
) -> GenerateRequest:
    stops = kwargs.pop("stop_token_ids", [])
    sampling = Sampling(max_tokens, **{"seed": 7, "ignore_eos": True, **kwargs})
    return GenerateRequest("r", tokens, len(tokens) if prompt_len is None else prompt_len, sampling, stops)


def expected(asked: GenerateRequest, count: int) -> list[int]:
    sequence = Sequence(load(), asked.tokens, asked.prompt_len, asked.sampling, asked.stop_token_ids)
    return [sequence.advance() for _ in range(count)]
