"""What tests on a real GPU share: the first one's vault, and engines in it. Where there is none, they are skipped.

They run without a conftest too (run_on_gpu.sh), so the rigs above are found by path.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[up]) for up in (1, 2)]

pytest.importorskip("torch")
if not Path("/dev/nvidiactl").exists():
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

import engine_rig  # noqa: E402
from torch_rig import Rig, rig  # noqa: E402

from holdfast.memory.finding import gpu_uuids  # noqa: E402
from holdfast.memory.vault.launch import VaultProcesses  # noqa: E402
from holdfast.memory.vault.settings import VaultSettings  # noqa: E402

SETTINGS: dict[str, Any] = {"exact": False, "threads": 0, "kv_gib": 1, "concurrency": 16, "step_tokens_max": 512}


class Vault(engine_rig.Vault):
    """Of the first GPU."""

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
