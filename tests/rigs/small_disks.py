"""A disk of a few kilobytes that tests fill: a tmpfs, where one may be mounted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

BALLAST = "ballast"
MNT_DETACH = 2  # a process that still has it open does not keep it mounted
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """Yield an empty folder with so many bytes of room; skip the test if no tmpfs can be mounted."""
    folder = Path(tempfile.mkdtemp(prefix="hf-disk-", dir="/tmp"))
    if why := mount(folder, size):
        folder.rmdir()
        pytest.skip(f"a tmpfs cannot be mounted here: {why}")
    try:
        yield folder
    finally:
        unmount(folder)
        folder.rmdir()


def mount(folder: Path, size: int) -> str:
    """Mount an empty disk of so many bytes over a folder; return why that is not possible, or ""."""
    if _libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={size},mode=700".encode()):
        return os.strerror(ctypes.get_errno())
    return ""


def unmount(folder: Path) -> None:
    _libc.umount2(str(folder).encode(), MNT_DETACH)


def fill(folder: Path) -> None:
    """Fill a disk to the last byte. A second call takes what others have freed since."""
    descriptor = os.open(folder / BALLAST, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, bytes(size))
    finally:
        os.close(descriptor)


def make_room(folder: Path) -> None:
    (folder / BALLAST).unlink(missing_ok=True)
