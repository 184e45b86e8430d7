"""Chooses which process of a rollout is killed, and at which of its steps.

A step is a state in which something else is desired of a replica, or the rollout is in another phase; the state is
written before anything of it is done.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bench.rollouts.shapes import FRONTEND, NAME, Shape
from bench.rollouts.site import KEEPER, Site
from holdfast.rollout.machine import DesiredState, RolloutState
from holdfast.supervise.records import Record
from holdfast.supervise.replicas import replica_id_of
from holdfast.testing.waiting import until

BACK_S = 60.0


class Victim(StrEnum):
    """Names what is killed."""

    OLD = "old worker"
    NEW = "new worker"
    FRONTEND = "frontend"
    CONTROL = "control"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True)
class Hit:
    """At a step, counted from 1 when the change is asked for; or as soon after it as there is such a process."""

    victim: Victim
    step: int

    def __str__(self) -> str:
        return f"{self.victim} at step {self.step}"


def step_of(memory: RolloutState) -> tuple[object, ...]:
    """What makes a step."""
    wants = tuple(sorted((name, str(one.desired), one.counted) for name, one in memory.replicas.items()))
    return str(memory.phase), memory.target.number, wants


@dataclass(slots=True)
class Hitting:
    """Carries out one hit, or none, during one change."""

    site: Site
    shape: Shape  # that a supervisor which is killed is followed by one for
    hit: Hit | None = None
    steps: int = 0
    done: str = ""  # what was killed
    cuts: list[tuple[float, float]] = field(default_factory=list)  # from the kill of a frontend until it is back
    _last: tuple[object, ...] = ()

    async def run(self) -> None:
        """Until cancelled: memories are counted, and the one that is due is killed."""
        self._last = step_of(self.site.state)
        seen = len(self.site.memories)
        while True:
            for _, memory in self.site.memories[seen:]:
                if step_of(memory) != self._last:
                    self._last = step_of(memory)
                    self.steps += 1
            seen = len(self.site.memories)
            if self.hit is not None and not self.done and self.steps >= self.hit.step:
                await self._strike(self.hit.victim)
            await asyncio.sleep(0.01)

    async def _strike(self, victim: Victim) -> None:
        if victim is Victim.SUPERVISOR:
            self.site.kill_keeper()
            self.done = KEEPER
            self.site.keep(self.shape)
            return
        record = await self._find(victim)
        if record is None:
            return
        self.site.kill(record)
        self.done = record.name
        if victim is Victim.FRONTEND:
            await self._frontend_back(record)

    async def _frontend_back(self, dead: Record) -> None:
        """Its streams end with it, and new requests may be refused meanwhile. One is back when it knows all workers."""
        began_s = time.monotonic()

        async def back() -> bool:
            pages = await self.site.frontends()
            ready = [page for page in pages.values() if page["status"] == "ready"]
            is_gone = all(record.pid != dead.pid for record in self.site.records_alive("frontend"))
            return is_gone and bool(ready) and all(map(self._knows_all, ready))

        try:
            await until(back, "a frontend that serves", BACK_S)
        finally:  # the rollout may be over before
            self.cuts.append((began_s, time.monotonic()))

    def _knows_all(self, page: dict[str, Any]) -> bool:
        """Whether a frontend would send requests to every worker that counts."""
        memory = self.site.state
        active = {replica_id_of(one["name"], NAME, memory.target.parts) for one in page["workers"] if one["active"]}
        known = {one.name for one in active if one is not None}
        serving = {name for name, one in memory.replicas.items() if one.counted and one.desired is DesiredState.SERVE}
        return all(memory.replicas[name].service == FRONTEND for name in serving - known)

    async def _find(self, victim: Victim) -> Record | None:
        """Return the record of a process to kill; of workers, one that serves, if there is one."""
        if victim in (Victim.FRONTEND, Victim.CONTROL):
            return next(iter(self.site.records_alive(str(victim))), None)
        memory, found = self.site.state, []
        for record in self.site.records_alive("worker"):
            replica = self.site.replica(record)
            known = memory.replicas.get(replica.name) if replica is not None else None
            if replica is None or known is None or known.desired is DesiredState.STOP:
                continue
            part = memory.target.parts.get(replica.service)
            is_new = part is not None and part.set_id == replica.set_id
            if is_new == (victim is Victim.NEW):
                found.append(record)
        leading = [record for record in found if await self.site.leads(record)]
        return next(iter(leading or found), None)
