"""What each running process writes down about itself, so that anyone can find it: `STATE_DIR/run/NAME.json`.

Always true: a record is written whole or not at all; it counts only while the process that wrote it lives (pid and
start time both match, so a reused pid is never taken for it).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from holdfast.worker.procfs import read_process


class Record(msgspec.Struct, frozen=True):
    """One process, as it described itself when it was ready."""

    name: str
    role: str
    pid: int
    start_ticks: int
    address: str = ""
    status: str = ""  # where its status page is
    instance: str = ""

    @classmethod
    def of_this_process(cls, name: str, role: str, facts: dict[str, Any]) -> Record:
        pid = os.getpid()
        stat = read_process(pid)
        assert stat is not None, "a process can see itself"
        return cls(name, role, pid, stat.start_ticks, **facts)

    @property
    def alive(self) -> bool:
        stat = read_process(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"


def run_dir(state_dir: Path) -> Path:
    return state_dir / "run"


def write_record(state_dir: Path, record: Record) -> None:
    folder = run_dir(state_dir)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = folder / f".{record.name}.{record.pid}"
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.rename(folder / f"{record.name}.json")


def remove_record(state_dir: Path, name: str) -> None:
    """Take away this process's own record, not a successor's."""
    record = read_record(state_dir, name)
    if record is not None and record.pid == os.getpid():
        with contextlib.suppress(FileNotFoundError):
            (run_dir(state_dir) / f"{name}.json").unlink()


def read_record(state_dir: Path, name: str) -> Record | None:
    try:
        return msgspec.json.decode((run_dir(state_dir) / f"{name}.json").read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None


def read_records(state_dir: Path) -> list[Record]:
    """All records, dead processes' too, in a steady order."""
    names = sorted(path.stem for path in run_dir(state_dir).glob("*.json"))
    return [record for name in names if (record := read_record(state_dir, name)) is not None]
