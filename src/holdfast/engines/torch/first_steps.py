"""The first steps after a wake, for the log: how many positions, how long to launch, when over. After them it is still.

Always true: nothing is kept beyond STEPS of them, and a step later than that costs one comparison.
"""

from __future__ import annotations

import logging

STEPS = 6  # the canary's, those of the streams that come back, and a plain one to compare with

log = logging.getLogger("holdfast.engine")


class FirstSteps:
    """From `woken_s` on."""

    def __init__(self, woken_s: float) -> None:
        self._woken_s = woken_s
        self._launched: list[tuple[int, float, float]] = []
        self._landed: list[float] = []

    def launched(self, positions: int, began_s: float, ended_s: float) -> None:
        if len(self._launched) < STEPS:
            self._launched.append((positions, began_s, ended_s))

    def landed(self, now_s: float) -> None:
        if len(self._landed) < STEPS:
            self._landed.append(now_s)
            if len(self._landed) == STEPS:
                log.info("first steps after the wake: %s", "; ".join(self.words()))

    def words(self) -> list[str]:
        told = []
        for (positions, began_s, ended_s), landed_s in zip(self._launched, self._landed, strict=False):
            begun_ms, over_ms = ((each_s - self._woken_s) * 1000 for each_s in (began_s, landed_s))
            launch_ms = (ended_s - began_s) * 1000
            told.append(f"{positions} positions at {begun_ms:.1f} ms, launched in {launch_ms:.1f}, over {over_ms:.1f}")
        return told
