"""One supervisor per state directory: a flock on `STATE_DIR/up.lock`, whose content says who has it.

Always true: the kernel's lock decides, the content only informs; the file is never removed (a file made anew would be a
second lock, facts 18).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from holdfast.core import flock


class Holder(msgspec.Struct, frozen=True):
    """Who supervises."""

    pid: int
    detached: bool = False
    up: bool = False  # everything has served once
    lack: str = ""  # what was still missing when the bound for that had passed


def lock_path(state_dir: Path) -> Path:
    return state_dir / "up.lock"


def take_lock(state_dir: Path) -> int | None:
    """The lock as a descriptor (it may be handed to a child), or None if another has it."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(lock_path(state_dir), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def sign(descriptor: int, holder: Holder) -> None:
    """Say who has the lock."""
    flock.sign(descriptor, msgspec.json.encode(holder))


def holder(state_dir: Path) -> Holder | None:
    """Who supervises now; pid 0 if the holder has not signed yet; None if nobody does."""
    try:
        descriptor = os.open(lock_path(state_dir), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # A shared lock, for the blink of an eye: two who look do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder)
        return Holder(0)
    finally:
        os.close(descriptor)
    return None
