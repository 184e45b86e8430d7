"""How long an engine has been stuck, as its worker's beats tell it."""

from __future__ import annotations

from holdfast.core.procfs import ThreadTimes
from holdfast.engines.contract import Progress

# Between two looks.
BEAT_S = 0.2


class StuckMeter:
    """How long work has been there without a step, less the time the engine's thread stood in line for a CPU.

    Pure; sampled at every wake-up. A thread that spins (a hung GPU wait) uses CPU and is stuck; one that is
    runnable and gets no CPU is starved, and is not (facts 24, 31). Without schedstat all time counts.
    """

    __slots__ = ("_at", "_steps", "_stuck_s", "_thread", "_times", "_worked")

    def __init__(self) -> None:
        self._at = 0.0
        self._steps = -1
        self._worked = False
        self._thread: tuple[int, int] | None = None
        self._times: ThreadTimes | None = None
        self._stuck_s = 0.0

    def sample(self, now: float, progress: Progress, times: ThreadTimes | None) -> float:
        """Take one look; answer `stuck_ms`."""
        works = progress.running + progress.waiting > 0
        if not works or not self._worked or progress.steps != self._steps:
            self._stuck_s = 0.0
        else:
            # What this thread overslept is not counted: it was starved, and likely the engine with it.
            gap_s = now - self._at
            same = progress.thread == self._thread
            counted_s = min(gap_s, 1.25 * BEAT_S) if same else 0.0
            self._stuck_s += max(0.0, counted_s - self._waited_s(gap_s, times))
        self._at, self._steps, self._worked = now, progress.steps, works
        self._thread, self._times = progress.thread, times
        return self._stuck_s * 1000

    def _waited_s(self, gap_s: float, times: ThreadTimes | None) -> float:
        last = self._times
        if times is None or last is None:
            return 0.0
        # The kernel books a wait when it ends: one that still goes on shows as runnable without new CPU time.
        if times.state == "R" and times.cpu_ns == last.cpu_ns:
            return gap_s
        return (times.run_delay_ns - last.run_delay_ns) / 1e9
