"""What every lock on a file needs: the same file for all, who has it, and its holder's signature.

Always true: the kernel's lock decides, the content only informs; a lock on a file that is no longer the one at the path
is no lock (facts 18); descriptors are close-on-exec, and links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

# What a holder says of itself, as a rule; whoever looks reads no more than the second.
SIGNATURE_BYTES = 512
SIGNATURE_BYTES_MAX = 4096


def open_lock_file(path: Path) -> int:
    """The file at the path, made if there is none, nothing locked yet."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _regular(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), path)


def _regular(descriptor: int, path: Path) -> int:
    """A pipe can be locked and not signed: it would hide who has the lock."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a file", str(path))


def try_flock(descriptor: int) -> bool:
    """Take it if it is free. Somebody's look at the holder, in this very moment, reads as not free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at_path(descriptor: int, path: Path) -> bool:
    """Whether this is still the file that others would lock."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def sign(descriptor: int, text: bytes) -> None:
    """Padded, so that it covers what stood there before: ext4 makes a truncated file's writers wait for the disk. One
    that is full leaves it unsigned, not unlocked."""
    padded = text.rstrip().ljust(SIGNATURE_BYTES - 1) + b"\n"
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, padded, 0)
        if os.fstat(descriptor).st_size > len(padded):
            os.ftruncate(descriptor, len(padded))


def read_signature(path: Path) -> bytes | None:
    """What the holder says of itself; empty if it has not signed yet; None if nobody holds the lock."""
    try:
        # Not blocking: somebody's pipe has no other end.
        descriptor = _regular(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), path)
    except FileNotFoundError:
        return None
    try:
        # A shared lock, for the blink of an eye: two who look do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, SIGNATURE_BYTES_MAX, 0)
    finally:
        os.close(descriptor)
    return None
