"""Stand-ins for what tells of GPUs' faults: a pipe for the kernel's log, and a libnvidia-ml of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
FIRST, SECOND = "0000:3b:00", "0000:5e:00"  # its GPUs


class FakeNvml:
    """Lies in a folder; `environment` is for the process that loads it."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler here, for a libnvidia-ml to stand in")
        self.folder = folder
        self.library = folder / "libfake-nvml.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", self.library, SOURCE], check=True, timeout=60)
        os.mkfifo(folder / "events")
        self._events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)

    def xid(self, gpu: int, number: int) -> None:
        os.write(self._events, f"{gpu} {number}\n".encode())

    def asks(self, gpu: int, action: int) -> None:
        """What the driver asks for from now on; below 0: an error."""
        part = self.folder / "action.part"
        part.write_text(f"{action}\n")
        part.rename(self.folder / f"action-{gpu}")

    def close(self) -> None:
        os.close(self._events)


class LogPipe:
    """The kernel's log, as a pipe that the test writes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg"
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self._count = 0

    def write(self, text: str) -> None:
        self._count += 1
        os.write(self._fd, f"6,{self._count},{self._count}000,-;{text}\n".encode())

    def write_raw(self, data: bytes) -> None:
        os.write(self._fd, data)

    def close(self) -> None:
        os.close(self._fd)


def fake_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """For a fixture: one that processes started from here find too."""
    made = FakeNvml(tmp_path)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path))
    yield made
    made.close()
