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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.engines.contract import EngineEvents
from holdfast.engines.shadow.engine import VaultEngine
from holdfast.engines.torch.engine import TorchTenant, torch_engine
from holdfast.engines.torch.files.tiny import tiny
from holdfast.memory.finding import gpu_uuids
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.spec.engines import Place, TorchSettings

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


class Counted(EngineEvents):
    """How far every stream is."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.changed = asyncio.Event()

    def closed(self, streams: list[int]) -> None:
        raise AssertionError(f"streams {streams} were lost")

    def fatal(self, why: str) -> None:
        sys.exit(why)

    def outputs(self, outputs: list[Output]) -> bool:
        for output in outputs:
            self.tokens[output.stream] = self.tokens.get(output.stream, 0) + len(output.tokens)
        self.changed.set()
        return True

    async def until(self, count: int, streams: range) -> float:
        async with asyncio.timeout(BOUND_S):
            while any(self.tokens.get(stream, 0) < count for stream in streams):
                self.changed.clear()
                await self.changed.wait()
        return time.perf_counter()


@asynccontextmanager
async def vault() -> AsyncIterator[tuple[str, str]]:
    folder, gpu = Path(tempfile.mkdtemp(dir="/tmp")), gpu_uuids()[0]
    processes = VaultProcesses(VaultSettings(gpu, str(folder / "v.sock"), 0))
    processes.start()
    try:
        yield str(folder / "v.sock"), gpu
    finally:
        processes.stop()


async def loaded(at: tuple[str, str], number: int, said: Counted, **given: Any) -> VaultEngine[TorchTenant]:
    settings = TorchSettings(**({"kv_gib": 2, "concurrency": STREAMS, "step_tokens_max": 1024} | given))
    engine = torch_engine(tiny(), settings, Place(at[0], at[1], number), lambda *_: None)
    await engine.load(said)
    return engine


def asked(number: int, tokens: int, **wishes: Any) -> GenerateRequest:
    prompt = [(number * 31 + place * 7) % 5000 for place in range(64)]
    given = {"temperature": 0.0, "ignore_eos": True} | wishes
    return GenerateRequest("x", prompt, len(prompt), Sampling(tokens, number, **given))


async def wishes() -> None:
    async with vault() as at:
        said = Counted()
        engine = await loaded(at, 0, said)
        await engine.wake(time.time_ns() // 1_000_000)
        for turn, (name, wish) in enumerate(WISHES.items(), 1):
            streams = range(1000 * turn, 1000 * turn + STREAMS)
            for number in streams:
                engine.submit(number, asked(number, LAST + 20, **(wish if number == streams[0] else {})))
            began_s = await said.until(FIRST, streams)
            steps = engine.progress().steps
            ended_s = await said.until(LAST, streams)
            ms = (ended_s - began_s) * 1000 / (engine.progress().steps - steps)
            told = {"streams": STREAMS, "one asks for": name, "ms per step": round(ms, 3)}
            print(json.dumps(told), flush=True)
            await said.until(LAST + 20, streams)
        await engine.stop()


async def exact() -> None:
    marks: dict[str, Any] = {"exact": True}
    at_s = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal at_s
        now_s = time.perf_counter()
        marks[name], at_s = round(now_s - at_s, 2), now_s

    async with vault() as at:
        first_said, second_said = Counted(), Counted()
        first = await loaded(at, 0, first_said, exact=True)
        mark("load_s")
        await first.check()
        mark("canary_s")
        await first.wake(time.time_ns() // 1_000_000)
        mark("first_wake_s")  # the pool is made, and everything for its addresses
        second = await loaded(at, 1, second_said, exact=True)
        mark("standby_load_s")
        for number in range(32):
            first.submit(number, asked(number, 100))
        await first_said.until(50, range(32))
        mark("32x50_tokens_s")
        await first_said.until(100, range(32))
        mark("32x50_more_s")
        await first.rest()
        await second.wake(time.time_ns() // 1_000_000)
        mark("handover_s")
        for number in range(32, 64):
            second.submit(number, asked(number, 20))
        await second_said.until(20, range(32, 64))
        mark("32x20_tokens_s")
        await second.stop()
        await first.stop()
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
