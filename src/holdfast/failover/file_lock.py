"""The election lock of one machine: a flock, woken by whoever saw its holder die.

The kernel's lock decides; the file's content tells people who has it, and is stale after a release by design. flock has
no wait that can be cancelled, so a waiter tries again and again, and at once when it is nudged (the vault hears of a
death as soon as the kernel tells anyone, facts 4a).

Always true: the file is never removed; a lock on a file that is no longer the one at its path is not granted, and a
held one whose file was taken away is lost (facts 18): its holder learns it within CHECK_S, and until then the vault
refuses a second leader (facts 4d). The lock belongs to the open file, which the engine's other processes share
(`pass_fds`): it stays held until the last of them ends (facts 2).
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
from holdfast.core.tasks import set_within
from holdfast.failover.filesystems import filesystem_of, is_networked
from holdfast.failover.lock import Holder, in_a_word, read_holder, signature

_log = logging.getLogger(__name__)

# A death that nobody told us of. One try is one system call, some microseconds: 50 a second cost nothing, and 20 ms
# are small beside the seconds it takes to be sure of a death that leaves a connection open.
POLL_S = 0.02
# A death that we were told of: the lock comes free with the news or up to 59 ms later (facts 1), so look often for a
# moment and a half of that. 5 ms are lost in a stall's 150 ms, and 20 tries cost less than one frame.
NUDGED_POLL_S = 0.005
NUDGED_FOR_S = 0.1
# How long two may both think that they hold it after the file was made anew; one stat a second costs nothing.
CHECK_S = 1.0
# Between open and flock the file can be made anew; more often than this is no accident, and the next try is soon.
TRIES_MAX = 3
# A dying process closes its descriptors from the highest down, so this one is freed early (facts 4c). Not as high as
# the limit allows: the kernel keeps a table up to the highest one, 32 KiB for this. The room above it is for the
# vault's sockets, which want to be high as well.
HIGH_DESCRIPTOR = 4096
ROOM_ABOVE = 256


class FileLock:
    """`FailoverLock` on a file. `who` is what others read as its owner."""

    def __init__(self, path: Path, who: str, clock: Clock) -> None:
        if not path.is_absolute():
            raise ValueError(f"a lock file needs an absolute path, got {str(path)!r}")
        self.path = path
        self.who = who
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
        return f"lock {self.path}: {in_a_word(self._lost, self._waiting)} by {self.who}"

    async def acquire(self) -> asyncio.Event:
        if self._lost is not None and not self._lost.is_set():
            return self._lost
        assert not self._waiting, f"{self!r}: acquired twice at once"
        if self._lost is not None:
            await self.release()  # of a file that is gone
        self._waiting = True
        try:
            while (lost := self._try()) is None:
                await self._rest()
            return lost
        finally:
            self._waiting = False
            if self._lost is None and not self._handed_out:
                self._close()

    async def release(self) -> None:
        """Let go, also for the processes that share the lock; in a forked child: only of its copy."""
        lost, self._lost = self._lost, None
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if lost is not None:
            lost.set()  # before anybody else can have it
            if self._descriptor is not None and self._pid == os.getpid():
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        if not self._waiting:
            self._close()

    async def owner(self) -> Holder | None:
        text = read_signature(self.path)
        return None if text is None else read_holder(text)

    def nudge(self) -> None:
        if self._waiting:
            self._nudged_until_s = asyncio.get_running_loop().time() + NUDGED_FOR_S
            self._nudged.set()

    def pass_fds(self) -> tuple[int, ...]:
        """Also before the lock is held: processes started now share it once it is."""
        self._handed_out = True
        return (self._open(),)

    # -- waiting

    def _try(self) -> asyncio.Event | None:
        for _ in range(TRIES_MAX):
            descriptor = self._open()
            if not try_flock(descriptor):
                return None
            if is_at_path(descriptor, self.path):
                return self._become_holder(descriptor)
            if self._handed_out:
                _log.warning("%r: the file was made anew; processes started before this do not share the lock", self)
            self._close()
        return None

    def _become_holder(self, descriptor: int) -> asyncio.Event:
        sign(descriptor, signature(self.who, self._clock.unix_s()))
        self._lost = asyncio.Event()
        self._check = asyncio.get_running_loop().call_later(CHECK_S, self._look)
        return self._lost

    async def _rest(self) -> None:
        self._nudged.clear()
        nudged = asyncio.get_running_loop().time() < self._nudged_until_s
        await set_within(self._nudged, NUDGED_POLL_S if nudged else POLL_S)

    # -- holding

    def _look(self) -> None:
        """Is the file still the one that others would lock? If not, the lock stays closed for the ranks' sake."""
        assert self._descriptor is not None
        assert self._lost is not None
        self._check = asyncio.get_running_loop().call_later(CHECK_S, self._look)
        try:
            if is_at_path(self._descriptor, self.path):
                return
        except OSError as error:  # what we cannot look at, others cannot make anew
            _log.warning("%r: cannot look at the file: %s", self, error)
            return
        _log.error("%r: the file was removed or made anew, so the lock is lost", self)
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
    """The same open file under a high number, if there is room up there."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = HIGH_DESCRIPTOR if limit == resource.RLIM_INFINITY else min(limit, HIGH_DESCRIPTOR)
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, highest - ROOM_ABOVE))
    except OSError:
        return descriptor
    os.close(descriptor)
    return high
