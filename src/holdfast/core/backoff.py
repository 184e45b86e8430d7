"""Computes the waits between attempts, for everything that retries after a failure. Waits double up to a bound. Where
many processes wait for one peer, each wait is shortened at random, so that they do not all reconnect at once."""

from __future__ import annotations

import random

# The first retry is too soon for a user to notice; the last ones are too rare to be a load.
FIRST_S = 0.05
LAST_S = 1.0
_DOUBLINGS_MAX = 30  # a float overflows after a thousand


def backoff_s(failures: int, first_s: float, last_s: float) -> float:
    """Return the wait after this many failures in a row: 0 after none, `first_s` after one, doubling up to `last_s`."""
    return 0.0 if failures <= 0 else min(last_s, first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX))


class Backoff:
    """A counter of failures that gives the next wait, shortened at random by up to a half."""

    def __init__(self, rng: random.Random, first_s: float = FIRST_S, last_s: float = LAST_S) -> None:
        self._rng = rng
        self._first_s = first_s
        self._last_s = last_s
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        self._failures += 1
        return backoff_s(self._failures, self._first_s, self._last_s) * self._rng.uniform(0.5, 1.0)


class RestartBackoff:
    """The waits before restarts of one process: 0 after the first death, then growing; 0 again after a minute without a
    death."""

    QUIET_S = 60.0

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._deaths = 0
        self._started_s = 0.0

    def next_s(self, now_s: float) -> float:
        """Return the wait after a death or a failed start."""
        if now_s - self._started_s > self.QUIET_S:
            self._deaths = 0
        wait_s = backoff_s(self._deaths, self._first_s, self._last_s)
        self._deaths += 1
        self._started_s = now_s + wait_s
        return wait_s
