"""A process's log, rotated by size, and the counts of failed writes (log, record, journal), for `ps` and metrics.

A process logs to standard error, which its supervisor has opened as `logs/NAME.log`. Several processes may share a file
(a vault, its keeper and their launcher). The process that finds the file too long renames it to `NAME.log.1` and opens
a new one; the others switch when they write next. A process that finds the file removed also opens a new one.

Always true: a line that cannot be written is counted and dropped, never raised; at most two files of `LOG_BYTES_MAX`
are kept; a file that the user redirected to is never touched. The counts last as long as the process; `summary` reports
a failure until a later write of the same kind succeeds.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from pathlib import Path

# Each is on the metrics page from the start, so that alerts can refer to it.
KINDS = ("journal", "log", "record")


class Unwritten:
    def __init__(self) -> None:
        self.totals: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._why: dict[str, str] = {}

    def failed(self, kind: str, error: OSError) -> None:
        self.totals[kind] += 1
        self._why[kind] = error.strerror or str(error)

    def written(self, kind: str) -> None:
        self._why.pop(kind, None)

    @property
    def summary(self) -> str:
        """Return one line about the current failures; "" if there are none."""
        return "; ".join(f"its {kind} cannot be written: {why}" for kind, why in sorted(self._why.items()))


# One per process, like its log.
UNWRITTEN = Unwritten()


def say(text: str) -> bool:
    """Write a line to standard error, unbuffered; return whether that succeeded. Never raises OSError: a failed write
    must not disturb a process that exits or a supervisor."""
    try:
        os.write(2, f"{text}\n".encode(errors="replace"))
    except OSError as error:
        UNWRITTEN.failed("log", error)
        return False
    UNWRITTEN.written("log")
    return True


LOG_BYTES_MAX = 10 * 1024 * 1024  # days of a busy engine; two files are kept


class OwnLog(logging.Handler):
    """The root logger's handler, which writes to standard error and rotates its file."""

    def __init__(self, form: str, date_form: str | None = None, bytes_max: int = LOG_BYTES_MAX) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(form, date_form))
        self.path = log_path()
        self._bytes_max = bytes_max

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except (TypeError, ValueError, KeyError):  # a bad format string of ours must not end a stream
            self.handleError(record)
            return
        say(text)
        if self.path is not None:
            turn_over(self.path, self._bytes_max)


def log_to_own_file(level: str, form: str, date_form: str | None = None) -> None:
    logging.basicConfig(level=level, handlers=[OwnLog(form, date_form)])


def log_path(descriptor: int = 2) -> Path | None:
    """Return the path of standard error's file, if it is a log that our supervisor opened; otherwise None."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
    except OSError:
        return None
    path = path.with_suffix("") if path.suffix == ".1" else path  # renamed just before this process started
    return path if path.parent.name == "logs" and path.suffix == ".log" else None


def turn_over(path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Switch standard error to a new file if its file is too long or was removed, or to the one that another process
    has opened."""
    try:
        now = os.fstat(2)
        if now.st_size <= bytes_max and now.st_nlink:
            return
        path.parent.mkdir(exist_ok=True, mode=0o700)
        if path.exists() and os.path.samestat(now, path.stat()):
            path.replace(path.with_suffix(".log.1"))
        fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for descriptor in (1, 2):
            if os.path.samestat(now, os.fstat(descriptor)):
                os.dup2(fresh, descriptor)
        os.close(fresh)
    except OSError as error:
        UNWRITTEN.failed("log", error)
