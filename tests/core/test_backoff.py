"""Waits between attempts double, are bounded and never overflow."""

from __future__ import annotations

import random

from holdfast.core.backoff import FIRST_S, LAST_S, Backoff, backoff_s


def test_waits_double_up_to_the_last() -> None:
    """Each wait is twice the one before, up to the longest."""
    assert [backoff_s(failures, 0.1, 1.0) for failures in range(7)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff_s(1_000_000, 0.1, 10.0) == 10.0


def test_each_wait_is_shortened_by_up_to_a_half_and_a_success_begins_again() -> None:
    """Jitter shortens a wait, and a success starts over."""
    backoff = Backoff(random.Random(1))
    full_s = [backoff_s(failures, FIRST_S, LAST_S) for failures in range(1, 20)]
    drawn_s = [backoff.next_s() for _ in full_s]
    assert all(most_s / 2 <= wait_s <= most_s for wait_s, most_s in zip(drawn_s, full_s, strict=True))
    backoff.reset()
    assert backoff.next_s() <= FIRST_S
