"""What a supervisor remembers of its processes, and what of it it writes down, for `ps` and the supervisor after it.

Always true: a record that cannot be written (a full disk) is missed, told once, and never a reason to end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.core.procfs import read_process
from holdfast.spec.jobs import Job
from holdfast.supervise.machine import Asked, Life, Phase
from holdfast.supervise.processes import Process
from holdfast.supervise.records import (
    Record,
    forget,
    is_written,
    read_record,
    write_first_record,
    write_launch,
    write_record,
)


@dataclass(slots=True)
class Slot:
    """The place that each job has in a supervisor: its life, and its process while there is one."""

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


class SlotRecords:
    """`tell` is for people."""

    def __init__(self, state_dir: Path, tell: Callable[[str], None]) -> None:
        self._state_dir = state_dir
        self._tell = tell
        self._missed = False  # the last one, which was told

    def started(self, record: Record) -> None:
        self._write(write_first_record, record)

    def stands(self, slot: Slot) -> None:
        """What no process can say of itself: that it is gone for good, why it waits, or that it does not end."""
        job, now = slot.job, slot.life
        if now.phase is Phase.OVER:
            forget(self._state_dir, job.name)
        elif now.phase in (Phase.BACKING_OFF, Phase.CRASH_LOOP, Phase.REFUSED):
            retry_s = now.deadline_s or 0.0
            waits = Record(job.name, job.role, 0, 0, "", "", "", str(now.phase), now.note, now.failures, retry_s)
            self._write(write_record, waits)
        elif now.phase is Phase.UNKILLABLE:
            self._does_not_end(slot)

    def put_back(self, slot: Slot) -> None:
        """Write again what was removed: how others find its process, and what that was started with."""
        job, now = slot.job, slot.life
        if now.phase in (Phase.IDLE, Phase.STOPPING, Phase.OVER) or is_written(self._state_dir, job.name):
            return
        with contextlib.suppress(OSError):  # told of the record, which is written to the same place
            if job.settings:
                write_launch(self._state_dir, job.name, job.settings)
        self.stands(slot)
        if slot.process is None or read_process(now.pid) is None:
            return
        known = slot.record if slot.record is not None and slot.record.pid == now.pid else None
        self.started(known or Record.of_process(now.pid, job.name, job.role, state="starting", failures=now.failures))

    def _does_not_end(self, slot: Slot) -> None:
        stat, found = read_process(slot.life.pid), read_record(self._state_dir, slot.job.name)
        if stat is None or found is None or found.pid != slot.life.pid:
            return  # it has just ended, or says nothing of itself; its end is an event of the loop
        note = f"{slot.life.note} (state {stat.state})"
        self._write(write_record, msgspec.structs.replace(found, state=str(slot.life.phase), note=note))

    def _write(self, write: Callable[[Path, Record], None], record: Record) -> None:
        try:
            write(self._state_dir, record)
        except OSError as error:
            if not self._missed:
                self._tell(f"{record.name}: its record cannot be written: {error}")
            self._missed = True
        else:
            self._missed = False
