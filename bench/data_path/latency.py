"""What the frontend adds to the first token, and what a very long prompt does to everyone else's streams."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any, cast

import uvloop

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.core.tasks import beside
from holdfast.testing.answers import DATA, Answer
from holdfast.testing.clients import StreamClient, ask, chat_body, open_client, read_answer
from holdfast.testing.deployment import Deployment
from holdfast.wire.frames import FrameSplitter, encode
from holdfast.wire.messages import VERSION, Generate, Hello, Step, decode_to_frontend

REPLY_TOKENS = 4
LONG_PROMPT_TOKENS = 30_000


class _Direct(asyncio.Protocol):
    """A client of the worker's own socket: the same request without a frontend."""

    def __init__(self) -> None:
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._first: asyncio.Future[float] | None = None
        self._stream = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(encode(Hello(VERSION, "data", "bench")))

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        for payload in self._splitter.feed(data):
            message = decode_to_frontend(payload)
            if isinstance(message, Step) and self._first is not None and not self._first.done():
                self._first.set_result(now_s)

    async def first_token_s(self, prompt: list[int]) -> float:
        assert self._transport is not None
        self._first = asyncio.get_running_loop().create_future()
        self._stream += 1
        sampling = Sampling(max_tokens=REPLY_TOKENS, seed=1, ignore_eos=True)
        began_s = time.perf_counter()
        request = GenerateRequest(f"direct-{self._stream}", prompt, len(prompt), sampling)
        self._transport.write(encode(Generate(self._stream, request)))
        return await self._first - began_s


async def _first_tokens(deployment: Deployment, rounds: int) -> tuple[list[float], list[float]]:
    loop = asyncio.get_running_loop()
    client: StreamClient = await open_client(deployment.port)
    path = f"{deployment.folder}/run/worker-0.sock"
    _, direct = await loop.create_unix_connection(_Direct, path)
    body = chat_body("How long until the first word?", REPLY_TOKENS)
    asked = await client.request("/v1/chat/completions", json.dumps(body | {"return_token_ids": True}).encode())
    prompt = json.loads(asked.events()[0][1].removeprefix(DATA))["prompt_token_ids"]
    raw = json.dumps(body).encode()
    through, straight = [], []
    for _ in range(rounds):
        through.append((await client.request("/v1/chat/completions", raw)).first_s)
        straight.append(await direct.first_token_s(prompt))
        await asyncio.sleep(0.005)  # both engines idle again
    client.close()
    return through, straight


def first_token(rounds: int = 300) -> dict[str, Any]:
    """Ask alternately through the frontend and straight at the worker, one at a time."""
    with Deployment(workers=1, sim={"ttft_ms": 0.0, "tpot_ms": 1.0, "jitter": 0.0}) as deployment:
        uvloop.run(_first_tokens(deployment, 20))
        through, straight = uvloop.run(_first_tokens(deployment, rounds))
    through_ms, straight_ms = statistics.median(through) * 1000, statistics.median(straight) * 1000
    return {
        "rounds": rounds,
        "ttft_ms_p50": round(through_ms, 3),
        "worker_ttft_ms_p50": round(straight_ms, 3),
        "ttft_added_ms_p50": round(through_ms - straight_ms, 3),
        # What else runs on the machine only ever adds to it.
        "ttft_added_ms_min": round((min(through) - min(straight)) * 1000, 3),
    }


async def _worst_gap_s(port: int, streams: int, tokens: int, disturb: bool) -> float:
    """Return the worst gap of any stream, with or without long prompts arriving meanwhile."""
    # Token ids too: text alone pauses inside a character of several tokens.
    bodies = [chat_body(f"steady {number}", tokens, return_token_ids=True) for number in range(streams)]

    async def steady() -> list[Answer]:
        received = await asyncio.gather(*(ask(port, "/v1/chat/completions", body) for body in bodies))
        return [read_answer(one) for one in received]

    async with beside(steady(), "steady streams") as running:
        if disturb:
            await asyncio.sleep(0.3)
            long_body = chat_body(" word" * LONG_PROMPT_TOKENS, 2)
            for _ in range(3):
                received = await ask(port, "/v1/chat/completions", long_body)
                assert received.status == 200, received.body()
        answers = await running
    assert all(answer.done for answer in answers)
    return max(max(answer.gaps_s) for answer in answers)


def long_prompt(streams: int = 32, tokens: int = 200, rounds: int = 3) -> dict[str, Any]:
    """How much later than usual other streams' tokens come while 30,000-token prompts arrive."""
    sim = {"ttft_ms": 10.0, "tpot_ms": 10.0, "jitter": 0.0}
    calm, disturbed = [], []
    with Deployment(workers=2, sim=sim) as deployment:
        for _ in range(rounds):
            calm.append(uvloop.run(_worst_gap_s(deployment.port, streams, tokens, disturb=False)))
            disturbed.append(uvloop.run(_worst_gap_s(deployment.port, streams, tokens, disturb=True)))
    calm_ms, disturbed_ms = statistics.median(calm) * 1000, statistics.median(disturbed) * 1000
    return {
        "streams": streams,
        "prompt_tokens": LONG_PROMPT_TOKENS,
        "worst_gap_ms_calm": round(calm_ms, 1),
        "worst_gap_ms_disturbed": round(disturbed_ms, 1),
        "delay_ms": round(disturbed_ms - calm_ms, 1),
    }
