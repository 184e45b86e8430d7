"""The event that says a lock is lost: set by a caller, or by its deadline.

Always true: after the deadline `is_set` returns True, however late the event loop is. A process that was frozen
continues in the middle of any function, before its timers run, and must not emit one more token. Once set, the event
stays set; its deadline only moves later, and only before it has passed.
"""

from __future__ import annotations

import asyncio

from holdfast.core.ports import Clock


class LostEvent(asyncio.Event):
    """An event that becomes set at `deadline_s` (None: only by `set`).

    `is_set` reads `clock`, not the loop's time: uvloop's does not advance within a callback, and a frozen process may
    continue inside one."""

    def __init__(self, clock: Clock, deadline_s: float | None = None) -> None:
        super().__init__()
        self._clock = clock
        self._loop_clock = asyncio.get_running_loop()
        self._deadline_s = deadline_s
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    @property
    def deadline_s(self) -> float | None:
        return self._deadline_s

    def extend(self, deadline_s: float) -> bool:
        """Move the deadline to `deadline_s` if that is later; return False if the event is already set."""
        if self.is_set():
            return False
        if self._deadline_s is None or deadline_s > self._deadline_s:
            self._deadline_s = deadline_s
            self._arm()
        return not self.is_set()

    def is_set(self) -> bool:
        if self._deadline_s is not None and self._clock.monotonic_s() >= self._deadline_s:
            self.set()
        return super().is_set()

    def set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().set()

    async def wait(self) -> bool:  # type: ignore[override]
        if self.is_set():
            return True
        return await super().wait()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._deadline_s is not None:
            self._timer = self._loop_clock.call_at(self._deadline_s, self.set)
