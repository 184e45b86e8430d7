"""Clients of a fleet, each of whose answers is compared with the first one to the same request.

Always true: a request is its model, its number and its length, and nothing else, so that the same request must
get the same answer again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from holdfast.testing.answers import Answer, difference
from holdfast.testing.clients import ask, read_answer
from holdfast.testing.workload import spread

TOKENS = 24
END_S = 240.0  # from the last question to the last answer: three turns, and as many starts on a loaded machine


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that has come to its end."""

    model: str
    at_s: float  # unix
    wait_s: float  # until its first token
    ended_s: float  # unix
    lost: str  # why there is no whole answer, or ""
    wrong: str  # how it differs from the first one, or ""


class Crowd:
    """Runs clients of one port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[Asked] = []
        self.under_way = 0
        self.first: dict[tuple[str, int, int], Answer] = {}  # by model, number and tokens

    async def ask(self, model: str, number: int, tokens: int = TOKENS) -> Asked:
        body = {"model": model, "prompt": f"story {number}", "max_tokens": tokens, "seed": number, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True}
        at_s = time.time()
        self.under_way += 1
        try:
            received = await ask(self.port, "/v1/completions", body)
        finally:
            self.under_way -= 1
        answer = read_answer(received)
        first = self.first.setdefault((model, number, tokens), answer) if not answer.wrong else answer
        wait_s = answer.token_times_s[0] - received.sent_s if answer.token_times_s else 0.0
        wrong = difference(first, answer) if not answer.wrong else ""
        self.asked.append(Asked(model, at_s, wait_s, time.time(), answer.wrong, wrong))
        return self.asked[-1]

    @contextlib.asynccontextmanager
    async def asking(self, clients: int, one: Callable[[int], Awaitable[None]]) -> AsyncIterator[None]:
        """So many do `one` again and again while the body runs; then all come to their ends."""
        over = asyncio.Event()

        async def go_on(number: int) -> None:
            while not over.is_set():
                await one(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(go_on(number))
            try:
                yield
            finally:
                over.set()

    def row(self) -> dict[str, Any]:
        """Return what they saw."""
        waits: dict[str, list[float]] = {}
        for one in self.asked:
            waits.setdefault(one.model, []).append(one.wait_s * 1000)
        lost, wrong = ([told for one in self.asked if (told := getattr(one, what))] for what in ("lost", "wrong"))
        return {
            "requests": len(self.asked),
            "answered": len(self.asked) - len(lost),
            "lost": len(lost),
            "wrong": len(wrong),
            "first_bad": [*lost[:3], *wrong[:3]],
            "wait_ms": {model: spread(found) for model, found in sorted(waits.items())},
        }
