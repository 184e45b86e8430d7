"""What one stream's wishes cost a batch, and what `exact` costs, on a GPU: `python measure_steps.py`. Prints JSON.

Lines of the first kind are of the same engine and the same 64 streams, one of them with a wish or none; then of two
exact engines, from the first one's load to what the second does after a handover; then of a whole exact deployment
whose active engine is killed as soon as its standby stands by, twice. DEVICE is another one than cuda-0.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from holdfast.core.requests import GenerateRequest, Output
from tests.rigs.engines.gpu_engine import SETTINGS, Vault
from tests.rigs.engines.torch_engine import Rig, request

STREAMS = 64
FIRST, LAST = 40, 340  # tokens of every stream between which steps are timed
BOUND_S = 120.0
WISHES: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "logprobs": {"top_logprobs": 5},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "all": {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "top_logprobs": 5},
    "none again": {},
}


class Counted(Rig):
    """An engine, and how far every stream is."""

    def __init__(self, vault: Vault, number: int = 0, **given: Any) -> None:
        sizes = {"kv_gib": 2, "concurrency": STREAMS, "step_tokens_max": 1024}
        super().__init__(vault, number, **(SETTINGS | sizes | given))
        self.counts: dict[int, int] = {}

    def closed(self, streams: list[int]) -> None:
        raise AssertionError(f"streams {streams} were lost")

    def fatal(self, why: str) -> None:
        sys.exit(why)

    def outputs(self, outputs: list[Output]) -> bool:
        for output in outputs:
            self.counts[output.stream] = self.counts.get(output.stream, 0) + len(output.tokens)
        self._changed.set()
        return True

    async def reached(self, count: int, streams: range) -> float:
        """When every stream has so many tokens."""
        async with asyncio.timeout(BOUND_S):
            while any(self.counts.get(stream, 0) < count for stream in streams):
                self._changed.clear()
                await self._changed.wait()
        return time.perf_counter()


def asked(number: int, tokens: int, **wishes: Any) -> GenerateRequest:
    return request([(number * 31 + place * 7) % 5000 for place in range(64)], tokens, seed=number, **wishes)


async def wishes() -> None:
    with Vault() as vault:
        r = Counted(vault)
        await r.load()
        await r.engine.wake(1000)
        for turn, (name, wish) in enumerate(WISHES.items(), 1):
            streams = range(1000 * turn, 1000 * turn + STREAMS)
            wanted = {number: wish if number == streams[0] else {} for number in streams}
            r.submit({number: asked(number, LAST + 20, **each) for number, each in wanted.items()})
            began_s = await r.reached(FIRST, streams)
            steps = r.engine.progress().steps
            ended_s = await r.reached(LAST, streams)
            ms = (ended_s - began_s) * 1000 / (r.engine.progress().steps - steps)
            told = {"streams": STREAMS, "one asks for": name, "ms per step": round(ms, 3)}
            print(json.dumps(told), flush=True)
            await r.reached(LAST + 20, streams)
        await r.engine.stop()


async def exact() -> None:
    marks: dict[str, Any] = {"exact": True}
    at_s = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal at_s
        now_s = time.perf_counter()
        marks[name], at_s = round(now_s - at_s, 2), now_s

    with Vault() as vault:
        first, second = Counted(vault, exact=True), Counted(vault, 1, exact=True)
        await first.load()
        mark("load_s")
        await first.engine.check()
        mark("canary_s")
        await first.engine.wake(1000)
        mark("first_wake_s")  # the pool is made, and everything for its addresses
        await second.load()
        mark("standby_load_s")
        first.submit({number: asked(number, 100) for number in range(32)})
        await first.reached(50, range(32))
        mark("32x50_tokens_s")
        await first.reached(100, range(32))
        mark("32x50_more_s")
        await first.engine.become_standby()
        await second.engine.wake(1001)
        mark("handover_s")
        second.submit({number: asked(number, 20) for number in range(32, 64)})
        await second.reached(20, range(32, 64))
        mark("32x20_tokens_s")
        await second.engine.stop()
        await first.engine.stop()
    print(json.dumps(marks), flush=True)


def holdfast(state: str, *words: str) -> str:
    command = [sys.executable, "-m", "holdfast", *words]
    ran = subprocess.run(command, env=os.environ | {"HOLDFAST_STATE_DIR": state}, capture_output=True, timeout=BOUND_S)
    return ran.stdout.decode() + (ran.stderr.decode() if ran.returncode else "")


def workers(state: str) -> dict[str, int]:
    """Pids by what they are."""
    rows = json.loads(holdfast(state, "ps", "--json"))
    return {row["state"]: row["pid"] for row in rows if row["role"] == "worker"}


def deployment() -> None:
    """How long until it is up, and until a killed engine's place is taken and stood by for; who was killed for what."""
    state, began_s = tempfile.mkdtemp(dir="/tmp"), time.perf_counter()
    options = ("--exact", "--model", "tiny", "--kv-gib", "1", "--device", os.environ.get("DEVICE", "cuda-0"))
    print(holdfast(state, "up", *options, "--detach", "--port", "8977")[:600], flush=True)
    marks: dict[str, Any] = {"deployment": "exact", "up_s": round(time.perf_counter() - began_s, 1)}
    try:
        for kill in ("first", "second"):
            before = workers(state)
            os.kill(before["active"], signal.SIGKILL)
            began_s = time.perf_counter()
            while time.perf_counter() - began_s < BOUND_S / 3:
                now = workers(state)
                if now.get("active") == before["standby"] and f"{kill}_active_s" not in marks:
                    marks[f"{kill}_active_s"] = round(time.perf_counter() - began_s, 2)
                if {"active", "standby"} <= now.keys() and before["active"] not in now.values():
                    marks[f"{kill}_redundant_s"] = round(time.perf_counter() - began_s, 2)
                    break
        marks["failover"] = [row["failover"] for row in json.loads(holdfast(state, "ps", "--json")) if row["failover"]]
    finally:
        holdfast(state, "down")
    logs = [line for path in Path(state, "logs").glob("*") for line in path.read_text(errors="replace").splitlines()]
    words = ("cannot live", "is wedged", "is stopped", "exact on a GPU", "waking takes longer", "-> active")
    marks["logged"] = [line for line in logs if any(word in line for word in words)]
    print(json.dumps(marks, indent=1), flush=True)


async def main() -> None:
    await wishes()
    await exact()


if __name__ == "__main__":
    asyncio.run(main())
    deployment()
