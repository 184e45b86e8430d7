"""Many streams at once, whose answers are compared with the same requests' unbroken ones.

A stream survives if its tokens and its text equal the unbroken run's and it ended with `[DONE]`. The stall is the worst
gap between two tokens of any stream, minus the unbroken run's worst gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.core.tasks import beside
from holdfast.testing.clients import Answer, ask, chat_body, read_answer
from holdfast.testing.deployment import Deployment


@dataclass(frozen=True, slots=True)
class Load:
    """What runs while a worker is hit."""

    streams: int = 64
    tokens: int = 300
    seed: int = 1
    model: str = "holdfast-sim"

    def body(self, number: int) -> tuple[str, dict[str, Any]]:
        """Greedy and sampled, chat and raw, with stop strings, logprobs and penalties."""
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
    """What the clients saw."""

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


async def run_streams(port: int, load: Load) -> list[Answer]:
    """All streams at once, read when all are over."""
    received = await asyncio.gather(*(ask(port, *load.body(number)) for number in range(load.streams)))
    answers = []
    for one in received:
        if one.status != 200:
            answers.append(_failed(f"status {one.status} {one.error} {one.body()[:200]!r}"))
        else:
            answers.append(read_answer(one))
    return answers


def _failed(why: str) -> Answer:
    return Answer("", [], None, False, {"message": why}, 0, None, [], [], [], 0)


async def hit_in_the_middle(deployment: Deployment, load: Load, hit: Callable[[], None]) -> list[Answer]:
    """Run the load; once streams are well under way on every worker, hit."""
    loop = asyncio.get_running_loop()
    async with beside(run_streams(deployment.port, load), "streams") as running:
        await loop.run_in_executor(None, _wait_under_way, deployment, load)
        await loop.run_in_executor(None, hit)
        return await running


def _wait_under_way(deployment: Deployment, load: Load) -> None:
    enough = load.streams * load.tokens // 4
    names = [name for name, process in deployment.processes.items() if name.startswith("worker")]
    before = sum(deployment.worker_facts(name)["tokens_total"] for name in names)
    deployment.wait_until(
        lambda: sum(deployment.worker_facts(name)["tokens_total"] for name in names) - before > enough,
        "streams to get under way",
        30.0,
    )


def compare(fault: str, unbroken: list[Answer], broken: list[Answer]) -> Outcome:
    pairs = list(zip(unbroken, broken, strict=True))
    worst_s = max((max(answer.gaps_s, default=0.0) for answer in broken), default=0.0)
    usual_s = max((max(answer.gaps_s, default=0.0) for answer in unbroken), default=0.0)
    errors = [str(answer.error["message"]) for answer in broken if answer.error]
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
        errors=tuple(sorted(set(errors))[:3]),
    )
