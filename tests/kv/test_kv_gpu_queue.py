"""A process plays the device's queue: what its owner had queued is written after the owner's SIGKILL (facts 4b).

Owner, queue and adopter are real processes over one memfd of pages and one index. The queue writes each block in two
halves, slowly, and goes on after the owner's death. No adopter may ever believe, or hand out, a block that it writes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct

import pytest

from holdfast.kv import adopt
from holdfast.kv.adopt import Follower
from holdfast.kv.index import Index, index_bytes
from holdfast.kv.pool import NoRoom, Pool
from tests.rigs.kv_index import KEYS, geometry

SHAPE = geometry(16)
PAGE_BYTES = 512
ORDER = struct.Struct("=II")  # block, which key
QUEUE_DEPTH = 6
WAIT_S = 60.0  # a process that says nothing for so long is stuck


def content(which: int) -> bytes:
    return (KEYS[which % len(KEYS)] + which.to_bytes(4, "little")) * 25 + bytes(12)


def page(block: int) -> slice:
    return slice(block * PAGE_BYTES, (block + 1) * PAGE_BYTES)


def shared_memory(size: int) -> mmap.mmap:
    fd = os.memfd_create("kv", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    mapped = mmap.mmap(fd, size)
    os.close(fd)
    return mapped


def play_queue(orders: int, retired: int, pages: mmap.mmap) -> None:
    """The device: takes orders in order, writes, says so. It ends when the owner is gone and the last order is done."""
    pause = select.poll()
    while order := os.read(orders, ORDER.size):
        block, which = ORDER.unpack(order)
        written = content(which)
        half = PAGE_BYTES // 2
        pages[block * PAGE_BYTES : block * PAGE_BYTES + half] = written[:half]
        pause.poll(3)  # a kernel takes a while; between the halves the block is torn
        pages[block * PAGE_BYTES + half : (block + 1) * PAGE_BYTES] = written[half:]
        with contextlib.suppress(BrokenPipeError):
            os.write(retired, order)


def play_owner(buffer: mmap.mmap, orders: int, retired: int, progress: int) -> None:
    """Serve for ever: keep the queue filled, publish what retires, forget the oldest when the pool is full."""
    pool = Pool(Index(buffer, SHAPE), 10)
    waiting: dict[int, int] = {}
    held: list[int] = []
    which = 0
    while True:
        while len(waiting) < QUEUE_DEPTH:
            got = pool.allocate()
            if isinstance(got, NoRoom):
                pool.release([held.pop(0)])
                continue
            block, generation = got[0]
            waiting[block] = generation
            os.write(orders, ORDER.pack(block, which % len(KEYS)))
            which += 1
        block, done = ORDER.unpack(os.read(retired, ORDER.size))
        if pool.publish(block, waiting.pop(block), KEYS[done], 0) == block:
            held.append(block)
        else:
            pool.release([block])
        os.write(progress, b".")


class Deployment:
    """One owner and its device, forked; the test is the standby that maps the same memory."""

    def __init__(self) -> None:
        self.buffer = shared_memory(index_bytes(SHAPE))
        self.pages = shared_memory(PAGE_BYTES * SHAPE.block_count)
        index = Index(self.buffer, SHAPE)
        index.format(10)
        orders_out, orders_in = os.pipe()
        retired_out, retired_in = os.pipe()
        self.progress, progress_in = os.pipe()
        self.queue = self.fork(
            lambda: play_queue(orders_out, retired_in, self.pages), closing=(orders_in, retired_out, progress_in)
        )
        self.owner = self.fork(
            lambda: play_owner(self.buffer, orders_in, retired_out, progress_in), closing=(orders_out, retired_in)
        )
        for fd in (orders_out, orders_in, retired_out, retired_in, progress_in):
            os.close(fd)

    def fork(self, play, closing: tuple[int, ...]) -> int:  # type: ignore[no-untyped-def]
        child = os.fork()
        if child:
            return child
        try:
            for fd in closing:
                os.close(fd)
            play()
        finally:
            os._exit(0)

    def read_progress(self) -> bytes:
        assert select.select([self.progress], [], [], WAIT_S)[0]
        return os.read(self.progress, 1)

    def kill_owner(self) -> None:
        """SIGKILL, then the CPU fence as a standby sees it: end of file on its connection."""
        os.kill(self.owner, signal.SIGKILL)
        while self.read_progress():
            pass

    def stop_device(self) -> None:
        os.kill(self.queue, signal.SIGSTOP)
        os.waitpid(self.queue, os.WUNTRACED)

    def wait_for_device(self) -> None:
        """The GPU fence: the queue's process is over."""
        os.kill(self.queue, signal.SIGCONT)
        fd = os.pidfd_open(self.queue)
        assert select.select([fd], [], [], WAIT_S)[0]
        os.close(fd)

    def close(self) -> None:
        for child in (self.owner, self.queue):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(self.progress)


@pytest.mark.processes
@pytest.mark.parametrize("by_follower", [False, True])
def test_what_a_dead_owner_had_queued_is_never_believed(by_follower: bool) -> None:
    """At whatever step it is killed: what the heir believes is complete and stays so, and what the heir writes into the
    blocks it is given before the GPU fence is not overwritten, while the device goes on writing elsewhere."""
    late_writes = 0
    for death in range(16):
        deployment = Deployment()
        try:
            # How many writes land late is up to the scheduler; every other device stands still until all is adopted.
            late_writes += one_death(deployment, 1 + 2 * (death % 15), by_follower, slow=bool(death % 2))
        finally:
            deployment.close()
    assert late_writes > 0  # else nothing was put to the test


def one_death(deployment: Deployment, steps: int, by_follower: bool, slow: bool) -> int:
    index, pages = Index(deployment.buffer, SHAPE), deployment.pages
    follower = Follower(index)
    for _ in range(steps):
        assert deployment.read_progress()
        follower.poll()  # while the owner stores
    if slow:
        deployment.stop_device()
    deployment.kill_owner()
    adoption = follower.adopt(index, 11) if by_follower else adopt.adopt(index, 11)
    mine = dict(adoption.by_key)
    check_content(mine, pages)
    before = {block: pages[page(block)] for block in adoption.blocks_of(adopt.QUARANTINED)}
    pool = Pool(index, 11, adoption=adoption)
    given = pool.allocate(pool.free_count)
    assert isinstance(given, list)
    for block, _ in given:
        pages[page(block)] = b"\xee" * PAGE_BYTES
    deployment.wait_for_device()
    check_content(mine, pages)
    assert all(pages[page(block)] == b"\xee" * PAGE_BYTES for block, _ in given)
    assert pool.gpu_fence_passed() == len(before)
    after = pool.allocate(len(before))
    assert isinstance(after, list)
    assert {block for block, _ in after} == set(before)
    return sum(pages[page(block)] != old for block, old in before.items())


def check_content(mine: dict[bytes, int], pages: mmap.mmap) -> None:
    for key, block in mine.items():
        assert pages[page(block)] == content(KEYS.index(key)), f"block {block} is believed and not complete"
