"""A GPU's steps under pressure: preempted for real, broken on purpose, and with streams that want more than a token."""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not Path("/dev/nvidiactl").exists():
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

from holdfast.core.requests import GenerateRequest, Output, Sampling  # noqa: E402
from holdfast.engines.contract import EngineEvents  # noqa: E402
from holdfast.engines.paged.canary import canary_scheduler  # noqa: E402
from holdfast.engines.paged.sequences import Segment  # noqa: E402
from holdfast.engines.torch import computer as computers  # noqa: E402
from holdfast.engines.torch.engine import torch_engine  # noqa: E402
from holdfast.engines.torch.files.tiny import TINY, tiny  # noqa: E402
from holdfast.engines.torch.gpu.graph_inputs import GraphInputs  # noqa: E402
from holdfast.engines.torch.launched import NotFiniteError  # noqa: E402
from holdfast.memory.finding import gpu_uuids  # noqa: E402
from holdfast.memory.vault.launch import VaultProcesses  # noqa: E402
from holdfast.memory.vault.settings import VaultSettings  # noqa: E402
from holdfast.spec.engines import Place, TorchSettings  # noqa: E402

pytestmark = pytest.mark.gpu

BLOCK = 16
BLOCK_GIB = 2 * TINY.layers * TINY.kv_heads * TINY.head_size * BLOCK * 2 / 2**30  # in bf16
BOUND_S = 30.0
WANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalised": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.0, "top_logprobs": 3},
    "nudged": {"temperature": 0.7, "min_tokens": 5, "logit_bias": {3: 2.0}},
}


@pytest.fixture
def vault() -> Iterator[tuple[str, str]]:
    folder, gpu = Path(tempfile.mkdtemp(dir="/tmp")), gpu_uuids()[0]
    processes = VaultProcesses(VaultSettings(gpu, str(folder / "v.sock"), 0))
    processes.start()
    yield str(folder / "v.sock"), gpu
    processes.stop()


class Said(EngineEvents):
    """An engine and what it said; `fatal` is why it ended."""

    def __init__(self, vault: tuple[str, str], **given: Any) -> None:
        settings = TorchSettings(**({"kv_gib": 1, "concurrency": 16, "step_tokens_max": 512} | given))
        self.engine = torch_engine(tiny(), settings, Place(vault[0], vault[1], 0), lambda *_: None)
        self.loop = asyncio.get_running_loop()
        self.made: dict[int, list[Output]] = {}
        self.why = ""
        self.changed = asyncio.Event()

    def closed(self, streams: list[int]) -> None:
        raise AssertionError(f"streams {streams} were lost")

    def fatal(self, why: str) -> None:
        self.why = self.why or why
        self.loop.call_soon_threadsafe(self.changed.set)

    def outputs(self, outputs: list[Output]) -> bool:
        for output in outputs:
            self.made.setdefault(output.stream, []).append(output)
        self.changed.set()
        return True

    def tokens(self, stream: int) -> list[int]:
        return [token for output in self.made.get(stream, []) for token in output.tokens]

    async def until(self, count: int, streams: Sequence[int]) -> None:
        async with asyncio.timeout(BOUND_S):
            while any(len(self.tokens(stream)) < count for stream in streams):
                assert not self.why, self.why
                self.changed.clear()
                await self.changed.wait()

    async def until_fatal(self) -> None:
        async with asyncio.timeout(BOUND_S):
            while not self.why:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def awake(vault: tuple[str, str], **given: Any) -> AsyncIterator[Said]:
    said = Said(vault, **given)
    await said.engine.load(said)
    await said.engine.wake(time.time_ns() // 1_000_000)
    try:
        yield said
    finally:
        await said.engine.stop()


def asked(tokens: int, max_tokens: int, seed: int, made: Sequence[int] = (), **wants: Any) -> GenerateRequest:
    prompt = [(seed // 100 * 977 + place * 7) % 5000 for place in range(tokens)]
    sampling = Sampling(max_tokens, seed, **({"ignore_eos": True} | wants))
    return GenerateRequest("x", [*prompt, *made], len(prompt), sampling)


async def test_a_preempted_streams_tables_are_its_own(vault: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool of 30 blocks streams are preempted and come back with other blocks: what lies on the device for a step
    is the step's own block tables, row by row, and every stream gets all its tokens."""
    wrong: list[str] = []
    steps = 0
    real = GraphInputs.fill_tables

    def checked(self: GraphInputs, segments: Sequence[Segment], size: int) -> None:
        nonlocal steps
        real(self, segments, size)
        steps += 1
        tables = self.tables.tolist()
        for row, segment in enumerate(segments):
            used = -(-segment.position // BLOCK)
            if tables[row][:used] != segment.blocks[:used]:
                wrong.append(f"step {steps}, row {row}: {tables[row][:used]} for {segment.blocks[:used]}")

    async with awake(vault, kv_gib=30 * BLOCK_GIB, concurrency=16) as said:
        monkeypatch.setattr(GraphInputs, "fill_tables", checked)
        streams = range(1, 11)
        for number in streams:  # one prompt: what is given up is found again at once in another's blocks
            said.engine.submit(number, asked(70, 90, number, temperature=0.8))
        await said.until(90, streams)
        scheduler = said.engine.tenant._stepper.scheduler
        assert scheduler is not None
        assert scheduler.preemptions > 0
        assert steps > 90
        assert not wrong, f"{len(wrong)} wrong tables: {wrong[:3]}"


@pytest.mark.parametrize("graphs", [True, False])
async def test_numbers_that_are_not_finite_are_an_error(vault: tuple[str, str], graphs: bool) -> None:
    """A broken number in a text's KV raises at the next step, whatever the stream wants; by graph or by hand."""
    async with awake(vault) as said:
        ready = said.engine.tenant._readiness.ready
        assert ready is not None
        computer = ready.computer
        assert computer.kv.shape[0] > said.engine.tenant.geometry.block_count, "made for another range"
        assert computer.graphs is not None
        if not graphs:
            computer.graphs = None

        def broken(wants: dict[str, Any]) -> str:
            kv = computer.kv[ready.blocks.start, 1, 1, 3, 0]
            settings = said.engine.tenant._readiness.settings_for(computer)
            scheduler = canary_scheduler(settings, ready.blocks, BLOCK, filled=False)
            scheduler.submit(0, asked(20, 8, 1, **wants))
            for _ in range(3):
                plan = scheduler.plan()
                assert plan is not None
                scheduler.retire(plan, *computer.compute(plan))
            whole = kv.clone()
            kv[0] = math.nan
            plan = scheduler.plan()
            assert plan is not None
            try:
                computer.compute(plan)
            except NotFiniteError as error:
                return str(error)
            finally:
                kv.copy_(whole)
            return "nothing was noticed"

        for name, wants in WANTS.items():
            told = await asyncio.wrap_future(said.engine.tenant._stepper.run(lambda wants=wants: broken(wants)))  # type: ignore[misc]
            assert "not finite" in told, f"{name}: {told}"


async def test_an_engine_whose_numbers_break_ends(vault: tuple[str, str]) -> None:
    """Two steps in flight, graphs, ten streams: the engine ends with the error's words."""
    async with awake(vault) as said:
        for number in range(1, 11):
            said.engine.submit(number, asked(40, 3000, number * 100, **list(WANTS.values())[number % len(WANTS)]))
        await said.until(20, range(1, 11))

        def work() -> str:
            ready, scheduler = said.engine.tenant._readiness.ready, said.engine.tenant._stepper.scheduler
            assert ready is not None
            assert scheduler is not None
            block = scheduler.running[7].blocks[0]
            ready.computer.kv[block, 1, 1, 3, 0, 0] = math.nan
            return f"block {block}: {ready.computer.kv[block, 1, 1, 3, 0].tolist()}"

        async with asyncio.timeout(BOUND_S):
            broken = await asyncio.wrap_future(said.engine.tenant._stepper.run(work))
        try:
            await said.until_fatal()
        except TimeoutError:
            told = {number: len(said.tokens(number)) for number in range(1, 11)}
            raise AssertionError(f"{broken}; {said.engine!r}; {told}") from None
        assert "not finite" in said.why


async def test_exact_says_the_same_in_any_batch(vault: tuple[str, str]) -> None:
    """Alone, together, or resumed in the middle: every stream's tokens are the same, whatever it wants."""
    async with awake(vault, exact=True) as said:
        names = dict(enumerate(WANTS, 1))
        for number, name in names.items():
            said.engine.submit(number, asked(10 + 7 * number, 30, number * 100, **WANTS[name]))
            await said.until(30, [number])
        for number, name in names.items():
            said.engine.submit(20 + number, asked(10 + 7 * number, 30, number * 100, **WANTS[name]))
        await said.until(30, [20 + number for number in names])
        for number, name in names.items():
            assert said.tokens(20 + number) == said.tokens(number), name
            made = said.tokens(number)[:12]
            said.engine.submit(40 + number, asked(10 + 7 * number, 30, number * 100, made, **WANTS[name]))
        await said.until(18, [40 + number for number in names])
        for number, name in names.items():
            assert said.tokens(40 + number) == said.tokens(number)[12:], name


async def test_streams_that_want_more_stay_in_the_graph(
    vault: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step of theirs is laid out by hand, alone they say what they say without graphs, and together all get all."""
    by_hand = 0
    real = computers.forward

    def counted(*given: Any) -> Any:
        nonlocal by_hand
        by_hand += 1
        return real(*given)

    async with awake(vault) as said:
        monkeypatch.setattr(computers, "forward", counted)
        names = dict(enumerate(WANTS, 1))
        for number, name in names.items():
            said.engine.submit(number, asked(30 + 11 * number, 60, number * 100, **WANTS[name]))
            await said.until(60, [number])
        for number, name in names.items():
            said.engine.submit(20 + number, asked(30 + 11 * number, 60, number * 100, **WANTS[name]))
        await said.until(60, [20 + number for number in names])
        assert by_hand == 0
        logprobs = [output.logprobs for output in said.made[5]]
        assert all(each is not None and len(each) == 1 and len(each[0].top) == 3 for each in logprobs)
        await said.engine.rest()
        ready = said.engine.tenant._readiness.ready
        assert ready is not None
        ready.computer.graphs, ready.computer.ahead = None, 0
        await said.engine.wake(time.time_ns() // 1_000_000)
        for number, name in names.items():
            said.engine.submit(40 + number, asked(30 + 11 * number, 60, number * 100, **WANTS[name]))
            await said.until(60, [40 + number])
            assert said.tokens(40 + number) == said.tokens(number), name
        assert by_hand > 0
