"""The place that each job has in a supervisor."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from holdfast.spec.jobs import Job
from holdfast.supervise.machine import Life
from holdfast.supervise.probes import Asked
from holdfast.supervise.processes import Process
from holdfast.supervise.records import Record


@dataclass(slots=True)
class Slot:
    """A job, its life, and its process while there is one."""

    job: Job
    life: Life = field(default_factory=Life)
    process: Process | None = None
    timer: asyncio.TimerHandle | None = None
    asked: Asked = field(default_factory=Asked)  # what its present process answered so far
    record: Record | None = None  # what its last process that was ready wrote of itself

    @classmethod
    def of(cls, job: Job) -> Slot:
        return cls(job, Life(startup_s=None if job.probes is None else job.probes.startup_s))

    def __repr__(self) -> str:
        return f"<{self.job.name} {self.life}, pid {self.life.pid}, {self.asked}>"
