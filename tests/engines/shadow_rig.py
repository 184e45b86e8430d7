"""A real vault and real shadow engines in processes of their own, for tests that kill them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings

AGENT = Path(__file__).with_name("shadow_agent.py")
BOUND_S = 20.0  # for anything that should be quick
SIM = {"ttft_ms": 0.0, "tpot_ms": 0.0, "vault_gib": 0.004, "kv_blocks": 2048}


class Failed(Exception):
    """What an order ended with; `kind` is the error's class there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Vault:
    """One vault on host-0, in a folder of its own."""

    def __init__(self, budget_bytes: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shadow-"))
        self.socket = str(self.folder / "gms_host-0.sock")
        self.log = self.folder / "log"
        self.processes = VaultProcesses(VaultSettings("host-0", self.socket, budget_bytes), self.log)

    def __enter__(self) -> Vault:
        self.processes.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.stop()
        text = self.log.read_text()
        shutil.rmtree(self.folder)
        assert "Traceback" not in text, text[-3000:]

    def kill(self, *kinds: str) -> None:
        """SIGKILL its "server", its "keeper" or both, stopped first so that none starts the other in between."""
        found = [pid for kind in kinds for pid in self._pids(kind)]
        assert len(found) == len(kinds), found
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                os.kill(pid, number)

    def _pids(self, kind: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_text().split("\0") if entry.name.isdigit() else []
                if f"holdfast.memory.vault.{kind}" in words[:3] and any(self.socket in word for word in words):
                    found.append(int(entry.name))
        return found

    @contextlib.asynccontextmanager
    async def engine(self, engine_id: int = 0, *, ranks_die: bool = True, **settings: Any) -> AsyncIterator[Engine]:
        """A loaded engine; settings of the sim, or of the shadow where it has one of that name."""
        shadow = {name: settings.pop(name) for name in ("unmapped", "direct", "wake_s") if name in settings}
        launch = {
            "socket": self.socket,
            "sim": SIM | settings,
            "shadow": {"engine_id": engine_id, "who": f"engine {engine_id}", **shadow},
            "ranks_die": ranks_die,
        }
        engine = Engine()
        await engine.start(launch)
        try:
            await engine.do("load")
            yield engine
        finally:
            await engine.kill()


class Engine:
    """A child process that carries out orders, and what it said of its streams."""

    def __init__(self) -> None:
        self.said: dict[int, list[int]] = {}  # tokens by stream
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        assert self._process.stdin is not None
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps([number, name, arguments]).encode() + b"\n")
        return self._answers[number]

    async def do(self, name: str, **arguments: Any) -> Any:
        async with asyncio.timeout(BOUND_S):
            return await self.order(name, **arguments)

    async def submit(self, stream: int, tokens: list[int], max_tokens: int, prompt_len: int | None = None) -> None:
        length = len(tokens) if prompt_len is None else prompt_len
        await self.do("submit", stream=stream, tokens=tokens, max_tokens=max_tokens, prompt_len=length)

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

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            number, *words = json.loads(line)
            if number == 0:
                self._heard(*words)
            elif not (future := self._answers.pop(number)).done():
                result, error = words
                future.set_result(result) if error is None else future.set_exception(Failed(*error))
        for future in self._answers.values():
            if not future.done():
                future.set_exception(Failed("Died", "the engine has ended"))
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
