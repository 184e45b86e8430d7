"""How soon a place comes free, from how soon the last ones did: when to tell a refused client to come back. Pure."""

from __future__ import annotations

# Only a hint, but clients obey it: sooner than a second would be a burden, later than half a minute a lost client.
RETRY_AFTER_S_MIN = 1.0
RETRY_AFTER_S_MAX = 30.0
# How much one gap counts against those before it: about the last ten matter.
WEIGHT = 0.1


class Pace:
    """The gaps between places that came free while somebody waited for one."""

    __slots__ = ("_gap_s", "_last_s")

    def __init__(self) -> None:
        self._last_s = -1.0  # before the first
        self._gap_s = 0.0

    def came_free(self, now_s: float) -> None:
        if self._last_s >= 0.0:
            gap_s = min(now_s - self._last_s, RETRY_AFTER_S_MAX)
            self._gap_s += WEIGHT * (gap_s - self._gap_s)
        self._last_s = now_s

    def retry_after_s(self, waiting: int) -> float:
        """When whoever comes now, behind `waiting` others, could have a place."""
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, self._gap_s * (waiting + 1)))
