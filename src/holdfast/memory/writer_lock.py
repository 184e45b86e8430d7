"""The machine-wide writer lock: a flock on `writer.lock` in the vaults' socket directory, taken before any first write.

The kernel's lock decides; the file's content only tells people who has it. It keeps two engines from each writing a
part of one set (writer_policy.py says who goes for it); the vault still admits one writer per device, so a lock file
that somebody removed and made anew costs a race, never two writers (facts 4d).

Always true: nothing is open while `acquire` waits, so cancelling it leaks nothing; a lock on a file that is no longer
the one at the path does not count (facts 18); acquiring what this object holds already returns at once; the file is
never removed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

from holdfast.core.flock import is_at_path, open_lock_file, read_signature, sign, try_flock

FILE_NAME = "writer.lock"
# flock has no wait that can be cancelled. A load takes seconds: this delay does not show, and costs 50 opens a second.
POLL_S = 0.02
# Between open and flock the file can be made anew; twice in a row is no accident, and the next poll tries again.
TRIES_MAX = 3


class WriterLock:
    """One engine's hold on the lock. `who` is what others read as its owner. Release it in a `finally`."""

    def __init__(self, directory: Path, who: str) -> None:
        self.path = directory / FILE_NAME
        self.who = f"{who}, pid {os.getpid()}"
        self._descriptor: int | None = None
        self._pid = 0  # the process that took it

    def __repr__(self) -> str:
        return f"writer lock {self.path}: {'held' if self.held else 'not held'} by {self.who}"

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def fileno(self) -> int:
        """For children that load along (`pass_fds`): with it they keep the lock as long as they live (facts 2)."""
        assert self._descriptor is not None, f"{self!r}"
        return self._descriptor

    def try_acquire(self) -> bool:
        """Take it if it is free. Somebody's look at the owner, in this very moment, reads as not free."""
        if self.held:
            return True
        for _ in range(TRIES_MAX):
            descriptor = open_lock_file(self.path)
            try:
                if not try_flock(descriptor):
                    return False
                if is_at_path(descriptor, self.path):
                    sign(descriptor, f"{self.who}\n".encode())
                    self._descriptor, self._pid = descriptor, os.getpid()
                    return True
            finally:
                if self._descriptor != descriptor:
                    os.close(descriptor)
        return False

    async def acquire(self, timeout_s: float) -> None:
        """Wait for the lock; TimeoutError names who has it."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while not self.try_acquire():
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                owner = self.owner() or "somebody, a moment ago"
                raise TimeoutError(f"the writer lock {self.path} was not free within {timeout_s:g} s: {owner} has it")
            await asyncio.sleep(min(POLL_S, left_s))

    def release(self) -> None:
        """Let go, also for children that were handed the lock; in a forked child: only of its copy."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        if self._pid == os.getpid():
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def owner(self) -> str | None:
        """Who has the lock, in words; None: nobody."""
        text = read_signature(self.path)
        if text is None:
            return None
        return text.decode(errors="replace").strip() or "somebody who has not signed yet"
