"""How fast our engine decodes, in process: `python -m bench.engine_gpu.speed --out DIR`.

A real vault, a real engine that was woken as a worker wakes it, its steps in a thread of their own and its outputs
taken by the event loop. Always true: every run has prompts of its own, so none is found in the pool; what is compared
with vLLM is `decode_tps`, measured by the rule that vLLM's half uses too: two runs with the same prompts' length and
different answers' length, the difference of their times for the difference of their tokens (`decode_rate`).
`steady_tps` is from time stamps, between the last stream's first token and the first stream's end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench.engine_gpu.words import CASES, LONG, SHORT, Case, Row, decode_rate, prompt_ids, steady_rate
from bench.gpu.smi import gpu_uuid
from holdfast.core.errors import UserError
from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.engines.contract import Engine, EngineEvents
from holdfast.engines.shadow.engine import VaultEngine
from holdfast.engines.torch.engine import TorchTenant, torch_engine
from holdfast.engines.torch.files.resolve import resolve
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.spec.engines import Place, TorchSettings

WARM_TOKENS = 16  # kernels are compiled and graphs captured by the first steps of their size
CASE_S = 120.0  # for one run; 128,000 prompt tokens and 288 steps of 64 streams take seconds on a GPU


@dataclass(frozen=True, slots=True)
class SpeedBench:
    """Which model, where, and how much of the device it may use."""

    model: str = "random:8b"
    device: str = "cuda-0"
    kv_gib: float = 30.0  # 64 streams of 2,300 tokens are 19 GB (facts 8), and nothing is evicted in a run
    step_tokens: int = 2048  # positions of one step, as an engine on a GPU has it
    repeats: int = 2  # of the two runs of a case; the quicker of each counts
    tokens: tuple[int, int] = (SHORT, LONG)
    cases: tuple[Case, ...] = CASES

    def settings(self) -> TorchSettings:
        streams = max(case.batch for case in self.cases)
        steps = max(self.step_tokens, 2 * streams)
        return TorchSettings(kv_gib=self.kv_gib, concurrency=streams, step_tokens_max=steps)


@dataclass(slots=True)
class _Said(EngineEvents):
    """Outputs as they came."""

    steps: list[tuple[float, list[Output]]] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    failed: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def outputs(self, outputs: list[Output]) -> bool:
        self.steps.append((time.perf_counter(), outputs))
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
async def _engine(bench: SpeedBench, said: _Said, head: Row) -> AsyncIterator[VaultEngine[TorchTenant]]:
    """An engine that is awake, and its vault; both gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hf-speed-", dir="/tmp"))
    device = gpu_uuid(bench.device)
    socket = str(folder / "gms.sock")
    vault = VaultProcesses(VaultSettings(device, socket), folder / "vault.log")
    vault.start()
    try:
        began_s = time.monotonic()
        checkpoint = resolve(bench.model, folder, lambda *_: None)
        engine = torch_engine(checkpoint, bench.settings(), Place(socket, device, who="speed"), lambda *_: None)
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
    said.steps.clear()
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
    return said.steps[-1][0] - began_s


async def _case(engine: Engine, said: _Said, case: Case, bench: SpeedBench, runs: Callable[[], int]) -> Row:
    await _batch(engine, said, case, WARM_TOKENS, runs())
    took_s: dict[int, list[float]] = {tokens: [] for tokens in bench.tokens}
    steady: Row = {}
    for _ in range(bench.repeats):
        for tokens in bench.tokens:
            took_s[tokens].append(await _batch(engine, said, case, tokens, runs()))
        stamped = [(at_s, {output.stream: len(output.tokens) for output in made}) for at_s, made in said.steps]
        found = steady_rate(stamped, case.batch)
        steady = max((steady, found), key=lambda row: row.get("steady_tps") or 0.0)
    short, long = bench.tokens
    quickest = (min(took_s[short]), min(took_s[long]))
    row = decode_rate(case.batch, bench.tokens, quickest) | steady
    return row | {"took_s": {str(tokens): [round(one, 3) for one in took_s[tokens]] for tokens in bench.tokens}}


async def _run(bench: SpeedBench, keep: Callable[[Row], None]) -> Row:
    head: Row = {"model": bench.model, "tokens": list(bench.tokens), "cases": {}}
    said, last = _Said(), 0

    def runs() -> int:
        nonlocal last
        last += 1
        return last

    async with _engine(bench, said, head) as engine:
        head |= {"dtype": engine.tenant.dtype_name, "kv_blocks": engine.tenant.geometry.block_count}
        for case in bench.cases:
            head["cases"][case.name] = row = await _case(engine, said, case, bench, runs)
            print(f"{case.name}: {json.dumps(row)}", file=sys.stderr, flush=True)
            keep(head)
    return head


def run(bench: SpeedBench, keep: Callable[[Row], None]) -> Row:
    """All cases; `keep` hears the row as it grows."""
    return uvloop.run(_run(bench, keep))


def cases_of(words: str) -> tuple[Case, ...]:
    """`1x128,64x2000`: streams and prompt tokens."""
    try:
        return tuple(Case(*map(int, word.split("x"))) for word in words.split(","))
    except (TypeError, ValueError) as error:
        raise UserError(f"--cases {words!r} must be like 1x128,64x2000: streams x prompt tokens") from error


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engine_gpu_speed", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder: speed.json goes there")
    plain = SpeedBench()
    for name in ("model", "device", "kv_gib", "step_tokens", "repeats"):
        value = getattr(plain, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--cases", default="", help="1x128,64x2000: streams x prompt tokens")
    asked = vars(parser.parse_args(argv))
    out, words = asked.pop("out"), asked.pop("cases")
    out.mkdir(parents=True, exist_ok=True)

    def keep(row: Row) -> None:
        (out / "speed.json").write_text(json.dumps({"speed": row}, indent=1) + "\n")

    try:
        cases = cases_of(words) if words else CASES
        row = run(SpeedBench(**asked, cases=cases), keep)
    except (UserError, OSError) as error:
        print(f"speed failed: {error}", file=sys.stderr, flush=True)
        return 1
    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
