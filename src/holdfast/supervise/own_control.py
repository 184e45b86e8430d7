"""The supervisor's own control: it runs whenever the manifest's revision has no planner, so that a control always runs.

Always true: the own control is started as soon as the revision worked at has no planner replica, while an old planner
still runs; it is stopped only when a planner's process is ready. Of two controls that run at once the store's lock lets
one lead.
"""

from __future__ import annotations

import asyncio

from holdfast.core.tasks import Tasks
from holdfast.rollout.revision import Revision
from holdfast.spec.jobs import Job
from holdfast.spec.manifest.types import PLANNER
from holdfast.supervise.job_list import JobList
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Phase
from holdfast.supervise.replicas import Sets


def has_planner(revision: Revision, sets: Sets) -> bool:
    """Return whether the revision asks for a planner of its own."""
    asked = [(service, part.set_id) for service, part in revision.parts.items() if part.replicas]
    return any(key in sets and sets[key].component_type == PLANNER for key in asked)


class OwnControl:
    """One control process, which comes and goes with the need for it."""

    def __init__(self, job: Job, supervisor: Supervisor, job_list: JobList) -> None:
        self.job = job
        self._supervisor = supervisor
        self._jobs = job_list
        self._change: asyncio.Task[None] | None = None

    def keep(self, tasks: Tasks, *, planned: bool) -> None:
        """Begin to start or to stop the process, as the revision needs it; `planned`: it has a planner."""
        name, slots = self.job.name, self._supervisor.slots
        if self._change is not None and not self._change.done():
            return
        if not planned and name not in slots:
            self._change = tasks.spawn(self._jobs.add([self.job]), f"start {name}")
        elif planned and name in slots and self._is_replaced():
            self._change = tasks.spawn(self.stop(), f"stop {name}")

    async def stop(self) -> None:
        """Stop the process and remove its records."""
        await self._jobs.remove([self.job.name])

    def _is_replaced(self) -> bool:
        others = [slot for slot in self._supervisor.slots.values() if slot.job.name != self.job.name]
        return any(slot.job.role == "control" and slot.life.phase is Phase.READY for slot in others)
