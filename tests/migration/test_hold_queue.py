"""Held streams: their order, their bounds, their time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.migration.holds import HoldQueue

FRESH_MAX = 3


class HoldMachine(RuleBasedStateMachine):
    """Against two plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: HoldQueue[int] = HoldQueue(FRESH_MAX)
        self.resumed: list[tuple[int, float]] = []
        self.fresh: list[tuple[int, float]] = []
        self.now_s = 0.0
        self.numbers = 0

    @rule(wait_s=st.floats(0.1, 5.0), resumed=st.booleans())
    def hold(self, wait_s: float, resumed: bool) -> None:
        self.numbers += 1
        deadline_s = self.now_s + wait_s
        taken = self.queue.hold(self.numbers, self.now_s, deadline_s, resumed=resumed)
        assert taken is (resumed or len(self.fresh) < FRESH_MAX)
        if taken:
            (self.resumed if resumed else self.fresh).append((self.numbers, deadline_s))

    @rule()
    def take(self) -> None:
        first = self.queue.first()
        ahead = self.resumed or self.fresh
        assert first == (ahead[0][0] if ahead else None)
        if first is not None:
            self.queue.drop(first)
            ahead.pop(0)

    @rule(number=st.integers(1, 30))
    def cancel(self, number: int) -> None:
        self.queue.drop(number)
        self.resumed = [item for item in self.resumed if item[0] != number]
        self.fresh = [item for item in self.fresh if item[0] != number]

    @rule(seconds=st.floats(0.1, 3.0))
    def overdue(self, seconds: float) -> None:
        self.now_s += seconds
        late = [held.stream for held in self.queue.overdue(self.now_s)]
        assert late == [number for number, deadline_s in self.resumed + self.fresh if deadline_s <= self.now_s]
        self.resumed = [item for item in self.resumed if item[1] > self.now_s]
        self.fresh = [item for item in self.fresh if item[1] > self.now_s]

    @invariant()
    def same_order(self) -> None:
        assert [held.stream for held in self.queue] == [number for number, _ in self.resumed + self.fresh]
        assert len(self.queue) == len(self.resumed) + len(self.fresh)
        assert all(held.stream in self.queue for held in self.queue)


HoldMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHoldMachine = HoldMachine.TestCase


def test_a_stream_is_held_once() -> None:
    """Holding a held stream is our own bug, as new or as resumed."""
    queue: HoldQueue[str] = HoldQueue(1)
    queue.hold("s", 0.0, 1.0, resumed=False)
    with pytest.raises(AssertionError, match="held once"):
        queue.hold("s", 0.0, 1.0, resumed=True)
