"""What keeps the processes of a node's replicas, behind one small port, and this machine's own supervisor as one.

An agent (`hosting`) decides which replicas are here; whoever keeps their processes finds them, starts them, ends them,
and says what they may have of each device. Names and settings of the processes say which replica each is of.

Always true: a replica that was entered is found until it was removed and nothing of it is left, whether it was started
yet or not; who is found after an agent was killed is found by the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.fleet.actions import replica_name
from holdfast.spec.jobs import Job
from holdfast.supervise.job_list import JobList
from holdfast.supervise.leftovers import sweep
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Life, Phase
from holdfast.supervise.replicas import ReplicaId, replica_id_of


@dataclass(frozen=True, slots=True)
class Kept:
    """A replica's processes: the job and the life of each, by name."""

    whom: ReplicaId
    processes: dict[str, tuple[Job, Life]] = field(default_factory=dict)

    @property
    def serial(self) -> int:
        return int(self.whom.name.rpartition("-")[2])

    @property
    def name(self) -> str:
        return replica_name(self.whom.service, self.serial)


class NodeBackend(Protocol):
    """Where a node's replicas are kept. All but `start` and `remove` answers at once."""

    @property
    def totals(self) -> Mapping[str, int]:
        """What replicas may have together of each device, in bytes; of the host's memory under `HOST`."""

    def kept(self) -> Mapping[str, Kept]:
        """Every replica that has processes here, by its name; those that end for good are not."""

    def jobs(self) -> Iterable[Job]:
        """All whose sockets and devices are taken."""

    def enter(self, replica: str, jobs: Sequence[Job]) -> None:
        """It is there from now on, as others see it; `start` starts it."""

    async def start(self, replica: str, jobs: Sequence[Job]) -> None:
        """Start its processes, memory first. Does not wait until it serves."""

    async def remove(self, replica: str) -> None:
        """End its processes, memory last, and forget it. Asked again, it goes on where it was."""

    async def seat(self, replica: str) -> None:
        """It comes back from host memory: count it among those on its devices. Refused says why it cannot be."""

    async def unseat(self, replica: str) -> None:
        """It is in host memory, and its devices are others'. Asked again, nothing happens."""


def kept_of(deployment: str, lives: Iterable[tuple[Job, Life]]) -> dict[str, Kept]:
    """Whose these processes are, by the replicas' names; what is of no replica of this deployment, or over, is left
    out."""
    found: dict[str, Kept] = {}
    for job, life in lives:
        whom = replica_id_of(job.name, deployment, ()) if job.deployment == deployment else None
        if whom is not None and life.phase is not Phase.OVER:
            one = Kept(whom)
            found.setdefault(one.name, one).processes[job.name] = (job, life)
    return found


class LocalBackend:
    """Processes of this machine, which the supervisor of `holdfast up` keeps beside its own."""

    def __init__(
        self, deployment: str, supervisor: Supervisor, changing: JobList, totals: Mapping[str, int]
    ) -> None:
        """Of what an earlier supervisor left, too, nothing stays that is of no use."""
        self.totals = dict(totals)
        self._deployment = deployment
        self._supervisor = supervisor
        self._changing = changing
        self._sweep()

    def kept(self) -> dict[str, Kept]:
        return kept_of(self._deployment, ((slot.job, slot.life) for slot in self._supervisor.slots.values()))

    def jobs(self) -> list[Job]:
        return [slot.job for slot in self._supervisor.slots.values()]

    def enter(self, replica: str, jobs: Sequence[Job]) -> None:
        self._changing.enter(jobs)

    async def start(self, replica: str, jobs: Sequence[Job]) -> None:
        await self._changing.add(jobs)

    async def remove(self, replica: str) -> None:
        found = self.kept().get(replica)
        if found is not None:
            await self._changing.remove(list(found.processes))
            self._sweep()

    async def seat(self, replica: str) -> None:
        """What vaults have is all that is counted here."""

    async def unseat(self, replica: str) -> None:
        """Nor this."""

    def _sweep(self) -> None:
        sweep(self._changing.state_dir, self._deployment, self._supervisor.slots)
