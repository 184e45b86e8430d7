"""A disk of a few kilobytes for tests that fill it, where one may be mounted."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing import disks


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """An empty folder with so much room; the test is skipped where that cannot be had."""
    folder = Path(tempfile.mkdtemp(prefix="hf-disk-", dir="/tmp"))
    if why := disks.mount(folder, size):
        folder.rmdir()
        pytest.skip(f"a tmpfs cannot be mounted here: {why}")
    try:
        yield folder
    finally:
        disks.unmount(folder)
        folder.rmdir()
