"""Epochs: each leader's number, larger than every leader's before it. Pure."""

from __future__ import annotations


def next_epoch(last: int, unix_ms: int) -> int:
    """The clock keeps epochs apart that do not know of each other; the count keeps them growing if the clock jumps."""
    return max(last + 1, unix_ms)
