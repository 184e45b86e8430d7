"""A machine on which one manifest is kept and changed, with real processes, as `holdfast up -f` does it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from msgspec import structs

from holdfast.core.ports import SystemClock
from holdfast.core.tasks import beside
from holdfast.roles.rolled import Rolled, Site
from holdfast.roles.running import child_command, log_dir
from holdfast.rollout.machine import RolloutPhase
from holdfast.rollout.records import AskedManifest, applied, change_desired
from holdfast.spec.manifest.checking import check
from holdfast.store.opening import open_store
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.rollout_controller import RolloutController
from holdfast.testing.rig import DeploymentRig
from holdfast.wire.net import SocketNetwork

WAIT_S = 120.0


class Kept(DeploymentRig):
    """Where a manifest's deployment lives, its supervisor in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    @contextlib.asynccontextmanager
    async def kept(self, text: str, *, hosts: int = 0, host_bytes: int = 0) -> AsyncIterator[RolloutController]:
        """From its first look on; what is asked for is what the store holds, and `text` where it holds nothing."""
        site = Site(state_dir=str(self.folder), manifest=text, environ=self.env, port=self.port)
        rolled = Rolled(structs.replace(site, hosts=hosts, host_bytes=host_bytes))
        command, logs = child_command(os.getpid()), LocalProcesses(log_dir(self.folder))
        tell = self.told.append
        supervisor = Supervisor(self.folder, rolled.jobs(), logs, command, tell=tell, clock=SystemClock())
        self.supervisor = supervisor
        self.store = open_store(rolled.machine.store_url, SocketNetwork(), random.Random(1))
        await self.store.start()

        async def shown(lack: str) -> None:
            self.told.append(lack or "it serves")

        try:
            async with beside(rolled.run(supervisor, tied=True, shown=shown, tell=tell), "kept") as self.task:
                await self.until(lambda: rolled.rolling is not None, "its rollouts to begin")
                assert rolled.rolling is not None
                yield rolled.rolling
        finally:
            await self.store.close()
            supervisor.kill()
            await supervisor.stop()

    async def apply(self, rolling: RolloutController, text: str) -> int:
        """The number of the revision that it is."""
        manifest = check(text.encode()).manifest
        assert manifest is not None
        asked = AskedManifest.of(text, manifest)
        return (await change_desired(self.store, rolling.name, applied(asked, time.time()))).revision

    async def until(self, met: Callable[[], Any], what: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while not met():
            assert not self.task.done(), self.task
            assert time.monotonic() < end_s, f"waited for {what}: {self.told} {self.logs()}"
            await asyncio.sleep(0.05)

    async def in_place(self, rolling: RolloutController, number: int) -> None:
        await self.until(
            lambda: rolling.state.phase is RolloutPhase.STEADY and rolling.state.target.number == number, f"{number}"
        )

    def workers(self) -> list[str]:
        return [name for name, slot in self.supervisor.slots.items() if slot.job.role == "worker"]
