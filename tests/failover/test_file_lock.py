"""The flock behind `FailoverLock`: its descriptor, its file, and how soon a nudged waiter has it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.core.ports import SystemClock
from holdfast.core.procfs import read_process
from holdfast.failover import file_lock
from holdfast.failover.file_lock import FileLock, filesystem_of, filesystem_type, is_networked, mount_id
from holdfast.failover.lock import UNSIGNED
from holdfast.testing.processes import fd_count
from tests.rigs.failover.locks import BOUND_S, FileRig

pytestmark = [pytest.mark.alone, pytest.mark.processes]


@pytest.fixture
async def lock(tmp_path: Path) -> AsyncIterator[FileLock]:
    made = FileLock(tmp_path / "engine.lock", "engine 0", SystemClock())
    yield made
    await made.release()


async def test_the_descriptor_is_high_and_stays_out_of_other_programs(lock: FileLock) -> None:
    """It closes early in a dying process (facts 4c), and only a child that is handed it by name has it (facts 4d)."""
    await lock.acquire()
    (descriptor,) = lock.pass_fds()
    assert descriptor > 255
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert not await has_descriptor(descriptor, ())
    assert await has_descriptor(descriptor, lock.pass_fds())


async def has_descriptor(descriptor: int, passed: tuple[int, ...]) -> bool:
    """Whether a child that was handed these has it; with close_fds off, so that only close-on-exec keeps it out."""
    code = f"import os, sys; sys.exit(not os.path.exists('/proc/self/fd/{descriptor}'))"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, pass_fds=passed, close_fds=bool(passed))
    return await child.wait() == 0


async def test_no_room_up_there_is_no_reason_to_fail(lock: FileLock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every high number is taken, a low one holds the lock as well."""
    monkeypatch.setattr(file_lock, "HIGH_DESCRIPTOR", 1 << 40)
    monkeypatch.setattr(file_lock.resource, "getrlimit", lambda _: (1 << 40, 1 << 40))
    before = fd_count()
    await lock.acquire()
    assert fd_count() == before + 1


async def test_handed_out_descriptor_is_the_one_that_is_locked(lock: FileLock) -> None:
    """Handed out before the lock was held, it is the same open file after; release closes it; nothing is left."""
    before = fd_count()
    (early,) = lock.pass_fds()
    await lock.acquire()
    assert lock.pass_fds() == (early,)
    await lock.release()
    assert fd_count() == before
    (_,) = lock.pass_fds()
    await lock.release()  # also of a descriptor that was handed out and never locked
    assert fd_count() == before


async def test_signature_is_stale_after_release_and_never_trusted(lock: FileLock) -> None:
    """The file goes on naming its last holder; the kernel says that nobody is. Rubbish in it is somebody."""
    await lock.acquire()
    lock.path.write_bytes(b"\xff rubbish" * 300)
    other = FileLock(lock.path, "engine 1", SystemClock())
    assert await other.owner() == UNSIGNED
    await lock.release()
    await lock.acquire()
    seen = await other.owner()
    assert seen is not None
    me = read_process(os.getpid())
    assert me is not None
    assert (seen.engine, seen.pid, seen.start_ticks) == ("engine 0", os.getpid(), me.start_ticks)
    await lock.release()
    assert b"engine 0" in lock.path.read_bytes()
    assert await other.owner() is None


async def test_file_replaced_between_open_and_lock_is_not_taken(
    lock: FileLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The taker compares inodes once it has the lock, and takes the new file instead; nothing is left open."""
    before, real, replaced = fd_count(), file_lock.try_flock, []

    def replace_then_lock(descriptor: int) -> bool:
        if not replaced:
            replaced.append(os.fstat(descriptor).st_ino)
            os.rename(lock.path, tmp_path / "old")
        return real(descriptor)

    monkeypatch.setattr(file_lock, "try_flock", replace_then_lock)
    await lock.acquire()
    assert os.fstat(lock.pass_fds()[0]).st_ino == lock.path.stat().st_ino != replaced[0]
    assert fd_count() == before + 1


@pytest.mark.parametrize("how", ["removed", "made anew"])
async def test_loss_of_the_file_is_noticed_in_time(lock: FileLock, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed or replaced: the event is set by the next check, and the old file stays locked for the ranks' sake."""
    real, checks = file_lock.is_at_path, []

    def is_at_path(descriptor: int, path: Path) -> bool:
        checks.append(path)
        return real(descriptor, path)

    lost = await lock.acquire()
    old = os.open(lock.path, os.O_RDWR)
    lock.path.unlink()
    if how == "made anew":
        lock.path.touch()
    monkeypatch.setattr(file_lock, "is_at_path", is_at_path)
    await asyncio.wait_for(lost.wait(), BOUND_S)
    assert checks == [lock.path]
    with pytest.raises(BlockingIOError):
        fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(old)
    anew = await asyncio.wait_for(lock.acquire(), BOUND_S)  # of the file that is there now
    assert not anew.is_set()


def test_forked_child_that_releases_its_copy_frees_nothing(tmp_path: Path) -> None:
    """Only the process that took the lock can let go of it for all."""
    code = """
import asyncio, os, sys
from pathlib import Path
from holdfast.core.ports import SystemClock
from holdfast.failover.file_lock import FileLock
lock, other = (FileLock(Path(sys.argv[1]), who, SystemClock()) for who in ("parent", "other"))
async def main():
    await lock.acquire()
    child = os.fork()
    if child == 0:
        lock.release().send(None)
async def forked():
    try:
        await main()
    finally:
        if os.getpid() != parent:
            os._exit(0)
    os.wait()
    assert (await other.owner()).engine == "parent"
parent = os.getpid()
asyncio.run(forked())
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock")], timeout=BOUND_S).returncode == 0


async def test_nudged_waiter_does_not_wait_for_its_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder is killed; whoever hears its connection end nudges, and the waiter looks then and soon again."""
    monkeypatch.setattr(file_lock, "POLL_S", 3600.0)
    rig = FileRig(tmp_path)
    await rig.start()
    waiter, idle = rig.lock("waiter"), rig.lock("idle")
    async with rig.engine("holder") as holder:
        assert await holder.do("acquire") == "acquired"
        waiting, sleeping = asyncio.create_task(waiter.acquire()), asyncio.create_task(idle.acquire())
        news = asyncio.create_task(holder.answer())
        await asyncio.sleep(0)
        holder.signal(signal.SIGKILL)
        assert await news == ""
        waiter.nudge()
        await asyncio.wait_for(waiting, BOUND_S)  # far below its poll
        await waiter.release()
        assert not sleeping.done(), "nobody nudged this one"
        sleeping.cancel()


# -- where a lock file may lie

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /data rw,relatime shared:7 master:2 - nfs4 server:/data rw,vers=4.2
31 22 0:41 / /dash\\040-\\040dir rw - fuse.sshfs me@there:/ rw
"""


@pytest.mark.parametrize(("mount", "found"), [("22", "ext4"), ("30", "nfs4"), ("31", "fuse.sshfs"), ("9", "")])
def test_filesystem_is_read_from_the_mount(mount: str, found: str) -> None:
    """By the mount's number, whatever optional fields stand before the dash; an unknown one is no name."""
    assert filesystem_type(MOUNTS, mount) == found
    assert mount_id("pos:\t0\nflags:\t02\nmnt_id:\t30\nino:\t7\n") == "30"
    assert mount_id("") == ""


def test_network_filesystems_are_known() -> None:
    """Networks and FUSE are refused, what lies on one machine is not, nor what the kernel does not tell."""
    assert all(map(is_networked, ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "fuse", "lustre", "ceph", "9p")))
    assert not any(map(is_networked, ("ext4", "xfs", "btrfs", "tmpfs", "fuseblk", "fuse.fuse-overlayfs", "")))


async def test_network_filesystem_is_refused_with_a_mend(lock: FileLock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, the filesystem and two ways out; nothing stays open or locked."""
    before = fd_count()
    monkeypatch.setattr(file_lock, "filesystem_of", lambda descriptor: "nfs4")
    with pytest.raises(UserError, match=r"engine\.lock .*\(nfs4\).*local disk.*lock server"):
        await lock.acquire()
    assert fd_count() == before
    monkeypatch.undo()
    await lock.acquire()
    assert filesystem_of(lock.pass_fds()[0]) != ""


async def test_file_that_cannot_be_opened_is_a_users_error(tmp_path: Path) -> None:
    """A directory, a link or a missing right: one line that says what and why."""
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(UserError, match="cannot be opened"):
            await FileLock(path, "engine 0", SystemClock()).acquire()
    with pytest.raises(ValueError, match="absolute path"):
        FileLock(Path("engine.lock"), "engine 0", SystemClock())
