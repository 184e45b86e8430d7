"""Growing waits between attempts, with jitter so that a restarted store is not met by everyone at once."""

from __future__ import annotations

import random

# The first retry is soon enough not to be felt; the last one rare enough not to be a load.
FIRST_S = 0.05
LAST_S = 1.0


class Backoff:
    """Waits of 50 ms doubling to 1 s, each shortened by up to a half at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next_s = FIRST_S

    def reset(self) -> None:
        self._next_s = FIRST_S

    def next_s(self) -> float:
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, LAST_S)
        return wait_s
