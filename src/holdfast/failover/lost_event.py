"""The event that says a lock is lost: set by somebody, or by itself when its time is over.

Always true: whoever asks `is_set` after the deadline is told so, however late the event loop is. A process that was
frozen wakes up in the middle of anything, ahead of every timer, and must not emit one more token.
Once set it stays set; the deadline only ever moves later, and only while there is time left.
"""

from __future__ import annotations

import asyncio

from holdfast.core.ports import Clock


class LostEvent(asyncio.Event):
    """Ends at `deadline_s` of the loop's clock; None: only when it is set.

    Asked of `clock`, not of the loop: uvloop's stands still inside a callback, where a frozen process wakes."""

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
        """Hold out until then; False if it is too late."""
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
