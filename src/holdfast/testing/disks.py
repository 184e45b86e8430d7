"""A small disk of its own, that can be filled: a tmpfs, where one may be mounted."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

BALLAST = "ballast"
MNT_DETACH = 2  # whoever still looks does not keep it
_libc = ctypes.CDLL(None, use_errno=True)


def mount(folder: Path, size: int) -> str:
    """An empty disk of so many bytes over a folder; why not, if this process may not."""
    if _libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={size},mode=700".encode()):
        return os.strerror(ctypes.get_errno())
    return ""


def unmount(folder: Path) -> None:
    _libc.umount2(str(folder).encode(), MNT_DETACH)


def fill(folder: Path) -> None:
    """To the last byte; again: what others freed meanwhile is taken too."""
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
