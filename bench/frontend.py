"""`python -m bench.frontend` measures what one streamed token costs the frontend, in CPU time.

Streaming chat, 64 tokens a reply, sim engines, metrics on, one stop string that never comes. CPU time is read from the
kernel for the frontend's process alone; the load generator is another process. The frontend's share of the time to
first token is the client's time minus the engine's own (the sim's time to first token is set to 0 for that run).
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from dataclasses import dataclass
from typing import Annotated, Any

import uvloop

from bench.command import main, show
from holdfast.cli.arguments import CommandOptions, Json
from holdfast.settings import Environment
from holdfast.spec.settings import about
from holdfast.testing.clients import StreamClient, chat_body, open_client
from holdfast.testing.deployment import Deployment
from holdfast.testing.processes import cpu_ns

REPLY_TOKENS = 64
STOP = "\u0001never\u0001"


@dataclass(frozen=True, slots=True)
class FrontendBench:
    streams: int = 32
    pace_ms: float = 0.0
    requests: int = 0  # 0: about five seconds' worth
    workers: int = 2

    @property
    def rounds(self) -> int:
        """Requests per stream."""
        if self.requests:
            return max(1, self.requests // self.streams)
        return 40 if self.pace_ms == 0 else max(2, round(8000 / (self.pace_ms * REPLY_TOKENS)))


async def _one_stream(client: StreamClient, body: bytes, rounds: int) -> list[tuple[float, int, int]]:
    """(time to first byte, events with content, reads) of each reply."""
    results = []
    for _ in range(rounds):
        received = await client.request("/v1/chat/completions", body)
        if received.status != 200 or received.error:
            raise RuntimeError(f"request failed: {received.status} {received.error} {received.body()[:200]!r}")
        raw = b"".join(data for _, data in received.pieces)
        results.append((received.first_s, raw.count(b'"delta":{"content":"'), len(received.pieces)))
        if not raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            raise RuntimeError("a reply did not end with [DONE]")
    return results


async def _load(port: int, streams: int, rounds: int) -> list[tuple[float, int, int]]:
    bodies = [json.dumps(chat_body(f"bench stream {n}", REPLY_TOKENS, stop=STOP)).encode() for n in range(streams)]
    clients = [await open_client(port) for _ in range(streams)]
    try:
        gathered = await asyncio.gather(
            *(_one_stream(client, body, rounds) for client, body in zip(clients, bodies, strict=True))
        )
    finally:
        for client in clients:
            client.close()
    return [result for stream in gathered for result in stream]


def run(bench: FrontendBench) -> dict[str, Any]:
    """Start a deployment, load it, and tell what it cost."""
    sim = {"ttft_ms": 0.0 if bench.streams == 1 else bench.pace_ms, "tpot_ms": bench.pace_ms, "jitter": 0.0}
    with Deployment(workers=bench.workers, sim=sim) as deployment:
        frontend = deployment.pid("frontend")
        uvloop.run(_load(deployment.port, bench.streams, 2))  # warm: tables learned, templates compiled
        before_ns, began = cpu_ns(frontend), os.times().elapsed
        results = uvloop.run(_load(deployment.port, bench.streams, bench.rounds))
        took_s = os.times().elapsed - began
        used_ms = (cpu_ns(frontend) - before_ns) / 1e6
    tokens = len(results) * REPLY_TOKENS
    reads = sum(pieces for _, _, pieces in results)
    return {
        "streams": bench.streams,
        "pace_ms": bench.pace_ms,
        "requests": len(results),
        "tokens": tokens,
        "cpu_ms_per_1k_tokens": round(used_ms / tokens * 1000, 2),
        "ttft_ms_p50": round(statistics.median(first for first, _, _ in results) * 1000, 3),
        "tokens_per_s": round(tokens / took_s),
        "tokens_per_write": round(tokens / reads, 2),
        "frontend_cpu_share": round(used_ms / 1000 / took_s, 3),
    }


class FrontendOptions(CommandOptions, frozen=True):
    """Measure the frontend's CPU time per streamed token."""

    streams: Annotated[int, about("Number of concurrent streams.", min=1)] = 32
    pace_ms: Annotated[float, about("Time per token; 0: as fast as possible.", "ms", min=0)] = 0.0
    requests: Annotated[int, about("Total number of requests; 0: enough for a few seconds.", min=0)] = 0
    workers: Annotated[int, about("Number of workers.", min=1)] = 2
    json: Json = False

    def run(self, env: Environment) -> int:
        return show(run(FrontendBench(self.streams, self.pace_ms, self.requests, self.workers)), self.json)


if __name__ == "__main__":
    main(FrontendOptions, "frontend")
