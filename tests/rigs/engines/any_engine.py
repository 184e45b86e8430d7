"""What the tests of all engines share: a vault for each device, engines in this process or in children, what they said.

An engine is known by its kind ("sim", "torch", "example"), which says how it is made from its settings. Those that are
to be killed are children that carry out orders (engine_agent.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.engines.contract import EngineEvents
from holdfast.engines.host.engine import VaultEngine
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.spec.engines import FailoverSettings
from holdfast.testing.processes import kill_together, vault_processes
from tests.rigs.agents import Agent

AGENT = Path(__file__).with_name("engine_agent.py")
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
BOUND_S = 60.0  # far above what anything here takes, on a busy machine too
# A child's first order waits for its imports: of torch, ten times as long beside others that import it; of vLLM.
LOAD_S = 300.0
VLLM_LOAD_S = 400.0
WAKE_S = BOUND_S  # with a vault that has to start again, on a busy machine
# For engines that live to give back what a lost vault had: also on a machine that lets them wait.
PATIENT = {"weights_donation_s": BOUND_S, "pool_donation_s": BOUND_S}
# A block of the tiny model: keys and values of 4 layers, 2 heads of 16, 16 tokens, fp32.
TINY_BLOCK_GIB = 2 * 4 * 2 * 16 * 16 * 4 / 2**30
# One of vLLM's tiny ones: 4 layers, 2 heads of 32, 32 tokens, fp32; and those that are not the pool's.
VLLM_BLOCK_GIB = 2 * 4 * 2 * 32 * 32 * 4 / 2**30
VLLM_OWN = 17
# In bfloat16, in which vLLM computes on some CPUs, a block has half the bytes, and two ranks round otherwise than one.
VLLM_OPTIONS = ["--enforce-eager", "--dtype", "float32"]
SETTINGS: dict[str, dict[str, Any]] = {
    "sim": {"ttft_ms": 0.0, "tpot_ms": 0.0, "vault_gib": 0.004, "kv_blocks": 2048},
    "torch": {"exact": True, "threads": 1, "kv_gib": 512 * TINY_BLOCK_GIB},
    "example": {},
    "vllm": {"kv_gib": 0.03, "context_tokens_max": 2048, "concurrency": 16, "options": VLLM_OPTIONS},
}


def make_engine(
    kind: str, settings: dict[str, Any], failover: FailoverSettings, progress: Any = lambda *_: None
) -> VaultEngine[Any]:
    """With `settings` in place of the kind's own ones here."""
    settings = SETTINGS[kind] | settings
    if kind == "sim":
        from holdfast.engines.sim.hosted import VaultSim
        from holdfast.spec.engines import SimSettings

        return VaultSim(SimSettings(**settings), random.Random(1), failover)
    if kind == "torch":
        from holdfast.engines.torch.engine import torch_engine
        from holdfast.engines.torch.files.resolve import tiny
        from holdfast.spec.engines import TorchSettings

        return torch_engine(settings.pop("checkpoint", None) or tiny(), TorchSettings(**settings), failover, progress)
    if kind == "vllm":
        from tests.rigs.engines.vllm_models import made, set_variables

        set_variables()
        from holdfast.engines.vllm.engine import vllm_engine
        from holdfast.spec.engines import VllmSettings

        family = settings.pop("family", "llama")
        given = settings | {"options": tuple(settings["options"])}
        return vllm_engine(str(made(family)), f"tiny {family}", frozenset({1}), VllmSettings(**given), failover)
    sys.path.insert(0, str(EXAMPLES))
    from counting_engine import CountingEngine

    return VaultEngine(CountingEngine(**settings), failover)


def request(tokens: list[int], max_tokens: int = 24, *, prompt_len: int | None = None, **given: Any) -> GenerateRequest:
    stops = given.pop("stop_token_ids", [])
    sampling = Sampling(max_tokens, **{"seed": 7, "ignore_eos": True, **given})
    return GenerateRequest("r", tokens, len(tokens) if prompt_len is None else prompt_len, sampling, stops)


class Vault:
    """Runs a vault for each of some devices, host-0 and on, in a folder of their own."""

    def __init__(self, devices: int = 1, **settings: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="engines-"))
        self.places = [(str(self.folder / f"gms_host-{at}.sock"), f"host-{at}") for at in range(devices)]
        self.socket = self.places[0][0]
        self.logs = [self.folder / f"log-{at}" for at in range(devices)]
        self.processes = [
            VaultProcesses(VaultSettings(device, path, **settings), log)
            for (path, device), log in zip(self.places, self.logs, strict=True)
        ]

    def __enter__(self) -> Vault:
        for each in self.processes:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes:
            each.stop()
        texts = [log.read_text() for log in self.logs]
        shutil.rmtree(self.folder)
        for text in texts:
            assert "Traceback" not in text, text[-3000:]

    @property
    def log(self) -> Path:
        return self.logs[0]

    def commits(self) -> int:
        return self.log.read_text().count("committed generation")

    def kill(self, *kinds: str, device: int = 0) -> None:
        """Send SIGKILL to its VAULT, its KEEPER or both."""
        there = {role: pid for pid, role in vault_processes(self.places[device][0]).items()}
        kill_together(there[kind] for kind in kinds)

    async def come_back(self, device: int = 0) -> None:
        """Both were killed, and are started again with nothing."""
        async with asyncio.timeout(BOUND_S):
            while not self.processes[device].ensure():
                await asyncio.sleep(0.01)

    def failover(self, engine_id: int = 0, **given: Any) -> FailoverSettings:
        (socket, device), *more = self.places
        given = {"wake_s": WAKE_S, "more_vaults": tuple(more)} | given
        return FailoverSettings(socket, device, engine_id, f"engine {engine_id}", **given)

    @contextlib.asynccontextmanager
    async def children(self, *children: Child) -> AsyncIterator[tuple[Child, ...]]:
        """Load them side by side; kill them at the end."""
        try:
            await asyncio.gather(*(child.start() for child in children))
            await asyncio.gather(*(child.do("load") for child in children))
            yield children
        finally:
            await asyncio.gather(*(child.kill() for child in children))

    @contextlib.asynccontextmanager
    async def engine(self, engine_id: int = 0, kind: str = "sim", **given: Any) -> AsyncIterator[Child]:
        """A loaded engine of its own process."""
        async with self.children(Child(self, engine_id, kind, **given)) as (child,):
            yield child

    @contextlib.asynccontextmanager
    async def pair(self, kind: str = "sim", **given: Any) -> AsyncIterator[tuple[Child, ...]]:
        async with self.children(*(Child(self, number, kind, **given) for number in (0, 1))) as pair:
            yield pair


class Said(EngineEvents):
    """What an engine told, as it came, and a way to wait for a state of that."""

    def __init__(self) -> None:
        self.batches: list[list[Output]] = []
        self.lost: list[int] = []  # streams that were closed
        self.told: list[list[Any]] = []  # [kind, words] of everything else
        self.on_batch: Callable[[list[Output]], None] = lambda outputs: None
        self.willing = True
        self.loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    def outputs(self, outputs: list[Output]) -> bool:
        self.batches.append(outputs)
        self._changed.set()
        self.on_batch(outputs)
        return self.willing

    def closed(self, streams: list[int]) -> None:
        self.lost.extend(streams)
        self._changed.set()

    def fatal(self, why: str) -> None:
        self.told.append(["fatal", why])
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._changed.set)

    def disproved(self, why: str) -> None:
        self.told.append(["disproved", why])
        self._changed.set()

    def owner_gone(self, epoch: int) -> None:
        self.told.append(["owner_gone", ""])

    def memory(self, why: str) -> None:
        self.told.append(["memory", why])

    def loading(self, why: str) -> None:
        self.told.append(["loading", why])

    def heard(self, kind: str) -> list[Any]:
        return [words for each, words in self.told if each == kind]

    def noticed(self) -> None:
        """Something that `until` may wait for has changed."""
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
    """An engine in this process."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine

    async def load(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.engine.load(self)

    def submit(self, asked: dict[int, GenerateRequest]) -> None:
        for number, each in asked.items():
            self.engine.submit(number, each)

    async def run(self, asked: dict[int, GenerateRequest]) -> None:
        """All of them at once, to their ends."""
        self.submit(asked)
        await self.until(lambda: self.ended(*asked))


class Child(Agent):
    """A process with an engine that carries out orders, and what that said of its streams."""

    def __init__(
        self,
        vault: Vault,
        engine_id: int = 0,
        kind: str = "sim",
        *,
        ranks_die: bool = True,
        slow: bool = False,  # the reader of its outputs does not keep up: a step takes a millisecond at least
        **given: Any,
    ) -> None:
        failover = {"wake_s": WAKE_S} | {name: given.pop(name) for name in ("standby", "kv", "wake_s") if name in given}
        launch = {"kind": kind, "settings": SETTINGS[kind] | given, "vaults": vault.places}
        launch |= {"ranks_die": ranks_die, "slow": slow}
        launch["failover"] = {"engine_id": engine_id, "engine_name": f"engine {engine_id}", **failover}
        super().__init__(str(AGENT), json.dumps(launch))
        self._load_s = VLLM_LOAD_S if kind == "vllm" else LOAD_S
        self.said: dict[int, list[int]] = {}  # tokens by stream
        self.finished: dict[int, str] = {}
        self._changed = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def do(self, name: str, **arguments: Any) -> Any:
        async with asyncio.timeout(self._load_s if name == "load" else BOUND_S):
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
            return facts

    async def follows(self) -> None:
        """Wait until it, standing by, follows a pool."""
        await self.until_facts(lambda facts: "None" not in facts["follower"])

    def heard(self, stream: int, tokens: list[int], finish: str | None) -> None:
        self.said.setdefault(stream, []).extend(tokens)
        if finish is not None:
            self.finished[stream] = finish
        self._changed.set()
