"""Processes that a job starts and looks after itself, such as a vault's server and keeper: not the supervisor's to
start again, but its to write down when one ends alone.

Always true: an end counts only while the job it belongs to lives and was not asked to leave: one that takes its parts
along is an incident of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from holdfast.core.procfs import is_ending
from holdfast.spec.jobs import Job
from holdfast.supervise.machine import Fell, Phase
from holdfast.supervise.notes import Slot
from holdfast.supervise.processes import Processes, exit_words
from holdfast.supervise.records import read_records
from holdfast.supervise.witness import Witness

LOOK_S = 1.0  # between two looks for new ones
MISSED_LOOK_S = 0.1  # while one is missed: its peer has another within a second


class Parts:
    """Holds every part of the jobs in `whole`, by its pidfd, from the first look at its record on."""

    def __init__(self, state_dir: Path, processes: Processes, whole: Mapping[str, Slot], witness: Witness) -> None:
        self._state_dir = state_dir
        self._processes = processes
        self._whole = whole
        self._witness = witness
        self._held: dict[str, int] = {}  # pids by name; 0: it ended, and there is no other yet

    async def run(self) -> None:
        """For ever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S if all(self._held.values()) else MISSED_LOOK_S)

    def look(self) -> None:
        """Hold who is new."""
        for record in read_records(self._state_dir):
            if record.part_of not in self._whole or self._held.get(record.name):
                continue  # not ours, or held: one that follows is new once the end of the one before was heard
            if record.name in self._whole:
                continue  # left behind by a job that is gone, and being stopped
            if (process := self._processes.adopt(record)) is None:
                continue
            slot = Slot.of(Job(record.name, record.role))
            slot.record = record
            self._held[record.name] = record.pid
            process.on_exit(partial(self._gone, slot, record.pid, record.part_of))
            self._witness.back(slot)

    def _gone(self, slot: Slot, pid: int, part_of: str, status: int | None) -> None:
        if self._held.get(slot.job.name) == pid:
            self._held[slot.job.name] = 0
        whole = self._whole[part_of].life
        if whole.phase in (Phase.STARTING, Phase.READY) and is_ending(whole.pid) is False:
            self._witness.fell(slot, Fell(pid, exit_words(status, ""), was_ready=True))
