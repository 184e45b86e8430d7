"""Held streams: their order, their bounds, their time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.routing.table import Standing
from holdfast.streams.holds import HoldQueue

FRESH_MAX = 3


class HoldMachine(RuleBasedStateMachine):
    """Against plain lists, one per standing."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: HoldQueue[int] = HoldQueue(FRESH_MAX)
        self.lists: dict[Standing, list[tuple[int, float]]] = {standing: [] for standing in Standing}
        self.now_s = 0.0
        self.numbers = 0

    @property
    def all(self) -> list[tuple[int, float]]:
        return self.lists[Standing.RESUMED] + self.lists[Standing.SUSPECT] + self.lists[Standing.FRESH]

    def keep(self, keep: Callable[[tuple[int, float]], bool]) -> None:
        self.lists = {standing: [item for item in items if keep(item)] for standing, items in self.lists.items()}

    @rule(ago_s=st.sampled_from([0.0, 0.0, 0.5, 2.0]), standing=st.sampled_from(Standing))
    def hold(self, ago_s: float, standing: Standing) -> None:
        """As a new one, or as one that comes back and stands where it stood."""
        self.numbers += 1
        since_s = self.now_s - ago_s
        taken = self.queue.hold(self.numbers, since_s, standing)
        assert taken is (standing is not Standing.FRESH or len(self.lists[standing]) < FRESH_MAX)
        if taken:
            self.lists[standing].append((self.numbers, since_s))
            self.lists[standing].sort(key=lambda item: item[1])

    @rule()
    def take(self) -> None:
        first = self.queue.first()
        assert (first.stream if first else None) == (self.all[0][0] if self.all else None)
        if first is not None:
            self.queue.drop(first.stream)
            self.lists[first.standing].pop(0)

    @rule(number=st.integers(1, 30))
    def cancel(self, number: int) -> None:
        self.queue.drop(number)
        self.keep(lambda item: item[0] != number)

    @rule(seconds=st.floats(0.1, 3.0))
    def overdue(self, seconds: float) -> None:
        self.now_s += seconds
        late = [held.stream for held in self.queue.overdue(self.now_s, lambda held: 3.0)]
        assert late == [number for number, since_s in self.all if self.now_s - since_s >= 3.0]
        self.keep(lambda item: self.now_s - item[1] < 3.0)

    @invariant()
    def same_order(self) -> None:
        assert [held.stream for held in self.queue] == [number for number, _ in self.all]
        assert len(self.queue) == len(self.all)
        assert self.queue.suspects == len(self.lists[Standing.SUSPECT])
        assert all(held.stream in self.queue for held in self.queue)


HoldMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHoldMachine = HoldMachine.TestCase


def test_a_stream_is_held_once() -> None:
    """Holding a held stream is our own bug, as new or as resumed."""
    queue: HoldQueue[str] = HoldQueue(1)
    queue.hold("s", 0.0, Standing.FRESH)
    with pytest.raises(AssertionError, match="held once"):
        queue.hold("s", 0.0, Standing.RESUMED)


def test_those_who_left_cost_no_memory() -> None:
    """A line that people join and leave all day is as long as those who stand in it."""
    queue: HoldQueue[int] = HoldQueue(10)
    queue.hold(-1, 0.0, Standing.FRESH)
    for number in range(10_000):
        queue.hold(number, 1.0, Standing.FRESH)
        queue.drop(number)
    assert len(queue._heap) < 100
