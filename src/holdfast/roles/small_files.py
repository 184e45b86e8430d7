"""Files that a person names on the command line, read whole; pipes too, as a shell's `<(…)` makes them.

Always true: neither a pipe without a writer nor a device without an end is waited for: time and size are bounded.
"""

from __future__ import annotations

import errno
import os
import select
import time
from pathlib import Path

BYTES_MAX = 1024 * 1024  # settings, a template, a token: a larger file is another one than was meant
READ_S = 5.0  # for a command at the other end of a pipe
_PIECE = 65_536


def read_small(path: Path) -> bytes:
    """What is in it; OSError says why not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    data, until_s = bytearray(), time.monotonic() + READ_S
    while len(data) <= BYTES_MAX:
        # A pipe that nobody writes to yet reads as ended; only the wait can tell.
        if not select.select([descriptor], [], [], max(0.0, until_s - time.monotonic()))[0]:
            raise OSError(errno.ETIMEDOUT, f"nobody has written it to its end within {READ_S:g} s")
        try:
            piece = os.read(descriptor, _PIECE)
        except BlockingIOError:
            continue
        if not piece:
            return bytes(data)
        data += piece
    raise OSError(errno.EFBIG, f"it is larger than {BYTES_MAX // 1024} KiB")
