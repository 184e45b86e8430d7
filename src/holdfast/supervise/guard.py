"""Ties processes that outlive their starter to a new one: `python -m holdfast.supervise.guard OWNER PID:START_TICKS …`.

A foreground `up` promises that nothing outlives it. What it starts itself keeps that promise through the kernel; what
it adopted from a detached supervisor cannot be tied that way, so this small process waits for the owner's end and then
kills what is left. After an orderly end nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

from holdfast.core.procfs import read_process
from holdfast.supervise.processes import kill_group, leads_session


def main(argv: list[str]) -> int:
    owner = _hold(int(argv[0]))
    marks = [tuple(map(int, text.split(":"))) for text in argv[1:]]
    held = [(pid, pidfd) for pid, ticks in marks if (pidfd := _hold(pid, ticks)) is not None]
    leaders = [pid for pid, _ in held if leads_session(pid)]
    if owner is not None:
        select.select([owner], [], [])  # unbounded on purpose: the owner lives as long as it likes
    for pid, pidfd in held:
        if select.select([pidfd], [], [], 0)[0]:
            continue  # it ended before, and its supervisor saw to what it left
        if pid in leaders:
            kill_group(pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return 0


def _hold(pid: int, start_ticks: int | None = None) -> int | None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    stat = read_process(pid)
    return pidfd if stat is not None and start_ticks in (None, stat.start_ticks) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
