"""What the torch engine's tests share: a vault, an engine of the tiny model in it, and all that it said.

Engines run here in the test's own process, on one thread, with the model's steps in a thread of theirs as always; those
that are to be killed are children that carry out orders (torch_engine_agent.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.shadow.place import Place
from holdfast.engines.torch.engine import TorchEngine
from holdfast.engines.torch.files.checkpoint import Checkpoint
from holdfast.engines.torch.files.tiny import TINY, tiny
from holdfast.engines.torch.settings import TorchSettings
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings

AGENT = Path(__file__).with_name("torch_engine_agent.py")
BOUND_S = 30.0  # far above what anything here takes, on a busy machine too
LOAD_S = 100.0  # a child's first order waits for its import of torch: ten times as long beside others that import it
BLOCK = 16
# A block of the tiny model: keys and values of all layers, fp32.
BLOCK_GIB = 2 * TINY.layers * TINY.kv_heads * TINY.head_size * BLOCK * 4 / 2**30
SETTINGS: dict[str, Any] = {"exact": True, "threads": 1, "kv_gib": 512 * BLOCK_GIB}


class Vault:
    """One vault on host-0, in a folder of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="torch-"))
        self.socket = str(self.folder / "gms_host-0.sock")
        self.log = self.folder / "log"
        self._processes = VaultProcesses(VaultSettings("host-0", self.socket), self.log)

    def start(self) -> None:
        self._processes.start()

    def stop(self) -> None:
        self._processes.stop()
        text = self.log.read_text()
        shutil.rmtree(self.folder)
        assert "Traceback" not in text, text[-3000:]

    def commits(self) -> int:
        return self.log.read_text().count("committed generation")

    @asynccontextmanager
    async def pair(self, **settings: Any) -> AsyncIterator[tuple[Child, Child]]:
        """Two loaded engines in processes of their own, to be killed."""
        children = Child(), Child()
        launches = [{"socket": self.socket, "engine_id": place, "settings": SETTINGS | settings} for place in (0, 1)]
        try:
            await asyncio.gather(*(child.start(launch) for child, launch in zip(children, launches, strict=True)))
            await asyncio.gather(*(child.do("load") for child in children))
            yield children
        finally:
            await asyncio.gather(*(child.kill() for child in children))


@contextmanager
def running_vault() -> Iterator[Vault]:
    vault = Vault()
    vault.start()
    try:
        yield vault
    finally:
        vault.stop()


class Said:
    """Outputs as they came, and a way to wait for a state of them."""

    def __init__(self) -> None:
        self.batches: list[list[Output]] = []
        self.closed: list[int] = []
        self.on_batch: Callable[[list[Output]], None] = lambda outputs: None
        self.willing = True
        self._changed = asyncio.Event()

    def sink(self, outputs: list[Output]) -> bool:
        self.batches.append(outputs)
        self._changed.set()
        self.on_batch(outputs)
        return self.willing

    def on_closed(self, streams: list[int]) -> None:
        self.closed.extend(streams)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def of(self, stream: int) -> list[Output]:
        return [output for batch in self.batches for output in batch if output.stream == stream]

    def tokens(self, stream: int) -> list[int]:
        return [token for output in self.of(stream) for token in output.tokens]

    def ended(self, *streams: int) -> bool:
        last = {output.stream for batch in self.batches for output in batch if output.finish or output.failure}
        return last.issuperset(streams)


class Rig(Said):
    """An engine that is awake, in this process."""

    def __init__(self, vault: Vault, checkpoint: Checkpoint | None = None, engine_id: int = 0, **settings: Any) -> None:
        super().__init__()
        place = Place(vault.socket, engine_id=engine_id, who=f"engine {engine_id}")
        self.progress: list[tuple[str, int, int | None]] = []
        self.engine = TorchEngine(
            checkpoint or tiny(),
            TorchSettings(**(SETTINGS | settings)),
            place,
            lambda *words: self.progress.append(words),
        )
        self.fatal: list[str] = []
        self.engine.on_fatal = self._fatal

    def _fatal(self, why: str) -> None:
        self.fatal.append(why)

    @property
    def blocks(self) -> PoolBlocks:
        assert self.engine._blocks is not None, "asleep"
        return self.engine._blocks

    @property
    def scheduler(self) -> Scheduler:
        assert self.engine._stepper.scheduler is not None, "asleep"
        return self.engine._stepper.scheduler

    def submit(self, asked: dict[int, GenerateRequest]) -> None:
        for number, request in asked.items():
            self.engine.submit(number, request)

    async def run(self, asked: dict[int, GenerateRequest]) -> None:
        """All of them at once, to their ends."""
        self.submit(asked)
        await self.until(lambda: self.ended(*asked))


@asynccontextmanager
async def rig(vault: Vault, epoch: int = 1000, **given: Any) -> AsyncIterator[Rig]:
    made = Rig(vault, **given)
    try:
        await made.engine.load()
        await made.engine.start(made.sink, made.on_closed)
        await made.engine.wake(epoch)
        yield made
    finally:
        await made.engine.stop()
    assert not made.fatal, made.fatal


def request(
    tokens: list[int], max_tokens: int = 24, *, prompt_len: int | None = None, **given: Any
) -> GenerateRequest:
    stops = given.pop("stop_token_ids", [])
    sampling = Sampling(max_tokens, **{"seed": 7, "ignore_eos": True, "temperature": 0.0, **given})
    return GenerateRequest("r", tokens, len(tokens) if prompt_len is None else prompt_len, sampling, stops)


def prompt(length: int, number: int = 0) -> list[int]:
    """No two numbers share a block."""
    return [(7919 * number + 31 * place * place + 101 * place + 17) % TINY.vocabulary for place in range(length)]


class Died(Exception):
    """The child ended before it answered."""


class Child:
    """A process with an engine, and what that said of its streams."""

    def __init__(self) -> None:
        self.said: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = iter(range(1, 1_000_000))
        self._changed = asyncio.Event()

    async def start(self, launch: dict[str, Any]) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(AGENT), json.dumps(launch)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
        )
        self._listening = asyncio.create_task(self._listen())

    def order(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        assert self._process.stdin is not None
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps([number, name, arguments]).encode() + b"\n")
        return self._answers[number]

    async def do(self, name: str, **arguments: Any) -> Any:
        async with asyncio.timeout(LOAD_S if name == "load" else BOUND_S):
            return await self.order(name, **arguments)

    async def submit(self, stream: int, tokens: list[int], max_tokens: int, **given: Any) -> None:
        await self.do("submit", stream=stream, tokens=tokens, max_tokens=max_tokens, given=given)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_facts(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(BOUND_S):
            while not condition(facts := await self.do("facts")):
                await asyncio.sleep(0.01)
            return facts  # type: ignore[no-any-return]

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            number, *words = json.loads(line)
            if number == 0:
                self._heard(*words)
            elif not (future := self._answers.pop(number)).done():
                result, error = words
                future.set_result(result) if error is None else future.set_exception(RuntimeError(error))
        for future in self._answers.values():
            if not future.done():
                future.set_exception(Died("the engine has ended"))
                future.exception()

    def _heard(self, stream: int, tokens: list[int], finish: str | None) -> None:
        self.said.setdefault(stream, []).extend(tokens)
        if finish is not None:
            self.finished[stream] = finish
        self._changed.set()

    async def kill(self) -> None:
        """SIGKILL, and wait until it is over and all it had said was read."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._listening
