"""Checksums of kept host slabs on demand, read without mapping them and beside the vault's event loop.

Always true: one at a time, whoever asks; a slab that is dropped meanwhile is read to its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_PIECE_BYTES = 1024 * 1024
# Who asks for more than this at once is looping; a slab takes a second.
WAITING_MAX = 64


class SlabSums:
    """blake2b, 128 bits, in hex: the same as a device's `checksum` of the mapped slab."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sums")
        self._waiting = 0

    def ask(self, fd: int, tell: Callable[[str], None]) -> bool:
        """Call `tell` with the sum when it is there; False if too many wait already."""
        if self._waiting >= WAITING_MAX:
            return False
        self._waiting += 1
        job = self._thread.submit(_sum, os.dup(fd))
        job.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._tell, done, tell))
        return True

    def _tell(self, done: Future[str], tell: Callable[[str], None]) -> None:
        self._waiting -= 1
        tell(done.result())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _sum(fd: int) -> str:
    digest, offset = hashlib.blake2b(digest_size=16), 0
    try:
        while piece := os.pread(fd, _PIECE_BYTES, offset):
            digest.update(piece)
            offset += len(piece)
    finally:
        os.close(fd)
    return digest.hexdigest()
