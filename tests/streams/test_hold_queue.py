"""Held streams: their order, their bounds, their time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.core.tiers import Tier
from holdfast.routing.table import PriorityClass
from holdfast.streams.flight import HoldQueue, RetryAdvice

FRESH_MAX = 3
Waiting = tuple[int, float, Tier]  # its number, since when, and of which tier


class HoldMachine(RuleBasedStateMachine):
    """Against plain lists, one per priority."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: HoldQueue[int] = HoldQueue(FRESH_MAX)
        self.lists: dict[PriorityClass, list[Waiting]] = {priority: [] for priority in PriorityClass}
        self.now_s = 0.0
        self.numbers = 0

    @property
    def all(self) -> list[Waiting]:
        return self.lists[PriorityClass.RESUMED] + self.lists[PriorityClass.ON_TRIAL] + self.lists[PriorityClass.FRESH]

    def keep(self, keep: Callable[[Waiting], bool]) -> None:
        self.lists = {priority: [item for item in items if keep(item)] for priority, items in self.lists.items()}

    @rule(
        ago_s=st.sampled_from([0.0, 0.0, 0.5, 2.0]), priority=st.sampled_from(PriorityClass), tier=st.sampled_from(Tier)
    )
    def hold(self, ago_s: float, priority: PriorityClass, tier: Tier) -> None:
        """As a new one, or as one that comes back and stands where it stood."""
        self.numbers += 1
        since_s = self.now_s - ago_s
        line = self.lists[priority]
        line.append((self.numbers, since_s, tier))
        line.sort(key=lambda item: (item[2], item[1]))
        leaves = line.pop()[0] if priority is PriorityClass.FRESH and len(line) > FRESH_MAX else None
        assert self.queue.hold(self.numbers, tier, since_s, priority) == leaves

    @rule()
    def take(self) -> None:
        first = self.queue.first()
        assert (first.item if first else None) == (self.all[0][0] if self.all else None)
        if first is not None:
            self.queue.drop(first.item)
            next(line for line in self.lists.values() if line).pop(0)

    @rule(number=st.integers(1, 30))
    def cancel(self, number: int) -> None:
        self.queue.drop(number)
        self.keep(lambda item: item[0] != number)

    @rule(seconds=st.floats(0.1, 3.0))
    def overdue(self, seconds: float) -> None:
        self.now_s += seconds
        late = [held.item for held in self.queue.overdue(self.now_s, lambda held: 3.0)]
        assert late == [number for number, since_s, _ in self.all if self.now_s - since_s >= 3.0]
        self.keep(lambda item: self.now_s - item[1] < 3.0)

    @invariant()
    def same_order(self) -> None:
        assert [held.item for held in self.queue] == [number for number, *_ in self.all]
        assert len(self.queue) == len(self.all)
        assert self.queue.suspects == len(self.lists[PriorityClass.ON_TRIAL])
        assert all(held.item in self.queue for held in self.queue)


HoldMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHoldMachine = HoldMachine.TestCase


def test_a_stream_is_held_once() -> None:
    """Holding a held stream is our own bug, as new or as resumed."""
    queue: HoldQueue[str] = HoldQueue(1)
    queue.hold("s", Tier.STANDARD, 0.0, PriorityClass.FRESH)
    with pytest.raises(AssertionError, match="held once"):
        queue.hold("s", Tier.STANDARD, 0.0, PriorityClass.RESUMED)


def test_a_choice_whose_answer_has_begun_is_not_pushed_out() -> None:
    """Its client reads the other choices: the last of the others leaves, and with none the newcomer itself."""
    queue: HoldQueue[str] = HoldQueue(2, stays=lambda stream: stream.startswith("answering"))
    assert queue.hold("low", Tier.BEST_EFFORT, 1.0, PriorityClass.FRESH) is None
    assert queue.hold("answering", Tier.BEST_EFFORT, 2.0, PriorityClass.FRESH) is None
    assert queue.hold("high", Tier.PREMIUM, 3.0, PriorityClass.FRESH) == "low"
    assert queue.hold("answering too", Tier.STANDARD, 4.0, PriorityClass.FRESH) == "answering too"
    assert queue.hold("higher", Tier.PREMIUM, 2.0, PriorityClass.FRESH) == "high"


def test_where_no_place_came_free_yet_a_client_is_not_asked_back_at_once() -> None:
    """It is told as long as none has, for each who stands before it, half a minute at most; and a second for each, if
    that is not known either."""
    pace = RetryAdvice()
    assert [pace.retry_after_s(waiting, 100.0, 0.0) for waiting in (0, 4, 1000)] == [1.0, 5.0, 30.0]
    assert [pace.retry_after_s(0, 100.0 + after_s, 100.0) for after_s in (5.0, 12.0, 300.0)] == [5.0, 12.0, 30.0]
    assert pace.retry_after_s(3, 105.0, 100.0) == 20.0


def test_a_client_is_asked_back_as_soon_as_places_came_free_lately() -> None:
    """The first gap counts in full; what was taken while there were places, and idle hours, are no gaps; and where they
    stop coming the time since the last one goes before what was usual."""
    pace = RetryAdvice()
    for _ in range(64):
        pace.came_free(10.0, 0.0)
    pace.came_free(3600.0 + 4.0, 3600.0)
    assert pace.retry_after_s(0, 3604.0, 3600.0) == 4.0
    for second in range(5, 60):
        pace.came_free(3600.0 + second, 3600.0)
    assert 1.0 <= pace.retry_after_s(0, 3660.0, 3600.0) < 1.1
    assert pace.retry_after_s(0, 3679.0, 3600.0) == 20.0


def test_those_that_stand_apart_hold_up_no_other_and_rejoin_where_they_would_stand() -> None:
    """They are held like all others, and are not the first in line until they rejoin it."""
    queue: HoldQueue[str] = HoldQueue(FRESH_MAX)
    queue.hold_for_group("low", Tier.BEST_EFFORT, 1.0)
    queue.hold_for_group("high", Tier.PREMIUM, 2.0)
    queue.hold("later", Tier.STANDARD, 3.0, PriorityClass.RESUMED)
    assert len(queue) == 3
    assert [held.item for held in queue.held_for_group()] == ["high", "low"]
    assert [held.item for held in queue] == ["high", "low", "later"]
    first = queue.first()
    assert first is not None
    assert first.item == "later"
    for stream in ("low", "high"):
        queue.release_to_queue(stream, PriorityClass.RESUMED)
    assert [held.item for held in queue] == ["high", "later", "low"]
    queue.hold_for_group("gone", Tier.STANDARD, 4.0)
    queue.drop("gone")
    assert "gone" not in queue
    assert [held.item for held in queue.overdue(10.0, lambda held: 8.0)] == ["high", "low"]
