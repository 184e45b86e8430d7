"""The torch engine on a real GPU: graphs and steps ahead change no token, and a standby's graphs survive a takeover."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[up]) for up in (1, 2)]

torch = pytest.importorskip("torch")
if not Path("/dev/nvidiactl").exists():
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

from engine_rig import Said  # noqa: E402

from holdfast.core.requests import GenerateRequest, Output, Sampling  # noqa: E402
from holdfast.engines.torch.engine import torch_engine  # noqa: E402
from holdfast.engines.torch.files.tiny import tiny  # noqa: E402
from holdfast.memory.finding import gpu_uuids  # noqa: E402
from holdfast.memory.vault.launch import VaultProcesses  # noqa: E402
from holdfast.memory.vault.settings import VaultSettings  # noqa: E402
from holdfast.spec.engines import Place, TorchSettings  # noqa: E402

pytestmark = pytest.mark.gpu

SETTINGS = TorchSettings(kv_gib=1, concurrency=16, step_tokens_max=512)
TOKENS = 60


@pytest.fixture
def vault() -> Iterator[tuple[str, str]]:
    folder, gpu = Path(tempfile.mkdtemp(dir="/tmp")), gpu_uuids()[0]
    processes = VaultProcesses(VaultSettings(gpu, str(folder / "v.sock"), 0))
    processes.start()
    yield str(folder / "v.sock"), gpu
    processes.stop()


class Run(Said):
    """One engine and what it said."""

    def __init__(self, vault: tuple[str, str], number: int) -> None:
        self.engine = torch_engine(tiny(), SETTINGS, Place(vault[0], vault[1], number), lambda *_: None)
        super().__init__()
        self.said: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.changed = asyncio.Event()

    def outputs(self, outputs: list[Output]) -> bool:
        for output in outputs:
            self.said.setdefault(output.stream, []).extend(output.tokens)
            if output.finish is not None:
                self.ended.add(output.stream)
        self.changed.set()
        return True

    async def load(self) -> None:
        await self.engine.load(self)
        assert await self.engine.check() == ""

    async def until(self, count: int, streams: range) -> None:
        async with asyncio.timeout(60):
            while any(len(self.said.get(stream, [])) < count for stream in streams):
                self.changed.clear()
                await self.changed.wait()


def epoch() -> int:
    return time.time_ns() // 1_000_000


def asked(number: int, made: list[int] | None = None, **more: float) -> GenerateRequest:
    prompt = [(number * 31 + place * 7) % 5000 for place in range(20 + 37 * number)]
    temperature = 0.8 if number % 2 else 0.0
    sampling = Sampling(TOKENS, number, temperature=temperature, ignore_eos=True, **more)  # type: ignore[arg-type]
    return GenerateRequest("x", prompt + (made or []), len(prompt), sampling)


async def one_by_one(run: Run, numbers: range) -> dict[int, list[int]]:
    for number in numbers:
        run.engine.submit(number, asked(number))
        await run.until(TOKENS, range(number, number + 1))
    return dict(run.said)


async def test_graphs_and_steps_ahead_change_no_token(vault: tuple[str, str]) -> None:
    """A stream alone has the same tokens by graphs, a step ahead, as by plain steps one after the other."""
    run = Run(vault, 0)
    await run.load()
    await run.engine.wake(epoch())
    ready = run.engine.tenant._readiness.ready
    assert ready is not None
    assert ready.computer.graphs is not None
    assert ready.computer.ahead == 1
    by_graph = await one_by_one(run, range(1, 5))
    await run.engine.rest()
    run.said.clear()
    ready.computer.graphs = None
    ready.computer.ahead = 0
    await run.engine.wake(epoch())
    plain = await one_by_one(run, range(1, 5))
    assert plain == by_graph
    await run.engine.stop()


async def test_streams_that_come_go_and_want_more(vault: tuple[str, str]) -> None:
    """Streams of unlike lengths, penalties and logprobs among them, all get every token; a cancelled one no more."""
    run = Run(vault, 0)
    await run.load()
    await run.engine.wake(epoch())
    wants = {3: {"presence_penalty": 0.5}, 6: {"top_p": 0.9}, 9: {"top_logprobs": 2}}
    for number in range(1, 13):
        run.engine.submit(number, asked(number, **wants.get(number, {})))
    await run.until(10, range(1, 13))
    run.engine.cancel(5)
    left = len(run.said[5])
    others = [number for number in range(1, 13) if number != 5]
    for number in others:
        await run.until(TOKENS, range(number, number + 1))
    assert [len(run.said[number]) for number in others] == [TOKENS] * 11
    assert run.ended == set(others)
    assert len(run.said[5]) <= left + 2
    assert run.engine.tenant._blocks is not None
    assert run.engine.tenant._blocks.used == 0
    await run.engine.stop()


async def test_a_takeover_captures_nothing(vault: tuple[str, str]) -> None:
    """What a standby captured beside a living owner serves after it: no kernel, graph or memory is made by the wake,
    and a resumed stream goes on from the blocks that are there."""
    first, second = Run(vault, 0), Run(vault, 1)
    await first.load()
    await first.engine.wake(epoch())
    await second.load()
    for number in range(1, 9):
        first.engine.submit(number, asked(number))
    await first.until(30, range(1, 9))
    await first.engine.rest()
    said = {number: first.said[number][:30] for number in range(1, 9)}
    ready, before = second.engine.tenant._readiness.ready, torch.cuda.memory_reserved()
    woken = await second.engine.wake(epoch())
    assert woken.blocks > 0
    assert second.engine.tenant._readiness.ready is ready
    for number in range(1, 9):
        second.engine.submit(number, asked(number, said[number]))
    await second.until(TOKENS - 30, range(1, 9))
    assert torch.cuda.memory_reserved() == before
    assert second.engine.resumes.recomputed_tokens_max <= SETTINGS.block_tokens
    await second.engine.stop()
    await first.engine.stop()
