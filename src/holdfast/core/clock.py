"""The real clocks behind `core.ports.Clock`."""

from __future__ import annotations

import time


class SystemClock:
    """The kernel's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()
