"""Processes of this machine behind a small port: start one, adopt one, signal it, hear of its end.

Always true: a signal goes through a pidfd, so it never reaches a stranger who got the pid later; the end of a process
is an event of the loop (2-14 ms after it, facts 30), never found by polling; a child has a session of its own, so that
a terminal's Ctrl-C reaches only the supervisor, and what is left of that session ends with the child. Only who leads a
session of its own is taken for the whole of it, and only while its pid cannot be another's: it lives, or it is dead and
not yet reaped, or nobody has its pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import REFUSED
from holdfast.core.log_files import LOG_BYTES_MAX, UNWRITTEN
from holdfast.core.procfs import read_process, read_text
from holdfast.supervise.records import Record

TAIL_BYTES = 4096  # enough for the last lines of a log
AFTER_FAREWELL = 3  # lines at the end of a log among which its own last words are looked for


class Process(Protocol):
    """One living process."""

    @property
    def pid(self) -> int: ...

    def send(self, number: int) -> None:
        """Signal it; nothing happens if it is gone."""

    def kill(self) -> None:
        """SIGKILL to it and to all that it started in its session."""

    def on_exit(self, told: Callable[[int | None], None]) -> None:
        """Call `told` once, from the event loop, with the exit status (negative: the signal; None: not known)."""


class Processes(Protocol):
    """Where processes come from."""

    def spawn(self, name: str, command: Sequence[str]) -> Process:
        """Start one, or raise OSError."""

    def adopt(self, record: Record) -> Process | None:
        """The process a record speaks of, if it lives."""

    def last_line(self, name: str) -> str:
        """The last thing the process logged."""


@dataclass(slots=True)
class LocalProcess:
    """A process of this machine, held by its pidfd."""

    pid: int
    pidfd: int
    child: subprocess.Popen[bytes] | None = None  # None: adopted, so its exit status goes to another
    leads: bool = False  # a session of its own, so that what is in it was started by it

    def send(self, number: int) -> None:
        if self.pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        # The group first: a rank must not see its leader die and go on.
        if self.pidfd >= 0 and self.leads:
            kill_group(self.pid)
        self.send(signal.SIGKILL)

    def on_exit(self, told: Callable[[int | None], None]) -> None:
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self.pidfd)
            self._kill_rest()
            os.close(self.pidfd)
            self.pidfd = -1
            told(self.child.wait() if self.child is not None else None)

        loop.add_reader(self.pidfd, gone)

    def _kill_rest(self) -> None:
        """Ranks that outlived it, while its pid is still its own: our child is not reaped yet, and an adopted one's
        pid is nobody's for as long as its group has members."""
        if not self.leads:
            return
        stat = read_process(self.pid)
        if self.child is not None or stat is None or stat.state in "ZX":
            kill_group(self.pid)
            kill_session(self.pid)


@dataclass(frozen=True, slots=True)
class LocalProcesses:
    """Real processes, whose output goes to `logs/NAME.log`."""

    logs: Path
    environ: dict[str, str] | None = field(default=None)

    def spawn(self, name: str, command: Sequence[str]) -> LocalProcess:
        """Must run in the main thread: the kernel ties a child's life to the *thread* that made it."""
        with self._open_log(name) as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environ,
            )
        return LocalProcess(child.pid, os.pidfd_open(child.pid), child, leads=True)

    def adopt(self, record: Record) -> LocalProcess | None:
        if record.pid <= 0:
            return None
        try:
            pidfd = os.pidfd_open(record.pid)
        except OSError:
            return None
        # Asked after the pidfd was opened: a pid reused before or after has another start time.
        if not record.alive:
            os.close(pidfd)
            return None
        return LocalProcess(record.pid, pidfd, leads=leads_session(record.pid))

    def last_line(self, name: str) -> str:
        try:
            with self.path(name).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                return farewell(log.read().decode(errors="replace").strip().splitlines())
        except OSError:
            return ""

    def path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _open_log(self, name: str) -> _Log:
        """Where it cannot be had the process starts without one."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        try:
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.path(name)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > LOG_BYTES_MAX:  # it logged little at a time, and never looked
                    path.replace(path.with_suffix(".log.1"))
            return _Log(os.open(path, flags | os.O_CREAT, 0o600))
        except OSError as error:
            UNWRITTEN.failed("log", error)
            return _Log(os.open(os.devnull, flags))


@dataclass(slots=True)
class _Log:
    """An open log, closed here as soon as the child has its copy."""

    descriptor: int

    def __enter__(self) -> int:
        return self.descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


# What a logger of ours puts before its words: date, time, name, level.
_LOG_HEAD = re.compile(r"^\d{4}-\d\d-\d\d [\d:,.]+ \S+ [A-Z]+ ")
_LAST_WORDS = re.compile(r"^holdfast |^\d{4}-\d\d-\d\d [\d:,.]+ \S+ CRITICAL ")


def farewell(lines: Sequence[str]) -> str:
    """The last line; but a role of ours says why it ends, and a library may still speak as it is unloaded, or a helper
    of its own that outlives it."""
    said = (line for line in reversed(lines[-AFTER_FAREWELL:]) if _LAST_WORDS.match(line))
    return next(said, lines[-1] if lines else "").strip()


def exit_words(status: int | None, last_line: str) -> str:
    """How a process ended, for people."""
    last_line = _LOG_HEAD.sub("", last_line)
    if status is None:
        return "ended"
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
        return f"signal {-status}"
    if status == REFUSED and last_line:
        return last_line  # a whole sentence, written to be read
    return f"exited with {status}: {last_line}" if status and last_line else f"exited with {status}"


# -- a process and all it started: killed together, so that no rank outlives its engine (facts 2, 34)


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
