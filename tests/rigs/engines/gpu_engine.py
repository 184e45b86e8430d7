"""What tests on a real GPU share: the first one's vault, and engines in it. Where there is none, they are skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
if not Path("/dev/nvidiactl").exists():
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

from holdfast.memory.devices import gpu_uuids
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from tests.rigs.engines import any_engine
from tests.rigs.engines.torch_engine import Rig, rig

SETTINGS: dict[str, Any] = {"exact": False, "threads": 0, "kv_gib": 1, "concurrency": 16, "step_tokens_max": 512}


class Vault(any_engine.Vault):
    """Holds memory of the first GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.places = [(self.socket, gpu_uuids()[0])]
        self.processes = [VaultProcesses(VaultSettings(self.places[0][1], self.socket), self.log)]


@asynccontextmanager
async def awake(**given: Any) -> AsyncIterator[Rig]:
    """An engine, awake, in a vault of its own."""
    with Vault() as vault:
        async with rig(vault, **(SETTINGS | given)) as r:
            yield r


async def until(r: Rig, count: int, streams: Iterable[int]) -> None:
    """Until each of the streams has so many tokens; the engine's last words, if it has ended before."""
    await r.until(lambda: bool(r.heard("fatal")) or all(len(r.tokens(stream)) >= count for stream in streams))
    assert not r.heard("fatal"), r.told
