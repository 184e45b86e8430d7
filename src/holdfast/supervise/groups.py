"""A process and all it started: killed together, so that no rank outlives its engine (facts 2, 34).

Always true: only who leads a session of its own is taken for the whole of it, and only while its pid cannot be
another's: it lives, or it is dead and not yet reaped, or nobody has its pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from holdfast.core.procfs import read_text

# Fields of /proc/<pid>/stat after the name's closing bracket: state, ppid, pgrp, session.
_GROUP, _SESSION = 2, 3


def leads_session(pid: int) -> bool:
    """Whether group and session are its own: so it is with what a supervisor started."""
    try:
        return os.getpgid(pid) == os.getsid(pid) == pid != os.getpid()
    except OSError:
        return False


def kill_group(leader: int) -> None:
    """SIGKILL to the leader's group in one stroke: a member that forks meanwhile cannot slip through."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_session(leader: int) -> list[int]:
    """SIGKILL to those of its session who left its group; their pids. Reads /proc: some milliseconds."""
    left = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and path.name != str(leader)]
    return [pid for pid in left if _belongs(pid, leader) and _kill_one(pid, leader)]


def _belongs(pid: int, leader: int) -> bool:
    fields = (read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return len(fields) > _SESSION and str(leader) in (fields[_GROUP], fields[_SESSION]) and fields[0] not in "ZX"


def _kill_one(pid: int, leader: int) -> bool:
    """Held by a pidfd and looked at once more: the pid may have become another's since it was read."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _belongs(pid, leader):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return True
    except OSError:
        pass
    finally:
        os.close(pidfd)
    return False
