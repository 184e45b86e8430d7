"""Where a request is, in a word, and its place in line while it waits. Pure.

Always true: a state is told from where a request's streams are at that moment, and stored nowhere; of several streams
the one that is furthest tells; a place counts requests, not streams, from 1.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """Where a request is."""

    QUEUED = "QUEUED"  # it waits for a place, behind others or alone
    PROVISIONING = "PROVISIONING"  # no worker of its model serves
    HELD = "HELD"  # nor does any, though one is up; and no other comes
    DISPATCHED = "DISPATCHED"  # it is on a worker, and no token of it has come
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"  # its client left, or somebody ended it


WAITS = (State.QUEUED, State.PROVISIONING, State.HELD)


class Waiting(NamedTuple):
    """How a request waits."""

    state: State  # one of `WAITS`
    place: int
    since_s: float
    wanted: bool  # its model is brought up when it is asked for: that may take minutes
    why: str = ""  # no worker of its model is there yet, as whoever brings one up says it
