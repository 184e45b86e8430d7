"""The machine-wide writer lock on real files, with real processes that are really killed."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.memory.writer_lock import FILE_NAME, WriterLock

WAIT_S = 60.0

HOLD = """
import sys
from pathlib import Path
from holdfast.memory.writer_lock import WriterLock
lock = WriterLock(Path(sys.argv[1]), sys.argv[2])
assert lock.try_acquire()
print("held", flush=True)
sys.stdin.read()
"""

# Takes the lock, hands it to a child by name, and waits; the child lives on until its stdin closes.
HAND_DOWN = """
import subprocess, sys
from pathlib import Path
from holdfast.memory.writer_lock import WriterLock
lock = WriterLock(Path(sys.argv[1]), "parent")
assert lock.try_acquire()
passed = (lock.fileno(),) if sys.argv[2] == "passed" else ()
rank = "import sys; print('up', flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", rank], pass_fds=passed)
sys.stdin.read()
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has said its first line."""
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        readable, _, _ = select.select([child.stdout], [], [], WAIT_S)
        assert readable, "it never came up"
        assert child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_one_at_a_time_and_the_owner_is_told(tmp_path: Path) -> None:
    """While one has the lock, another times out with its name; once it lets go the other gets it."""
    first, second = WriterLock(tmp_path, "engine 0"), WriterLock(tmp_path, "engine 1")
    assert first.owner() is None
    await first.acquire(1.0)
    assert second.owner() == f"engine 0, pid {os.getpid()}"
    with pytest.raises(TimeoutError, match="engine 0"):
        await second.acquire(0.05)
    waiting = asyncio.create_task(second.acquire(WAIT_S))
    await asyncio.sleep(0)
    first.release()
    await waiting
    assert (first.held, second.held) == (False, True)
    assert first.owner() == f"engine 1, pid {os.getpid()}"
    second.release()


async def test_a_killed_holder_frees_the_lock_and_a_stopped_one_keeps_it(tmp_path: Path) -> None:
    """SIGSTOP frees nothing, and the wait ends by its own time. SIGKILL is enough: no file content, no time, nothing to
    clean up."""
    lock = WriterLock(tmp_path, "engine 1")
    with process(HOLD, str(tmp_path), "engine 0") as holder:
        assert not lock.try_acquire()
        assert lock.owner() == f"engine 0, pid {holder.pid}"
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError, match="engine 0"):
            await lock.acquire(0.1)
        assert not lock.held
        waiting = asyncio.create_task(lock.acquire(WAIT_S))
        await asyncio.sleep(0)
        holder.send_signal(signal.SIGKILL)
        await waiting
    assert lock.owner() == lock.signature
    lock.release()


@pytest.mark.parametrize("passed", ["passed", "not passed"])
async def test_a_rank_that_was_handed_the_lock_keeps_it(tmp_path: Path, passed: str) -> None:
    """With the descriptor passed by name, the lock outlives the parent until the last rank ends; else it does not."""
    lock = WriterLock(tmp_path, "engine 1")
    with process(HAND_DOWN, str(tmp_path), passed) as parent:
        assert not lock.try_acquire()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        if passed == "passed":
            with pytest.raises(TimeoutError, match="parent"):
                await lock.acquire(0.1)
            assert parent.stdin is not None
            parent.stdin.close()  # the rank's too: it ends
        await lock.acquire(WAIT_S)
    lock.release()


async def test_cancelled_waits_leak_nothing(tmp_path: Path) -> None:
    """A hundred cancelled waits leave no descriptor, and nothing held."""
    holder, lock = WriterLock(tmp_path, "engine 0"), WriterLock(tmp_path, "engine 1")
    await holder.acquire(1.0)
    before = open_files()
    waits = [asyncio.create_task(lock.acquire(WAIT_S)) for _ in range(100)]
    await asyncio.sleep(0)
    for wait in waits:
        wait.cancel()
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert open_files() == before
    holder.release()
    assert open_files() == before - 1
    assert lock.try_acquire(), "a cancelled wait still held it"
    lock.release()


async def test_acquiring_again_does_not_wait_for_oneself(tmp_path: Path) -> None:
    """The holder acquires again at once and without a second descriptor; one release lets go."""
    lock, other = WriterLock(tmp_path, "engine 0"), WriterLock(tmp_path, "engine 1")
    await lock.acquire(1.0)
    before = open_files()
    await asyncio.wait_for(lock.acquire(2 * WAIT_S), WAIT_S)
    assert open_files() == before
    lock.release()
    lock.release()
    await lock.acquire(1.0)
    lock.release()
    assert other.try_acquire()
    other.release()


async def test_a_recreated_file_is_noticed(tmp_path: Path) -> None:
    """A lock on a file that was removed counts for nobody: the next taker makes the file anew and has that one."""
    lock, other = WriterLock(tmp_path, "engine 0"), WriterLock(tmp_path, "engine 1")
    await lock.acquire(1.0)
    (tmp_path / FILE_NAME).unlink()
    assert other.try_acquire(), "another file is another lock: this is why the vault admits writers itself"
    lock.release()
    assert other.owner() == other.signature
    other.release()


async def test_a_file_replaced_between_open_and_lock_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The taker compares inodes after it has the lock, and tries the new file instead."""
    lock = WriterLock(tmp_path, "engine 0")
    before = open_files()
    real_open, replaced = os.open, []

    def open_then_replace(path: str, *arguments: int) -> int:
        descriptor = real_open(path, *arguments)
        if not replaced:
            replaced.append(os.fstat(descriptor).st_ino)
            os.rename(path, tmp_path / "old")
        return descriptor

    monkeypatch.setattr(os, "open", open_then_replace)
    assert lock.try_acquire()
    monkeypatch.undo()
    assert os.fstat(lock.fileno()).st_ino == lock.path.stat().st_ino != replaced[0]
    lock.release()
    assert open_files() == before


def test_a_forked_child_that_releases_its_copy_frees_nothing(tmp_path: Path) -> None:
    """Only the process that took the lock can let go of it for all."""
    code = """
import os, sys
from pathlib import Path
from holdfast.memory.writer_lock import WriterLock
lock, other = WriterLock(Path(sys.argv[1]), "parent"), WriterLock(Path(sys.argv[1]), "other")
assert lock.try_acquire()
child = os.fork()
if child == 0:
    lock.release()
    os._exit(0)
os.waitpid(child, 0)
assert not other.try_acquire()
lock.release()
assert other.try_acquire()
print("good", flush=True)
"""
    with process(code, str(tmp_path)):
        pass


async def test_many_processes_never_hold_it_together(tmp_path: Path) -> None:
    """Four processes take it in turns, 50 times each, and none ever meets another inside."""
    code = """
import asyncio, os, sys
from pathlib import Path
from holdfast.memory.writer_lock import WriterLock
lock, inside = WriterLock(Path(sys.argv[1]), "x"), Path(sys.argv[1]) / "inside"
async def main():
    for _ in range(50):
        await lock.acquire(100)
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        await asyncio.sleep(0)
        os.unlink(inside)
        lock.release()
        await asyncio.sleep(0)
asyncio.run(main())
"""
    command = (sys.executable, "-c", code, str(tmp_path))
    takers = [await asyncio.create_subprocess_exec(*command) for _ in range(4)]
    assert await asyncio.wait_for(asyncio.gather(*(taker.wait() for taker in takers)), 100) == [0, 0, 0, 0]
