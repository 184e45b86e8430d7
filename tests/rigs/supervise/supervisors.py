"""A state directory and supervisors in it, over tiny processes that are made for a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.ports import SystemClock
from holdfast.spec.jobs import Job
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.processes import LocalProcess, LocalProcesses
from holdfast.supervise.watching import Watching
from holdfast.testing.waiting import BOUND_S
from holdfast.wire.net import SocketNetwork

# A shell script is ready once it has replaced "starting" in its own record.
BECOME_READY = 'f="$1/run/$2.json"; while ! [ -e "$f" ]; do sleep 0.01; done; sed -i s/starting/ready/ "$f"; '
SERVE = BECOME_READY + "exec sleep 1000"


def job(name: str, script: str = SERVE, role: str = "worker", stop_bound_s: float = BOUND_S) -> Job:
    return Job(name, role, script.encode(), stop_bound_s)


class World:
    """`command`: what a job's process is started with, from the job, its settings' path and the state directory."""

    def __init__(self, state_dir: Path, command: Callable[[Job, Path, Path], Sequence[str]]) -> None:
        self.state_dir = state_dir
        self.told: list[str] = []
        self.processes = LocalProcesses(state_dir / "logs")
        self._command = command
        self._made: list[Supervisor] = []
        self._watches: dict[Supervisor, asyncio.Task[None]] = {}

    def supervisor(self, *jobs: Job) -> Supervisor:
        def command(job: Job, settings: Path) -> Sequence[str]:
            return self._command(job, settings, self.state_dir)

        told: dict[str, Any] = {"tell": self.told.append, "clock": SystemClock()}
        made = Supervisor(self.state_dir, jobs, self.processes, command, **told)
        self._made.append(made)
        return made

    async def start(self, *jobs: Job, watched: bool = False) -> Supervisor:
        made = self.supervisor(*jobs)
        if watched:
            self.watching = Watching(made, SocketNetwork())
            self._watches[made] = asyncio.create_task(self.watching.run())
        await made.start()
        return made

    async def up(self, *jobs: Job, watched: bool = False) -> Supervisor:
        made = await self.start(*jobs, watched=watched)
        assert await made.wait(made.all_ready, BOUND_S), self.told
        return made

    def lose(self, supervisor: Supervisor) -> None:
        """As if it had been killed: it hears of nothing any more."""
        self._made.remove(supervisor)
        if watch := self._watches.pop(supervisor, None):
            watch.cancel()
        for slot in supervisor.slots.values():
            if slot.timer is not None:
                slot.timer.cancel()
            if slot.process is not None:
                assert isinstance(slot.process, LocalProcess)
                asyncio.get_running_loop().remove_reader(slot.process.pidfd)

    async def close(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        for supervisor in self._made:
            supervisor.kill()
            await supervisor.stop()
