"""The streams of the chain bench: what clients see of the engines.

Always true: nothing is parsed while engines are killed, since a busy client would read its own pauses as an engine's;
tokens are counted as they come, and an answer is read once all is over.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import UserError
from holdfast.testing.answers import Answer
from holdfast.testing.clients import Received, StreamClient
from holdfast.testing.load import failures

# Every chunk that brings tokens has this in it, and the last one may have it empty.
IDS, NO_IDS = b'"token_ids":[', b'"token_ids":[]'
FAILURES_MAX = 20  # of one client in a row: what fails so often is broken, and need not be asked 100 times a second
AFTER_FAILURE_S = 0.1


class Stream(StreamClient):
    """One client's connection, with a count of what its answer has brought so far."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0  # chunks with tokens, of the answer under way
        self.last_s = 0.0
        self.worst_gap_s = 0.0  # between two of them since `forget_gaps`
        self.since = 0  # of them since then

    def data_received(self, data: bytes) -> None:
        count = data.count(IDS) - data.count(NO_IDS)
        if count > 0:
            now_s = time.perf_counter()
            if self.tokens:
                self.worst_gap_s = max(self.worst_gap_s, now_s - self.last_s)
            self.tokens += count
            self.since += count
            self.last_s = now_s
        super().data_received(data)

    def forget_gaps(self) -> None:
        """A gap that is open now counts from here on."""
        self.worst_gap_s, self.since = 0.0, 0

    async def ask(self, body: bytes) -> Received:
        self.tokens = 0
        return await self.request("/v1/completions", body)


@dataclass(slots=True)
class Clients:
    """Streams that ask the same again and again, each its own request."""

    port: int
    bodies: list[bytes]
    tokens: int  # of every answer
    streams: list[Stream] = field(default_factory=list)
    received: list[tuple[int, Received]] = field(default_factory=list)  # whole answers, by stream
    over: bool = False

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in self.bodies:
            _, stream = await loop.create_connection(Stream, "127.0.0.1", self.port)
            self.streams.append(stream)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    async def once(self) -> list[Received]:
        return await asyncio.gather(*(stream.ask(body) for stream, body in zip(self.streams, self.bodies, strict=True)))

    async def keep_asking(self, number: int) -> None:
        """Until it is over; the answer under way then comes to its end."""
        failures = 0
        while not self.over and failures < FAILURES_MAX:
            received = await self.streams[number].ask(self.bodies[number])
            self.received.append((number, received))
            failures = failures + 1 if received.status != 200 or received.error else 0
            if failures:
                await asyncio.sleep(AFTER_FAILURE_S)

    # -- what they see now

    def decoding(self, seen: int, left: int) -> bool:
        """Whether every stream is in the middle of its answer: so many tokens came, and so many are to come."""
        return all(seen <= stream.tokens <= self.tokens - left for stream in self.streams)

    def forget_gaps(self) -> None:
        for stream in self.streams:
            stream.forget_gaps()

    def worst_gap_ms(self) -> float:
        return round(max((stream.worst_gap_s for stream in self.streams), default=0.0) * 1000, 2)

    def moved_on(self, tokens: int) -> bool:
        """Whether every stream has had so many tokens since `forget_gaps`."""
        return all(stream.since >= tokens for stream in self.streams)


# -- answers, once all is over


def unbroken(answers: Sequence[Answer], received: Sequence[Received]) -> dict[str, float]:
    """How it goes when nothing happens; UserError if it does not go even then."""
    if wrong := failures(answers):
        raise UserError(f"an unbroken answer failed: {wrong[0]}")
    gaps_s = [gap_s for answer in answers for gap_s in answer.gaps_s]
    return {
        "unbroken_step_ms_p50": round(statistics.median(gaps_s) * 1000, 2),
        "unbroken_first_token_s_max": round(max(one.first_s for one in received), 2),
    }
