"""A process's own log: lines to standard error, which a supervisor has opened as `logs/NAME.log`, turned over by size.

Several processes may share a file (a vault, its keeper and their launcher): whoever finds it too long sets it aside as
`NAME.log.1` and begins another, whoever finds it removed begins another, the others follow when they write next. Always
true: a line that cannot be written is counted and missed, never raised; no more than two lengths of a file are kept; a
file that somebody else chose (a redirection by hand) is never touched.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from holdfast.core.unwritten import UNWRITTEN, say

LOG_BYTES_MAX = 10 * 1024 * 1024  # days of a busy engine; twice this is kept


class OwnLog(logging.Handler):
    """For the root logger of a process of ours."""

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
    """Where standard error goes, if that is a log a supervisor of ours opened."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
    except OSError:
        return None
    path = path.with_suffix("") if path.suffix == ".1" else path  # set aside just before this process began
    return path if path.parent.name == "logs" and path.suffix == ".log" else None


def turn_over(path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Begin another file if standard error's is too long or was removed, or follow whoever has done so."""
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
