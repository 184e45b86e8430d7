"""What each running process writes down about itself, so that anyone can find it: `STATE_DIR/run/NAME.json`.

Beside it the supervisor keeps what the process was started with (`NAME.launch`, readable by its owner only: there are
keys in it), and writes the record itself while there is no process that could: one just started, one backing off.

Always true: a record is written whole or not at all, but for a full disk, where it is written over the old one; it
counts only while the process that wrote it lives (pid and start time both match, so a reused pid is never taken for
it).
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.procfs import read_process

LEAVING = "leaving"  # the supervisor writes it as the state of one that was told to leave for good


class Record(msgspec.Struct, frozen=True):
    """One process, as it described itself when it was ready."""

    name: str
    role: str
    pid: int
    start_ticks: int
    address: str = ""
    status: str = ""  # where its status page is
    instance: str = ""
    state: str = "ready"  # the supervisor writes "starting", "backing off", "crash loop", "refused", "unkillable"
    note: str = ""
    failures: int = 0  # in a row, before this life
    retry_s: float = 0.0  # when the next try is, by this machine's monotonic clock; 0: there is none to come
    deployment: str = ""  # whose it is; empty: it has not said so
    part_of: str = ""  # the process that started it and looks after it: a vault's keeper is no job of a supervisor's

    @classmethod
    def of_process(cls, pid: int, name: str, role: str, **facts: Any) -> Record:
        stat = read_process(pid)
        assert stat is not None, "a process can see itself and its children"
        return cls(name, role, pid, stat.start_ticks, **facts)

    @property
    def alive(self) -> bool:
        stat = read_process(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"


def run_dir(state_dir: Path) -> Path:
    return state_dir / "run"


def journals_dir(state_dir: Path, group: str) -> Path:
    """Where the engines of a group write down when they led (`failover.journal`)."""
    return run_dir(state_dir) / "journals" / group


def write_record(state_dir: Path, record: Record) -> None:
    path, data = _record_path(state_dir, record.name), msgspec.json.encode(record)
    try:
        write_whole(path, data)
    except OSError:
        if not path.exists():
            _aside_path(state_dir, record.name).rename(path)
        _write_over(path, data)


def write_first_record(state_dir: Path, record: Record) -> None:
    """Write it unless there is one: the process itself may have been quicker, and knows more."""
    path, aside = _record_path(state_dir, record.name), _aside_path(state_dir, record.name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        _write_over(aside, msgspec.json.encode(record), os.O_CREAT)
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_parts(state_dir: Path, name: str, pids: dict[str, int]) -> None:
    """What a process runs of its own, by role, so that it is shown, and found if it is ever left behind."""
    for role, pid in pids.items():
        stat = read_process(pid)
        if stat is None:
            continue
        part = Record(f"{name}-{role}", role, pid, stat.start_ticks, part_of=name)
        with contextlib.suppress(OSError):  # a full disk must not end memory that serves
            write_record(state_dir, part)


def forget_parts(state_dir: Path, name: str) -> None:
    """All of them have ended."""
    for record in read_records(state_dir):
        if record.part_of == name:
            forget(state_dir, record.name)


def set_aside(state_dir: Path, name: str, pid: int | None = None) -> None:
    """No process of this name lives, or that one does not: its record counts no more. The room it has on the disk is
    kept for the next one's."""
    record = read_record(state_dir, name)
    if pid is None or (record is not None and record.pid == pid):
        with contextlib.suppress(FileNotFoundError):
            _record_path(state_dir, name).rename(_aside_path(state_dir, name))


def remove_record(state_dir: Path, name: str) -> None:
    """Take away this process's own record, not a successor's."""
    record = read_record(state_dir, name)
    if record is not None and record.pid == os.getpid():
        _record_path(state_dir, name).unlink(missing_ok=True)


def is_written(state_dir: Path, name: str) -> bool:
    """Whether there are both a record and a launch of this name."""
    return _record_path(state_dir, name).exists() and launch_path(state_dir, name).exists()


def read_record(state_dir: Path, name: str) -> Record | None:
    return _read(_record_path(state_dir, name))


def _read(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None


def read_records(state_dir: Path) -> list[Record]:
    """All records, dead processes' too, in a steady order."""
    names = sorted(path.stem for path in run_dir(state_dir).glob("*.json"))
    return [record for name in names if (record := read_record(state_dir, name)) is not None]


def launch_path(state_dir: Path, name: str) -> Path:
    return run_dir(state_dir) / f"{name}.launch"


def write_launch(state_dir: Path, name: str, settings: bytes) -> Path:
    """Write down what a process is started with; where. A second start needs no room on the disk."""
    path = launch_path(state_dir, name)
    if read_launch(state_dir, name) != settings:
        write_whole(path, settings)
    return path


def read_launch(state_dir: Path, name: str) -> bytes | None:
    try:
        return launch_path(state_dir, name).read_bytes()
    except OSError:
        return None


def mark_leaving(state_dir: Path, name: str) -> None:
    """A supervised process is to leave for good: whoever supervises it next does not take it for a job."""
    record = read_record(state_dir, name)
    if record is not None:
        write_record(state_dir, msgspec.structs.replace(record, state=LEAVING))


def read_kept(state_dir: Path) -> list[tuple[Record, bytes]]:
    """What a supervisor kept running, dead or alive, but for what was to leave: the last record of each, and what each
    was started with."""
    kept = []
    for path in sorted(run_dir(state_dir).glob("*.launch")):
        name = path.stem
        record = read_record(state_dir, name) or _read(_aside_path(state_dir, name))
        settings = read_launch(state_dir, name)
        if record is not None and settings is not None and record.state != LEAVING:
            kept.append((record, settings))
    return kept


def forget(state_dir: Path, name: str) -> None:
    """A supervised process is over for good."""
    for path in (_record_path(state_dir, name), _aside_path(state_dir, name), launch_path(state_dir, name)):
        path.unlink(missing_ok=True)


def _record_path(state_dir: Path, name: str) -> Path:
    return run_dir(state_dir) / f"{name}.json"


def _aside_path(state_dir: Path, name: str) -> Path:
    return run_dir(state_dir) / f".{name}.aside"


def write_whole(path: Path, data: bytes) -> None:
    """So that a reader sees the old content or the new, never half of one; OSError leaves the old."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _write_over(path: Path, data: bytes, flags: int = 0) -> None:
    """Into the room that the old content has, where there is none for a new file. Who reads it half-way finds nothing,
    and looks again."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        if os.pwrite(descriptor, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)
