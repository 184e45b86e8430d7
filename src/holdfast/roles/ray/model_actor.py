"""A replica on Ray: one actor, and in it the supervisor of the replica's own processes.

Ray knows the actor and what it takes of its node. Its vaults and engines are children of the actor's process, tied to
it: when it dies, they do. So what Ray takes for free is free.

Always true: an actor is asked to begin by its agent, or by the next one, and begins once; requests never pass through
it, engines are found in the store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.core.log_files import say
from holdfast.core.ports import SystemClock
from holdfast.core.tasks import Tasks
from holdfast.roles.running import child_command, log_dir
from holdfast.roles.tied import die_with
from holdfast.spec.jobs import Job
from holdfast.supervise.job_list import JobList
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Life
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import Record, remove_record, write_record
from holdfast.supervise.watching import Watching
from holdfast.wire.net import SocketNetwork

# Which GPUs a replica is on, and how many threads it has, its launch says.
RAYS_OWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")


ROLE = "actor"  # of its record


def record_name(replica: str) -> str:
    """How its own process is written down beside those it keeps."""
    return replica.replace(":", "-")


def replica_of(record: str) -> str:
    """Whose record it is: the first dash and the last stand for colons."""
    kind, _, rest = record.partition("-")
    return f"{kind}:{':'.join(rest.rsplit('-', 1))}"


class ModelActor:
    """Keeps a replica's processes. Its class and its name are what `ray list actors` shows."""

    def __init__(self, replica: str, state_dir: str, jobs: Sequence[Job], environ: Mapping[str, str]) -> None:
        die_with(os.getppid())  # its raylet: a node that Ray calls dead has nothing left of it
        self._replica = replica
        self._state_dir = Path(state_dir)
        self._jobs = list(jobs)
        self._environ = dict(environ)
        self._supervisor: Supervisor | None = None
        self._tasks = Tasks(replica)
        self._over: asyncio.Event | None = None
        self._record = Record.of_process(os.getpid(), record_name(replica), ROLE)

    async def begin(self) -> tuple[Record, list[Job]]:
        """Start its processes, unless they were; which process this is, and whom it keeps."""
        if self._supervisor is None:
            write_record(self._state_dir, self._record)  # before there is anything that could be left behind
            self._over = asyncio.Event()
            processes = LocalProcesses(log_dir(self._state_dir), _without_rays(self._environ))
            command = child_command(os.getpid())
            apart, clock = self._record.name, SystemClock()
            self._supervisor = Supervisor(
                self._state_dir, (), processes, command, tell=self._tell, clock=clock, apart=apart
            )
            self._tasks.spawn(Watching(self._supervisor, SocketNetwork()).run(), "watching")
            self._tasks.spawn(JobList(self._supervisor, self._state_dir).add(self._jobs), "start")
        return self._record, self._jobs

    async def look(self) -> dict[str, Life]:
        """Its processes' lives, by name."""
        assert self._supervisor is not None, "it has begun"
        return {name: slot.life for name, slot in self._supervisor.slots.items()}

    async def over(self) -> None:
        """Returns when it was stopped."""
        assert self._over is not None, "it has begun"
        await self._over.wait()  # unbounded on purpose: its death ends it

    async def stop(self) -> None:
        """End its processes, memory last."""
        await self._tasks.stop()
        if self._supervisor is not None:
            await self._supervisor.stop()
        remove_record(self._state_dir, self._record.name)
        if self._over is not None:
            self._over.set()

    def _tell(self, line: str) -> None:
        say(f"{self._replica}: {line}")


def _without_rays(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of Ray's worker without what Ray put there, and with the deployment's own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name not in RAYS_OWN}
    return own | dict(more)
