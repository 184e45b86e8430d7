"""A disk of a few kilobytes for tests that fill it: a tmpfs, where one may be mounted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

BALLAST = "ballast"
MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """An empty folder with so much room; the test is skipped where that cannot be had."""
    folder = Path(tempfile.mkdtemp(prefix="hf-disk-", dir="/tmp"))
    if _libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={size},mode=700".encode()):
        folder.rmdir()
        pytest.skip(f"a tmpfs cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        _libc.umount2(str(folder).encode(), MNT_DETACH)
        folder.rmdir()


def fill(folder: Path) -> None:
    """To the last byte."""
    descriptor = os.open(folder / BALLAST, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, bytes(size))
    finally:
        os.close(descriptor)
