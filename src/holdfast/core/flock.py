"""Helpers for lock files: open, lock, and the holder's signature.

Always true: the kernel's lock decides, the file's content only informs; a lock counts only on the file that is at the
path now (facts 18); descriptors are close-on-exec, and symbolic links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

# The size that a signature is padded to, and the most that a reader reads.
SIGNATURE_BYTES = 512
SIGNATURE_BYTES_MAX = 4096


def open_lock_file(path: Path) -> int:
    """Open the file at the path, creating it if needed; return its descriptor, not locked yet."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _regular(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), path)


def _regular(descriptor: int, path: Path) -> int:
    """Return the descriptor; raise OSError unless it is a regular file. A pipe could be locked but not signed."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a file", str(path))


def try_flock(descriptor: int) -> bool:
    """Take the lock if it is free; return whether it was. A concurrent `read_signature` makes it seem taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at_path(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the one at the path."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def sign(descriptor: int, text: bytes) -> None:
    """Write the signature, padded to cover the old one: after a truncation ext4 would make writers wait for the disk.
    On a full disk the file stays locked and unsigned."""
    padded = text.rstrip().ljust(SIGNATURE_BYTES - 1) + b"\n"
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, padded, 0)
        if os.fstat(descriptor).st_size > len(padded):
            os.ftruncate(descriptor, len(padded))


def read_signature(path: Path) -> bytes | None:
    """Return the holder's signature; empty if it has not signed yet; None if the lock is free."""
    try:
        # O_NONBLOCK: opening a pipe without a writer would wait.
        descriptor = _regular(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), path)
    except FileNotFoundError:
        return None
    try:
        # A shared lock, held briefly, so that two readers do not block each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, SIGNATURE_BYTES_MAX, 0)
    finally:
        os.close(descriptor)
    return None
