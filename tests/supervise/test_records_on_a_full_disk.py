"""Records, launches and logs where not a byte is left: what is known is written over what stood there."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.core.log_files import UNWRITTEN
from holdfast.core.ports import SystemClock
from holdfast.spec.jobs import Job
from holdfast.supervise.lock import Holder, holder, sign, take_lock
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import (
    Record,
    read_launch,
    read_record,
    run_dir,
    set_aside,
    write_first_record,
    write_launch,
    write_record,
)
from holdfast.testing.waiting import BOUND_S
from tests.rigs.small_disks import BALLAST, fill, small_disk

NEW_FILE = OSError  # what a first record, a first launch raises: their writers decide what that means


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(64 * 1024) as folder:
        yield folder


def record(state: str) -> Record:
    return Record.of_process(os.getpid(), "a", "worker", state=state)


def test_a_record_is_written_over_the_one_before(disk: Path) -> None:
    """A process that is set aside leaves its room to the next one's first record, and that to its own."""
    write_record(disk, record("ready"))
    write_launch(disk, "a", b"settings")
    fill(disk)
    set_aside(disk, "a", os.getpid())
    assert read_record(disk, "a") is None
    fill(disk)
    assert write_launch(disk, "a", b"settings").exists()
    write_first_record(disk, record("starting"))
    fill(disk)
    assert read_record(disk, "a") == record("starting")
    write_record(disk, record("ready"))
    assert read_record(disk, "a") == record("ready")
    assert sorted(path.name for path in run_dir(disk).iterdir()) == ["a.json", "a.launch"]


def test_what_cannot_be_written_leaves_nothing_behind(disk: Path) -> None:
    """Neither an empty record nor half a launch is there for others to read."""
    run_dir(disk).mkdir()
    fill(disk)
    for write in (
        lambda: write_record(disk, record("ready")),
        lambda: write_first_record(disk, record("ready")),
        lambda: write_launch(disk, "a", b"settings"),
    ):
        with pytest.raises(NEW_FILE):
            write()
    assert (read_record(disk, "a"), read_launch(disk, "a")) == (None, None)
    assert list(run_dir(disk).iterdir()) == []


def test_who_supervises_can_be_said_again(disk: Path) -> None:
    """The signature has its room from the first on; without any the lock is held all the same."""
    lock = take_lock(disk)
    assert lock is not None
    sign(lock, Holder(1, detached=True))
    fill(disk)
    sign(lock, Holder(1, detached=True, up=True))
    assert holder(disk) == Holder(1, detached=True, up=True)
    os.close(lock)
    (disk / "up.lock").unlink()
    fill(disk)
    unsigned = take_lock(disk)
    assert unsigned is not None
    sign(unsigned, Holder(2))
    assert holder(disk) == Holder(0)
    os.close(unsigned)


async def test_a_supervisor_starts_and_restarts_without_room(disk: Path) -> None:
    """A process is started, seen to end and started again, its records missed and told once; a log that cannot be made
    is done without."""
    told: list[str] = []
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    job = Job("a", "worker", settings=b"settings")
    write_launch(disk, "a", job.settings)
    logs = LocalProcesses(disk / "file" / "logs")
    supervisor = Supervisor(disk, [job], logs, lambda job, path: command, tell=told.append, clock=SystemClock())
    (disk / "file").touch()  # where a folder should be: no log can be opened
    fill(disk)
    before = UNWRITTEN.totals["log"]
    await supervisor.start()
    slot = supervisor.slots["a"]
    first = slot.life.pid
    assert first
    assert slot.process is not None
    slot.process.kill()
    async with asyncio.timeout(BOUND_S):
        while slot.life.pid in (0, first):
            await asyncio.sleep(0.01)
    supervisor.kill()
    async with asyncio.timeout(BOUND_S):
        while slot.process is not None:
            await asyncio.sleep(0.01)
    assert UNWRITTEN.totals["log"] >= before + 2
    assert len([line for line in told if "its record cannot be written" in line]) == 1, told
    (disk / BALLAST).unlink()
    write_record(disk, msgspec.structs.replace(record("ready"), name="b"))
    assert read_record(disk, "b") is not None
