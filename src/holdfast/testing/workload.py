"""Runs many streams at once and compares their answers with the same requests' uninterrupted ones.

A stream survives if its tokens and its text equal those of the uninterrupted run and it ended with `[DONE]`. The stall
is the longest gap between two tokens of any stream, minus the longest gap of the uninterrupted run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from holdfast.core.tasks import beside
from holdfast.testing.answers import Answer
from holdfast.testing.clients import Received, StreamClient, chat_body, open_client, read_answer
from holdfast.testing.rig import DeploymentRig
from holdfast.testing.waiting import in_thread

AFTER_FAILURE_S = 0.1  # a broken server need not get 100 requests a second


class Requests(Protocol):
    """The requests of a number of clients."""

    @property
    def streams(self) -> int: ...

    def body(self, number: int) -> tuple[str, dict[str, Any]]:
        """Return path and body of a client's request; they are the same at every call."""


@dataclass(frozen=True, slots=True)
class Workload:
    streams: int = 64
    tokens: int = 300
    seed: int = 1
    model: str = "holdfast-sim"

    def body(self, number: int) -> tuple[str, dict[str, Any]]:
        """Return one kind of request: greedy or sampled, chat or raw, some with stop strings or penalties."""
        kinds: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0.8, "top_p": 0.95},
            {"temperature": 1.0, "stop": ["\u0001never"]},
            {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.2, "top_k": 10},
            {"temperature": 0.9, "logprobs": True, "top_logprobs": 2},
        ]
        more = {"model": self.model, "seed": self.seed * 1000 + number, "return_token_ids": True}
        more |= kinds[number % len(kinds)]
        body = chat_body(f"Tell me story number {number}.", self.tokens, **more)
        if number % 7 != 6:
            return "/v1/chat/completions", body
        body["prompt"] = body.pop("messages")[0]["content"]
        if body.pop("top_logprobs", None) is not None:
            body["logprobs"] = 2
        return "/v1/completions", body


@dataclass(frozen=True, slots=True)
class Outcome:
    fault: str
    streams: int
    finished: int
    same_tokens: int
    same_text: int
    same_logprobs: int
    resumed: int
    stall_ms: float
    worst_gap_ms: float
    unbroken_worst_gap_ms: float
    errors: tuple[str, ...]

    @property
    def survived(self) -> bool:
        return self.finished == self.same_tokens == self.same_text == self.same_logprobs == self.streams

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"survived": self.survived}


class Asking:
    """Clients of one port, each with its own request. Always true: answers are parsed only when they are needed; a
    client that parses during the run would measure its own pauses."""

    def __init__(self, port: int, workload: Requests) -> None:
        self._port = port
        asked = [workload.body(number) for number in range(workload.streams)]
        self._requests = [(path, json.dumps(body).encode()) for path, body in asked]
        self.open: dict[int, StreamClient] = {}  # each client's last connection
        self.received: list[tuple[int, Received]] = []  # complete answers, by client
        self.unfinished = 0

    async def once(self) -> list[Received]:
        return await asyncio.gather(*map(self._one, range(len(self._requests))))

    @contextlib.asynccontextmanager
    async def all_the_time(self, until_s: float | None = None) -> AsyncIterator[None]:
        """Let each client send its request repeatedly while the body runs. Then wait for the running answers, at most
        until `until_s` of the monotonic clock."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(self._keep_asking(number, over)) for number in range(len(self._requests))]
            yield
            over.set()
            left_s = None if until_s is None else max(1.0, until_s - time.monotonic())
            _, late = await asyncio.wait(asking, timeout=left_s)
            self.unfinished = len(late)
            for task in late:
                task.cancel()

    async def _keep_asking(self, number: int, over: asyncio.Event) -> None:
        while not over.is_set():
            received = await self._one(number)
            self.received.append((number, received))
            if received.status != 200:
                await asyncio.sleep(AFTER_FAILURE_S)

    async def _one(self, number: int) -> Received:
        self.open[number] = client = await open_client(self._port)
        try:
            return await client.request(*self._requests[number])
        finally:
            client.close()


async def run_streams(port: int, workload: Requests) -> list[Answer]:
    """Run all streams at once; parse them when all have ended."""
    return [read_answer(one) for one in await Asking(port, workload).once()]


async def hit_in_the_middle(rig: DeploymentRig, workload: Workload, hit: Callable[[], None]) -> list[Answer]:
    """Run the load, and call `hit` once a quarter of its tokens has been generated."""
    before = await in_thread(rig.tokens_total)
    enough = workload.streams * workload.tokens // 4
    async with beside(run_streams(rig.port, workload), "streams") as running:
        await in_thread(rig.wait_until, lambda: rig.tokens_total() - before > enough, "streams to get under way")
        await in_thread(hit)
        return await running


def compare(fault: str, unbroken: list[Answer], broken: list[Answer]) -> Outcome:
    pairs = list(zip(unbroken, broken, strict=True))
    worst_s = max((max(answer.gaps_s, default=0.0) for answer in broken), default=0.0)
    usual_s = max((max(answer.gaps_s, default=0.0) for answer in unbroken), default=0.0)
    return Outcome(
        fault=fault,
        streams=len(broken),
        finished=sum(answer.done and answer.finish == "length" and not answer.error for answer in broken),
        same_tokens=sum(a.tokens == b.tokens and len(b.tokens) > 0 for a, b in pairs),
        same_text=sum(a.text == b.text for a, b in pairs),
        same_logprobs=sum(a.logprobs == b.logprobs for a, b in pairs),
        resumed=sum(answer.resumed > 0 for answer in broken),
        stall_ms=round((worst_s - usual_s) * 1000, 1),
        worst_gap_ms=round(worst_s * 1000, 1),
        unbroken_worst_gap_ms=round(usual_s * 1000, 1),
        errors=tuple(failures(broken)),
    )


def failures(answers: Iterable[Answer]) -> list[str]:
    """Return up to three different errors of incomplete answers."""
    return sorted({answer.wrong for answer in answers} - {""})[:3]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and max."""
    ordered = sorted(values)
    at = {"p50": len(ordered) // 2, "p99": min(len(ordered) - 1, len(ordered) * 99 // 100), "max": len(ordered) - 1}
    return {name: round(ordered[rig], 1) for name, rig in at.items()} if ordered else dict.fromkeys(at, 0.0)
