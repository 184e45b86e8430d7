"""Parts of a job, such as a vault's keeper: their ends are written down, and that another came."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from holdfast.spec.jobs import Job
from holdfast.supervise.jobs import Slot
from holdfast.supervise.machine import Life, Phase
from holdfast.supervise.parts import Parts
from holdfast.supervise.processes import Processes
from holdfast.supervise.records import Record, write_record
from holdfast.supervise.witness import Witness
from manual_clock import ManualClock


class Held:
    """Processes that end when the test says so."""

    def __init__(self) -> None:
        self.ends: dict[int, Callable[[int | None], None]] = {}

    def adopt(self, record: Record) -> Any:
        held, pid = self, record.pid

        class Process:
            def on_exit(self, tell: Callable[[int | None], None]) -> None:
                held.ends[pid] = tell

        return Process()


def test_one_whose_successor_is_seen_first_is_back_all_the_same(tmp_path: Path) -> None:
    """A supervisor that was stopped meanwhile finds the new keeper's record before it hears of the old one's end."""
    held, witness = Held(), Witness(tmp_path, ManualClock(50.0))
    whole = Slot.of(Job("vault-1", "vault"))
    whole.life = Life(Phase.READY, os.getpid())
    parts = Parts(tmp_path, cast(Processes, held), {"vault-1": whole}, witness)
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["sleep", "60"]) as second:
        try:
            for keeper in (first, second):
                keeper_record = Record.of_process(keeper.pid, "vault-1-keeper", "keeper", part_of="vault-1")
                write_record(tmp_path, keeper_record)
                parts.look()
            held.ends[first.pid](None)
            parts.look()
        finally:
            first.kill()
            second.kill()
    (incident,) = witness.incidents.values()
    assert (incident.name, incident.pid, incident.back_after_s) == ("vault-1-keeper", first.pid, 0.0)
