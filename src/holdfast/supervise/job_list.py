"""Adds and removes jobs while their supervisor runs.

A supervisor is made with the jobs that it begins with; here others are added and removed, a replica at a time. What
each is started with is on disk, and that is the list of a machine's jobs: after a supervisor was killed, the next one
reads it (`kept_jobs`) and continues.

Always true: a job that is there is not started again; memory is there before its engines and goes after them; a job
that should leave is marked on disk before it is told, so that no supervisor takes it for one that should run; a job
that was told to leave and has ended is forgotten, here and on disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from holdfast.spec.jobs import AT_LEISURE, START_ORDER, STOP_ORDER, Job
from holdfast.spec.launch import ROLES
from holdfast.supervise import machine
from holdfast.supervise.loop import PEERS_WAIT_S, Supervisor
from holdfast.supervise.machine import KERNEL_S, Phase
from holdfast.supervise.records import mark_leaving, read_kept
from holdfast.supervise.slots import Slot


def kept_jobs(state_dir: Path) -> list[Job]:
    """Return what an earlier supervisor kept running here."""
    jobs = []
    for record, settings in read_kept(state_dir):
        try:
            job = Job.of(msgspec.json.decode(settings, type=ROLES[record.role]))
        except (KeyError, msgspec.DecodeError, ValueError):
            # Of a version that knows more: kept as it is.
            job = Job(record.name, record.role, deployment=_whose(settings))
        jobs.append(replace(job, settings=settings))
    return jobs


class _Owned(msgspec.Struct):
    deployment: str = ""


def _whose(settings: bytes) -> str:
    """Return the deployment of a job that cannot be read otherwise; "": of none."""
    try:
        return msgspec.json.decode(settings, type=_Owned).deployment
    except (msgspec.DecodeError, ValueError):
        return ""


class JobList:
    """The jobs of one supervisor, as they change."""

    def __init__(self, supervisor: Supervisor, state_dir: Path) -> None:
        self._supervisor = supervisor
        self.state_dir = state_dir

    def enter(self, jobs: Sequence[Job]) -> None:
        """List jobs, as others see them; `add` starts them."""
        slots = self._supervisor.slots
        slots.update({job.name: Slot.of(job) for job in jobs if job.name not in slots})

    async def add(self, jobs: Sequence[Job]) -> None:
        """Start those that were not started yet. Does not wait until they are ready, except for those that others
        need."""
        self.enter(jobs)
        names = {job.name for job in jobs}
        for roles in (*START_ORDER, AT_LEISURE):
            group = [slot for slot in self._supervisor.of(roles) if slot.job.name in names]
            for slot in group:
                if slot.life.phase is Phase.IDLE:
                    self._supervisor.step(slot, machine.Start())
            if roles == START_ORDER[0]:
                await self._supervisor.wait(partial(_are_past, Phase.STARTING, group), PEERS_WAIT_S)

    async def remove(self, names: Collection[str]) -> bool:
        """Stop them and forget them; False if one does not end. Asked again, it goes on where it was."""
        slots = self._supervisor.slots
        leaving = [slots[name] for name in names if name in slots]
        for slot in leaving:
            with contextlib.suppress(OSError):  # a full disk: the next may take it for a job until told
                mark_leaving(self.state_dir, slot.job.name)
        for roles in STOP_ORDER:
            group = [slot for slot in self._supervisor.of(roles) if slot.job.name in names]
            for slot in group:
                self._supervisor.step(slot, machine.Stop(slot.job.stop_bound_s))
            bound_s = max((slot.job.stop_bound_s for slot in group), default=0.0) + KERNEL_S
            if not await self._supervisor.wait(partial(_are_over, group), bound_s):
                return False
        for slot in leaving:
            if slots.get(slot.job.name) is slot:
                del slots[slot.job.name]
        return True


def _are_past(phase: Phase, slots: Sequence[Slot]) -> bool:
    return all(slot.life.phase is not phase for slot in slots)


def _are_over(slots: Sequence[Slot]) -> bool:
    return all(slot.life.phase is Phase.OVER for slot in slots)
