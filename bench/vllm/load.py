"""What is asked of a vLLM deployment, always the same by number, and clients that leave in the middle."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench.vllm.models import BLOCK_TOKENS
from holdfast.testing.answers import Answer, difference
from holdfast.testing.clients import Received, StreamClient, chat_body, read_answer

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 0.9, "logprobs": 2},
)
CHATS = 4  # every so many; the others are asked by token ids
LONG_TOKENS, SHORT_TOKENS = 700, 30  # of prompts
SHARED_TOKENS = 100  # that every third prompt begins with
FIRST_ID, IDS = 1000, 4000  # plain words


@dataclass(frozen=True, slots=True)
class VllmLoad:
    """One request per client: `Requests` of `holdfast.testing.workload`."""

    model: str
    streams: int = 12
    tokens: int = 150
    seed: int = 1

    def body(self, number: int) -> tuple[str, dict[str, Any]]:
        asked = {"model": self.model, "seed": self.seed * 1000 + number, "return_token_ids": True}
        body = chat_body(f"Tell me story number {number}.", self.tokens, **asked, **KINDS[number % len(KINDS)])
        if number % CHATS == CHATS - 1:
            if (count := body.pop("logprobs", None)) is not None:
                body |= {"logprobs": True, "top_logprobs": count}
            return "/v1/chat/completions", body
        del body["messages"]
        return "/v1/completions", body | {"prompt": self.ids(number)}

    def ids(self, number: int) -> list[int]:
        rng = random.Random(self.seed * 7919 + number)
        shared = random.Random(self.seed)
        start = [FIRST_ID + shared.randrange(IDS) for _ in range(SHARED_TOKENS if number % 3 == 0 else 0)]
        length = LONG_TOKENS if number % 5 == 2 else SHORT_TOKENS + 7 * number
        return start + [FIRST_ID + rng.randrange(IDS) for _ in range(length)]

    def comparable(self) -> dict[int, dict[str, Any]]:
        """What stock vLLM is asked, in its words: those whose tokens depend on nothing that is drawn, by number. It
        draws the others from a generator's hidden state, as it comes."""
        asked = {number: self.body(number)[1] for number in range(self.streams)}
        return {
            number: {name: body.get(name, 0) for name in ("prompt", "frequency_penalty", "presence_penalty")}
            | {"max_tokens": self.tokens}
            for number, body in asked.items()
            if body["temperature"] == 0 and "prompt" in body
        }

    def blocks(self) -> int:
        """Return room for twice what all of them and the quitters can hold at once."""
        return 2 * (self.streams + Quitters.COUNT) * -(-(LONG_TOKENS + SHARED_TOKENS + self.tokens) // BLOCK_TOKENS)


class Leaver(StreamClient):
    """One that hangs up once so much has come."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self._pieces = pieces

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self.received.pieces) >= self._pieces:
            self.close()


class Quitters:
    """Clients that ask what others ask and leave before its end; what they got must be its beginning."""

    COUNT = 2

    def __init__(self, port: int, load: VllmLoad) -> None:
        self._port, self._load = port, load
        self.left: list[tuple[int, Received]] = []

    @asynccontextmanager
    async def all_the_time(self) -> AsyncIterator[None]:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.COUNT):
                tasks.create_task(self._leave_again(random.Random(self._load.seed * 100 + number), over))
            yield
            over.set()

    async def _leave_again(self, rng: random.Random, over: asyncio.Event) -> None:
        while not over.is_set():
            number = rng.randrange(self._load.streams)
            self.left.append((number, await self._leave(number, rng.randrange(1, 60))))

    async def _leave(self, number: int, pieces: int) -> Received:
        path, body = self._load.body(number)
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: Leaver(pieces), "127.0.0.1", self._port)
        received = await client.request(path, json.dumps(body).encode())
        client.close()
        return received

    def wrong(self, right: list[Answer]) -> list[str]:
        """Return what quitters read that was not the beginning of the right answer."""
        found = (difference(right[number], read_answer(one), part=True) for number, one in self.left)
        return [why for why in found if why]
