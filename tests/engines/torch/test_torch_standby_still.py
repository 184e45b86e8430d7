"""A standby's canary computes in a thread while the vault's news may move what is mapped under it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from engine_rig import Said

from holdfast.engines.shadow.engine import VaultEngine
from holdfast.engines.torch.engine import TorchTenant, torch_engine
from holdfast.engines.torch.files.tiny import tiny
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.spec.engines import Place, TorchSettings


def engine(socket: str, number: int) -> VaultEngine[TorchTenant]:
    settings = TorchSettings(kv_gib=0.02, threads=1)
    return torch_engine(tiny(), settings, Place(socket, engine_id=number), lambda *_: None)


@pytest.mark.timeout(60)
async def test_nothing_moves_under_a_running_canary(tmp_path: Path) -> None:
    """A pool made by another is mapped after the canary under way has ended, even if whoever asked for it left."""
    socket = str(tmp_path / "v.sock")
    vault = VaultProcesses(VaultSettings("host-0", socket))
    vault.start()
    active, standby = engine(socket, 0), engine(socket, 1)
    try:
        await active.load(Said())
        await standby.load(Said())
        before = standby.memory.pool.mapping
        checking = asyncio.ensure_future(standby.check())
        while not standby.memory.still.locked():
            await asyncio.sleep(0)
        checking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await checking
        assert standby.memory.still.locked(), "the thread goes on, and what it reads must stay"
        await active.wake(1)
        assert standby.memory.pool.mapping is before or not standby.memory.still.locked()
        async with asyncio.timeout(20):
            while standby.memory.pool.mapping is before:
                await asyncio.sleep(0.01)
        assert await standby.check() == ""
    finally:
        for one in (active, standby):
            await one.memory.close()
        vault.stop()
