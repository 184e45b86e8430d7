"""How fast an engine of ours decodes, in process.

A real vault, a real engine that was woken as a worker wakes it, its steps in a thread of their own and its outputs
taken by the event loop. Always true: every run has prompts of its own, so none is found in the pool; what is compared
with vLLM is `decode_tps`, measured by the rule that vLLM's half uses too: two runs with the same prompts' length and
different answers' length, the difference of their times for the difference of their tokens (`decode_rate`).
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.engine_gpu.words import (
    CASES,
    CONTEXT,
    LONG,
    SHORT,
    WARM_TOKENS,
    Case,
    Keep,
    Row,
    keep_case,
    prompt_ids,
)
from holdfast.core.errors import UserError
from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.engines.contract import Engine, EngineEvents
from holdfast.engines.host.engine import VaultEngine
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.spec.engines import FailoverSettings, TorchSettings, VllmSettings
from tests.rigs.gpu.smi import gpu_uuid

CASE_S = 120.0  # for one run; 128,000 prompt tokens and 288 steps of 64 streams take seconds on a GPU


@dataclass(frozen=True, slots=True)
class SpeedBench:
    """Which model, where, and how much of the device it may use."""

    model: str = "random:8b"
    engine: str = "torch"
    device: str = "cuda-0"
    kv_gib: float = 30.0  # 64 streams of 2,300 tokens are 19 GB (facts 8), and nothing is evicted in a run
    step_tokens: int = 2048  # positions of one step, as an engine on a GPU has it
    repeats: int = 2  # of the two runs of a case; the quicker of each counts
    cases: tuple[Case, ...] = CASES

    @property
    def streams(self) -> int:
        return max(case.batch for case in self.cases)

    def make(self, failover: FailoverSettings, folder: Path) -> VaultEngine[Any]:
        """Each loads what it needs alone."""
        if self.engine == "vllm":
            return self._vllm(failover, folder)
        from holdfast.engines.torch.engine import torch_engine
        from holdfast.engines.torch.files.resolve import resolve

        steps = max(self.step_tokens, 2 * self.streams)
        settings = TorchSettings(kv_gib=self.kv_gib, concurrency=self.streams, step_tokens_max=steps)
        return torch_engine(resolve(self.model, folder, lambda *_: None), settings, failover, lambda *_: None)

    def _vllm(self, failover: FailoverSettings, folder: Path) -> VaultEngine[Any]:
        from holdfast.engines.vllm.files import look_at_files
        from holdfast.roles.engine_vllm import set_environment

        set_environment([failover.device], "info")
        from holdfast.engines.vllm.engine import vllm_engine

        files = look_at_files(self.model, lambda *_: None).identified(folder, lambda *_: None)
        settings = VllmSettings(kv_gib=self.kv_gib, concurrency=self.streams, context_tokens_max=CONTEXT)
        return vllm_engine(str(files.path), files.identity, files.eos_token_ids, settings, failover)


@dataclass(slots=True)
class _Said(EngineEvents):
    """Which streams run, and why not all came to their ends."""

    running: set[int] = field(default_factory=set)
    failed: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def outputs(self, outputs: list[Output]) -> bool:
        for output in outputs:
            if output.finish or output.failure:
                self.running.discard(output.stream)
                self.failed = self.failed or (output.failure.message if output.failure else "")
        if not self.running:
            self.over.set()
        return True

    def closed(self, streams: list[int]) -> None:
        self._fail(f"streams {streams} were lost")

    def fatal(self, why: str) -> None:
        """It is said in the step thread."""
        self.loop.call_soon_threadsafe(self._fail, why)

    def _fail(self, why: str) -> None:
        self.failed = why
        self.over.set()


@asynccontextmanager
async def _engine(bench: SpeedBench, said: _Said, head: Row) -> AsyncIterator[VaultEngine[Any]]:
    """An engine that is awake, and its vault; both gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hf-speed-", dir="/tmp"))
    device = gpu_uuid(bench.device)
    socket = str(folder / "gms.sock")
    vault = VaultProcesses(VaultSettings(device, socket), folder / "vault.log")
    vault.start()
    try:
        began_s = time.monotonic()
        engine = bench.make(FailoverSettings(socket, device, engine_name="speed"), folder)
        await engine.load(said)
        if wrong := await engine.check():
            raise UserError(f"the canary's answer was wrong: {wrong}")
        head["load_s"] = round(time.monotonic() - began_s, 1)
        await engine.wake(time.time_ns() // 1_000_000)
        try:
            yield engine
        finally:
            await engine.stop()
    finally:
        vault.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _batch(engine: Engine, said: _Said, case: Case, tokens: int, run: int) -> float:
    """So many streams at once, from the first submitted to the last one's end, seconds."""
    numbers = range(run * 1000 + 1, run * 1000 + 1 + case.batch)
    said.over.clear()
    said.running = set(numbers)
    began_s = time.perf_counter()
    for place, number in enumerate(numbers):
        prompt = prompt_ids(place, case.prompt, run)
        sampling = Sampling(tokens, number, temperature=0.0, ignore_eos=True)
        engine.submit(number, GenerateRequest(str(number), prompt, len(prompt), sampling))
    try:
        await asyncio.wait_for(said.over.wait(), CASE_S)
    except TimeoutError as error:
        raise UserError(f"{case.name}: {len(said.running)} of {case.batch} did not end in {CASE_S:g} s") from error
    if said.failed:
        raise UserError(f"{case.name}: {said.failed}")
    return time.perf_counter() - began_s


async def _run(bench: SpeedBench, keep: Keep) -> Row:
    head: Row = {"engine": bench.engine, "model": bench.model, "tokens": [SHORT, LONG], "cases": {}}
    said, runs = _Said(), itertools.count(1)
    async with _engine(bench, said, head) as engine:
        head |= {"dtype": engine.hosted.geometry.dtype, "kv_blocks": engine.hosted.geometry.block_count}
        for case in bench.cases:
            took_s: dict[int, list[float]] = {}
            for tokens in (WARM_TOKENS, *(SHORT, LONG) * bench.repeats):
                took_s.setdefault(tokens, []).append(await _batch(engine, said, case, tokens, next(runs)))
            keep_case(head, case, took_s, keep)
    return head


def run(bench: SpeedBench, keep: Keep) -> Row:
    """All cases; `keep` hears the row as it grows."""
    return uvloop.run(_run(bench, keep))
