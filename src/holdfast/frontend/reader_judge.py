"""Whether a process that was given a body to read will still answer. Pure: it is told what the kernel says.

Always true: one that may not run is given up within a second, one that sleeps over its work within a few, and one that
runs when it has had more of a CPU than its body can take; time in line for a CPU is never held against it.
"""

from __future__ import annotations

from holdfast.core.procfs import ThreadTimes

LOOK_S = 0.1  # between two looks
# In a row that find it stopped: half a second, as for a vault. Who stops one by hand and at once lets it run is spared.
STOPPED_LOOKS = 5
# In a row in which it neither ran nor wanted to: two seconds. It has all of its body, and its asker takes all it says.
IDLE_LOOKS = 20
# To start and to read a small body takes 0.3 s of a slow core; the worst that 1 MiB can hold (empty lists, and an error
# to be explained), 0.4 s.
CPU_S = 2.0
CPU_S_PER_MIB = 1.0


class ReaderJudge:
    """Judges one reader over one body."""

    def __init__(self, body_bytes: int) -> None:
        self._cpu_ns_max = (CPU_S + CPU_S_PER_MIB * body_bytes / 2**20) * 1e9
        self._first: ThreadTimes | None = None
        self._last: ThreadTimes | None = None
        self._stopped = 0
        self._idle = 0

    def look(self, stopped: bool, times: ThreadTimes | None) -> str:
        """One look at it; "stopped" or "stuck": it is to be killed. `times`: None where the kernel does not tell."""
        self._stopped = self._stopped + 1 if stopped else 0
        if self._stopped >= STOPPED_LOOKS:
            return "stopped"
        if stopped or times is None:
            return ""
        last, self._last = self._last, times
        self._first = self._first or times
        self._idle = self._idle + 1 if times.state == "S" and times == last else 0
        used_up = times.cpu_ns - self._first.cpu_ns > self._cpu_ns_max
        return "stuck" if used_up or self._idle >= IDLE_LOOKS else ""
