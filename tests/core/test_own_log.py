"""A process's own log: turned over by size, and never a reason to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.log_files import log_path
from tests.rigs.small_disks import BALLAST, fill, small_disk

LINES = 400
WRITER = """
import logging, sys
from holdfast.core.log_files import OwnLog
from holdfast.core.log_files import UNWRITTEN
logging.basicConfig(level="INFO", handlers=[OwnLog("%(message)s", bytes_max=int(sys.argv[1]))])
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    logging.info("line %05d of a log", number)
open(sys.argv[4], "w").write(f"{UNWRITTEN.totals['log']} {UNWRITTEN.summary}")
"""


def write(log: Path, told: Path, bytes_max: int, first: int = 0, last: int = LINES) -> str:
    """Lines by a process whose standard error a supervisor opened; what it says of those it could not write."""
    told.touch()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        command = [sys.executable, "-c", WRITER, str(bytes_max), str(first), str(last), str(told)]
        assert subprocess.run(command, stderr=descriptor, timeout=60, check=False).returncode == 0
    finally:
        os.close(descriptor)
    return told.read_text()


def test_a_log_is_turned_over_by_size_while_its_process_runs(tmp_path: Path) -> None:
    """Two files are kept, none longer than it may be by more than a line, and no line between them is lost."""
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "worker-1a.log"
    assert write(log, tmp_path / "told", 4000) == "0 "
    kept = [path.read_text() for path in (log.with_suffix(".log.1"), log)]
    assert all(len(text) < 4100 for text in kept)
    lines = "".join(kept).splitlines()
    assert lines == [f"line {number:05d} of a log" for number in range(LINES - len(lines), LINES)]
    assert len(lines) > LINES // 4


def test_two_processes_of_one_log_turn_it_over_together(tmp_path: Path) -> None:
    """Whoever finds that another has begun a new file follows it: what it wrote to the old one stays there."""
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "vault-1.log"
    old = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    write(log, tmp_path / "told", 4000, 0, 210)
    assert log.with_suffix(".log.1").exists()
    command = [sys.executable, "-c", WRITER, "4000", "210", "220", str(tmp_path / "told")]
    subprocess.run(command, stderr=old, timeout=60, check=True)
    os.close(old)
    assert "line 00210" in log.with_suffix(".log.1").read_text()
    assert log.read_text().splitlines()[-9:] == [f"line {number:05d} of a log" for number in range(211, 220)]
    assert not list(tmp_path.glob("logs/*.1.1"))


def test_a_file_that_a_person_chose_is_not_turned_over(tmp_path: Path) -> None:
    """Standard error redirected by hand is theirs, however long it gets."""
    log = tmp_path / "mine.log"
    write(log, tmp_path / "told", 100)
    assert len(log.read_text().splitlines()) == LINES
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("mine")] == ["mine.log"]
    assert log_path() is None or log_path() != log


@pytest.mark.processes
def test_a_full_disk_costs_lines_and_no_process(tmp_path: Path) -> None:
    """Lines that do not fit are counted, with why; with room again they are written."""
    with small_disk(64 * 1024) as disk:
        (disk / "logs").mkdir()
        log = disk / "logs" / "worker-1a.log"
        log.touch()
        fill(disk)
        total, _, why = write(log, tmp_path / "told", 4000).partition(" ")
        assert (int(total), why) == (LINES, "its log cannot be written: No space left on device")
        (disk / BALLAST).unlink()
        assert write(log, tmp_path / "told", 4000) == "0 "
