"""Rollouts carried out over tiny processes in place of frontends: a real store, a real supervisor, a hasty clock."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from holdfast.core.tasks import beside
from holdfast.rollout.machine import RolloutPhase
from holdfast.rollout.records import (
    AskedManifest,
    DesiredDeployment,
    HistoryEntry,
    RolloutStatus,
    applied,
    change_desired,
    read_entry,
)
from holdfast.spec.jobs import Job
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine
from holdfast.store.contract import Snapshot, Store, StoreUnavailable
from holdfast.supervise import machine as life_machine
from holdfast.supervise import rollout_controller as rolling_shell
from holdfast.supervise.job_list import JobList, kept_jobs
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.replicas import StartContext
from holdfast.supervise.rollout_controller import RolloutController
from tests.rigs.store.served import served_store
from tests.rigs.supervise.supervisors import World

# Ready once it has replaced "starting" in its own record; a bad one ends at once, a mute one is never ready.
SCRIPT = """
grep -q BAD "$3" && { echo no such thing; exit 7; }
f="$1/run/$2.json"; while ! [ -e "$f" ]; do sleep 0.01; done
grep -q MUTE "$3" || sed -i s/starting/ready/ "$f"
exec sleep 1000
"""
MANIFEST = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    Frontend:
      componentType: frontend
      replicas: REPLICAS
      envs: [{name: VERSION, value: "VALUE"}]
      rollout: {progressDeadlineSeconds: 400}
"""
HERE = RolloutStatus(pid=1, host="here", state_dir="/s")
FASTER = 20.0  # a rollout's clock: its deadlines are minutes
LOOK_S = 0.05  # its looks too, and what it leaves a frontend to read that it is replaced: these read nothing
WAIT_S = 60.0


class Fast:
    """A clock whose wall time runs ahead."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return 1e9 + time.monotonic() * FASTER


def text(version: str, replicas: int = 2) -> str:
    return MANIFEST.replace("REPLICAS", str(replicas)).replace("VALUE", version)


class Site:
    """One machine: its store outlives its supervisors."""

    def __init__(self, world: World, store: Store, another: Store) -> None:
        self.world = world
        self.store = store
        self.another = another  # another client of it
        self.told: list[str] = []
        self.ready_min = 99  # the fewest that were ready at a look, since it was last set
        self.most = 0  # the most that there were

    async def apply(self, manifest: str) -> DesiredDeployment:
        read = check(manifest.encode()).manifest
        assert read is not None
        change = applied(AskedManifest.of(manifest, read), 1.0)
        with contextlib.suppress(StoreUnavailable):  # a machine with much else to do: it may be asked again
            return await change_desired(self.store, "chat", change)
        return await change_desired(self.store, "chat", change)

    @contextlib.asynccontextmanager
    async def carried_out(self) -> AsyncIterator[RolloutController]:
        """By a supervisor with the jobs that are kept on disk; it is killed in the end."""
        supervisor = await self.world.start(*kept_jobs(self.world.state_dir))
        context = StartContext(
            Machine(self.world.state_dir, {"HOME": "/"}), (), lambda _engine, source, _model: (source, "m")
        )
        job_list = JobList(supervisor, self.world.state_dir)
        how = {"status": HERE, "tell": self.told.append, "clock": Fast()}
        rolling = RolloutController("chat", self.store, supervisor, job_list, context, **how)
        self.supervisor = supervisor
        async with beside(rolling.run(), "rollouts") as self.task:
            yield rolling
        self.world.lose(supervisor)

    @property
    def ready(self) -> dict[str, int]:
        """Pids of those that serve, by name."""
        slots = self.supervisor.slots.items()
        return {name: slot.life.pid for name, slot in slots if slot.life.phase is life_machine.Phase.READY}

    async def until(self, met: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while not met():
            assert not self.task.done() or self.task.exception() is None, self.task
            assert time.monotonic() < end_s, f"waited for {what}: {self.told} {self.supervisor.slots}"
            self.ready_min = min(self.ready_min, len(self.ready))
            self.most = max(self.most, len(self.supervisor.slots))
            await asyncio.sleep(0.01)

    async def in_place(self, rolling: RolloutController, number: int) -> None:
        def met() -> bool:
            memory = rolling.state
            return (
                memory.phase is RolloutPhase.STEADY
                and memory.target.number == number
                and memory.desired_number >= number
            )

        await self.until(met, f"revision {number}")

    async def history(self) -> dict[int, HistoryEntry]:
        read = [read_entry(key, value) for key, value in (await self.keys("v1/history/")).items()]
        return {entry.number: entry for entry in read if entry is not None}

    async def keys(self, prefix: str = "v1/") -> dict[str, bytes]:
        """All that the store has, as it is now."""
        async with contextlib.aclosing(self.store.watch(prefix)) as events:  # a client may have few of them
            async for event in events:
                if isinstance(event, Snapshot):
                    return event.items
        raise AssertionError("the watch ended")


@contextlib.asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Site]:
    """A machine with nothing on it; in the end nothing of it is left."""

    def command(job: Job, settings: Path, state_dir: Path) -> list[str]:
        return ["sh", "-c", SCRIPT, "sh", str(state_dir), job.name, str(settings)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rolling_shell, "OBSERVE_S", LOOK_S)
        patch.setattr(rolling_shell, "HEARD_S", LOOK_S)
        async with served_store(folder, clients=2) as (client, another):
            world = World(folder, command)
            yield Site(world, client, another)
            last: Supervisor = await world.start()  # stops all that is left
            over = life_machine.Phase.OVER
            assert await last.wait(lambda: all(slot.life.phase is over for slot in last.slots.values()), WAIT_S)
            await world.close()
