"""Vaults on several devices and engines of as many ranks, in processes of their own, for tests that kill them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from torch_rig import BLOCK_GIB, BOUND_S, SETTINGS, Child

from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings

AGENT = Path(__file__).with_name("torch_ranks_agent.py")
LOAD_S = 100.0  # every rank imports torch: two seconds of a core each


class Group(Child):
    """An engine with all its ranks; `kill` is of its leader."""

    async def start(self, launch: dict[str, Any]) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(AGENT), json.dumps(launch)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
        )
        self._listening = asyncio.create_task(self._listen())

    async def ended(self) -> None:
        """By itself."""
        async with asyncio.timeout(BOUND_S):
            await self._process.wait()
            await self._listening

    @property
    def alive(self) -> bool:
        return self._process.returncode is None


class Vaults:
    """One vault for each of two devices."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.places = [(str(self.folder / f"gms_host-{at}.sock"), f"host-{at}") for at in (0, 1)]
        self.logs = [self.folder / f"log-{at}" for at in (0, 1)]
        self.processes = [
            VaultProcesses(VaultSettings(device, path), log)
            for (path, device), log in zip(self.places, self.logs, strict=True)
        ]

    def kill(self, rank: int, *kinds: str) -> None:
        """SIGKILL a vault's "server", its "keeper" or both, stopped first so that none starts the other."""
        found = [pid for kind in kinds for pid in _pids(kind, self.places[rank][0])]
        assert len(found) == len(kinds), found
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                os.kill(pid, number)

    async def come_back(self, rank: int) -> None:
        """Both were killed, and are started again with nothing."""
        async with asyncio.timeout(BOUND_S):
            while not self.processes[rank].ensure():
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def groups(self, count: int) -> AsyncIterator[list[Group]]:
        """Engines of two ranks each, loaded and standing by."""
        groups = [Group() for _ in range(count)]
        settings = SETTINGS | {"kv_gib": 256 * BLOCK_GIB}  # 512 blocks of half the heads on each rank
        try:
            for number, group in enumerate(groups):
                await group.start({"vaults": self.places, "engine_id": number, "settings": settings})
            async with asyncio.timeout(LOAD_S):
                await asyncio.gather(*(group.order("load") for group in groups))
            yield groups
        finally:
            await asyncio.gather(*(group.kill() for group in groups))


@contextmanager
def running_vaults() -> Iterator[Vaults]:
    vaults = Vaults()
    for each in vaults.processes:
        each.start()
    try:
        yield vaults
    finally:
        for each in vaults.processes:
            each.stop()
        texts = [log.read_text() for log in vaults.logs]
        shutil.rmtree(vaults.folder)
    for text in texts:
        assert "Traceback" not in text, text[-3000:]


def _pids(kind: str, socket: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdigit() else []
            if f"holdfast.memory.vault.{kind}" in words[:3] and any(socket in word for word in words):
                found.append(int(entry.name))
    return found


async def gone(pid: int) -> None:
    """Wait until a process is over."""
    async with asyncio.timeout(BOUND_S):
        while _lives(pid):
            await asyncio.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # nobody may read it yet
    except OSError:
        return False
