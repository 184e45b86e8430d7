"""What should run: jobs, the order they come and go in, and the place each has in a supervisor."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from holdfast.supervise.machine import Life, Policy, Restart
from holdfast.supervise.probes import Asked, Probes
from holdfast.supervise.processes import Process
from holdfast.supervise.records import Record

# Who is there before the others start: a worker needs its vault's memory, and everyone asks the store.
START_ORDER = (("store", "vault"), ("worker", "frontend"))
# Who leaves first has no peer left to break a stream of; memory outlives its engines, and the store goes last.
STOP_ORDER = (("frontend",), ("worker",), ("vault", "server", "keeper"), ("store",))


@dataclass(frozen=True, slots=True)
class Job:
    """One process that should run."""

    name: str
    role: str
    settings: bytes = b""  # what it is started with; two jobs with equal settings are the same
    stop_bound_s: float = 5.0  # SIGTERM to SIGKILL
    probes: Probes | None = None  # None: it is never asked, and may take as long as it likes to start
    restart: str = Restart.ALWAYS
    beat_address: str = ""  # where its beats are heard; empty: it has none
    group: str = ""  # of engines that take over from each other; empty: it is in none

    def policy(self) -> Policy:
        return Policy(self.restart, None if self.probes is None else self.probes.startup_s)


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
        return cls(job, Life(policy=job.policy()))

    def __repr__(self) -> str:
        return f"<{self.job.name} {self.life}, pid {self.life.pid}, {self.asked}>"
