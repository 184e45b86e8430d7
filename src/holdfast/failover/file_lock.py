"""Implements the election lock of one machine: a flock, acquired by polling.

The kernel's lock decides. The file's content only tells people which engine holds it, and is stale after a release. A
wait for a flock cannot be cancelled, so a waiter polls. `nudge` makes it try at once: the vault learns of a holder's
death from the kernel (facts 4a).

Always true:

- This code never removes the file.
- A lock counts only on the file that is at the path now (facts 18). If the file is removed or replaced, its holder
  notices within `CHECK_S` that the lock is lost; until then the vault refuses a second leader (facts 4d).
- The engine's other processes share the open file (`pass_fds`), so the lock is held until the last of them ends
  (facts 2).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
from pathlib import Path

from holdfast.core.errors import UserError
from holdfast.core.flock import is_at_path, open_lock_file, read_signature, sign, try_flock
from holdfast.core.ports import Clock
from holdfast.core.procfs import read_text
from holdfast.core.tasks import done_within
from holdfast.failover.lock import LockHolder, read_holder, signature, state_text

# On a network filesystem a flock may be local to each client, outlive its holder, or be lost when a server restarts. An
# unknown filesystem reads as "" and counts as local.
NETWORKED = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "vboxsf", "prl_fs"),
        *("ceph", "lustre", "glusterfs", "beegfs", "gpfs", "panfs", "wekafs", "orangefs", "pvfs2", "ocfs2", "gfs2"),
    }
)
# FUSE may be anything (sshfs, s3fs, gcsfuse, juicefs, …): only those known to be local are allowed.
FUSE_LOCAL = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs"})


def filesystem_of(descriptor: int) -> str:
    """Return the filesystem type of an open file, found by its mount: device numbers are wrong on overlays and
    btrfs."""
    mount = mount_id(read_text(f"/proc/self/fdinfo/{descriptor}") or "")
    return filesystem_type(read_text("/proc/self/mountinfo") or "", mount)


def is_networked(filesystem: str) -> bool:
    fuse = filesystem == "fuse" or filesystem.startswith("fuse.")
    return filesystem in NETWORKED or (fuse and filesystem not in FUSE_LOCAL)


def mount_id(fdinfo: str) -> str:
    """Return the `mnt_id` in the text of /proc/self/fdinfo/<fd>; "" if it has none."""
    for line in fdinfo.splitlines():
        name, _, value = line.partition(":")
        if name == "mnt_id":
            return value.strip()
    return ""


def filesystem_type(mountinfo: str, mount: str) -> str:
    """Return the type in this mount's line, the first word after " - "; "" if there is no such line."""
    for line in mountinfo.splitlines():
        head, dash, tail = line.partition(" - ")
        if dash and head.split()[:1] == [mount] and tail.split():
            return tail.split()[0]
    return ""


_log = logging.getLogger(__name__)

# Polling without a nudge. One try is one system call of some microseconds, so 50 a second cost nothing. 20 ms are small
# compared with the seconds it takes to detect a death that leaves a connection open.
POLL_S = 0.02
# Polling after a nudge: the lock becomes free up to 59 ms after the vault reports a death (facts 1), so poll often for
# more than that. 5 ms are small in a stall of 150 ms, and 20 tries cost less than one frame.
NUDGED_POLL_S = 0.005
NUDGED_FOR_S = 0.1
# How long two engines may both believe that they hold the lock after the file was replaced.
CHECK_S = 1.0
# The file can be replaced between open and flock: retry this often, then wait for the next poll.
TRIES_MAX = 3
# A dying process closes its descriptors from the highest down, so a high number frees the lock early (facts 4c). Not
# higher, because the kernel keeps a table up to the highest number (32 KiB for this one). The numbers above are for the
# vault's sockets, which must be closed early as well.
HIGH_DESCRIPTOR = 4096
ROOM_ABOVE = 256


class FileLock:
    """A `FailoverLock` on a file; `engine` is the name in its signature."""

    def __init__(self, path: Path, engine: str, clock: Clock) -> None:
        if not path.is_absolute():
            raise ValueError(f"a lock file needs an absolute path, got {str(path)!r}")
        self.path = path
        self.engine = engine
        self._clock = clock
        self._descriptor: int | None = None
        self._pid = 0  # of the process that opened it
        self._handed_out = False
        self._lost: asyncio.Event | None = None  # not None: the lock was granted on this descriptor
        self._nudged = asyncio.Event()
        self._nudged_until_s = 0.0
        self._waiting = False
        self._check: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"lock {self.path}: {state_text(self._lost, self._waiting)} by {self.engine}"

    async def acquire(self) -> asyncio.Event:
        if self._lost is not None and not self._lost.is_set():
            return self._lost
        assert not self._waiting, f"{self!r}: acquired twice at once"
        if self._lost is not None:
            await self.release()  # the lost lock, on a removed file
        self._waiting = True
        try:
            while (lost := self._try()) is None:
                await self._wait_for_retry()
            return lost
        finally:
            self._waiting = False
            if self._lost is None and not self._handed_out:
                self._close()

    async def release(self) -> None:
        """Release the lock, also for the processes that share it. In a forked child: close only its descriptor."""
        lost, self._lost = self._lost, None
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if lost is not None:
            lost.set()  # before another engine can have it
            if self._descriptor is not None and self._pid == os.getpid():
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        if not self._waiting:
            self._close()

    async def owner(self) -> LockHolder | None:
        text = read_signature(self.path)
        return None if text is None else read_holder(text)

    def nudge(self) -> None:
        if self._waiting:
            self._nudged_until_s = asyncio.get_running_loop().time() + NUDGED_FOR_S
            self._nudged.set()

    def pass_fds(self) -> tuple[int, ...]:
        """Return the lock file's descriptor. Works before the lock is held: processes started now share it later."""
        self._handed_out = True
        return (self._open(),)

    # -- waiting

    def _try(self) -> asyncio.Event | None:
        for _ in range(TRIES_MAX):
            descriptor = self._open()
            if not try_flock(descriptor):
                return None
            if is_at_path(descriptor, self.path):
                sign(descriptor, signature(self.engine, self._clock.unix_s()))
                self._lost = asyncio.Event()
                self._check = asyncio.get_running_loop().call_later(CHECK_S, self._look)
                return self._lost
            if self._handed_out:
                _log.warning("%r: the file was replaced; processes started before this do not share the lock", self)
            self._close()
        return None

    async def _wait_for_retry(self) -> None:
        self._nudged.clear()
        nudged = asyncio.get_running_loop().time() < self._nudged_until_s
        await done_within(self._nudged.wait(), NUDGED_POLL_S if nudged else POLL_S)

    # -- holding

    def _look(self) -> None:
        """Set the lost event if the file at the path is no longer the locked one. The descriptor stays open, since the
        engine's other processes share it."""
        assert self._descriptor is not None
        assert self._lost is not None
        self._check = asyncio.get_running_loop().call_later(CHECK_S, self._look)
        try:
            if is_at_path(self._descriptor, self.path):
                return
        except OSError as error:  # unknown: a path that we cannot read, others cannot replace
            _log.warning("%r: cannot look at the file: %s", self, error)
            return
        _log.error("%r: the file was removed or replaced, so the lock is lost", self)
        self._check.cancel()
        self._check = None
        self._lost.set()

    # -- the descriptor

    def _open(self) -> int:
        if self._descriptor is None:
            try:
                self._descriptor, self._pid = _high(open_lock_file(self.path)), os.getpid()
            except OSError as error:
                mend = "the election lock needs a file that this user may write"
                raise UserError(f"lock file {self.path} cannot be opened: {error.strerror}; {mend}") from error
            self._refuse_network(self._descriptor)
        return self._descriptor

    def _refuse_network(self, descriptor: int) -> None:
        filesystem = filesystem_of(descriptor)
        if is_networked(filesystem):
            self._close()
            raise UserError(
                f"lock file {self.path} lies on a network filesystem ({filesystem}), where a lock can outlive its "
                "holder or be held twice; choose a path on a local disk, or a lock server (lock+tcp://host:port)"
            )

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
        self._handed_out = False


def _high(descriptor: int) -> int:
    """Move the open file to a high descriptor number, if one is free; return its number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = HIGH_DESCRIPTOR if limit == resource.RLIM_INFINITY else min(limit, HIGH_DESCRIPTOR)
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, highest - ROOM_ABOVE))
    except OSError:
        return descriptor
    os.close(descriptor)
    return high
