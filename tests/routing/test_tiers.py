"""A line keeps those who stand first, whoever comes and goes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.core.tiers import Tier
from holdfast.routing.tiers import TierQueue

TIERS = st.sampled_from(Tier)


def test_a_higher_tier_pushes_out_the_last_of_the_lowest() -> None:
    """Best effort first, its latest first; then standard; and premium itself is refused when all who wait are."""
    line: TierQueue[str] = TierQueue(3)
    assert line.join("b1", Tier.BEST_EFFORT, 1.0) is None
    assert line.join("b2", Tier.BEST_EFFORT, 2.0) is None
    assert line.join("s3", Tier.STANDARD, 3.0) is None
    assert line.join("b4", Tier.BEST_EFFORT, 4.0) == "b4"
    assert line.join("p5", Tier.PREMIUM, 5.0) == "b2"
    assert line.join("s6", Tier.STANDARD, 6.0) == "b1"
    assert line.join("s7", Tier.STANDARD, 7.0) == "s7"
    assert [waiting.item for waiting in line] == ["p5", "s3", "s6"]
    assert line.join("p8", Tier.PREMIUM, 8.0) == "s6"
    assert line.join("p9", Tier.PREMIUM, 9.0) == "s3"
    assert line.join("p10", Tier.PREMIUM, 10.0) == "p10"


def test_one_who_comes_back_stands_where_it_stood() -> None:
    """A worker turned it away: those of its tier who came later are behind it, and one of them leaves a full line."""
    line: TierQueue[str] = TierQueue(2)
    line.join("early", Tier.STANDARD, 1.0)
    line.leave("early")
    line.join("late", Tier.STANDARD, 2.0)
    line.join("later", Tier.STANDARD, 3.0)
    assert line.join("early", Tier.STANDARD, 1.0) == "later"
    assert [waiting.item for waiting in line] == ["early", "late"]


def test_a_line_without_places_refuses_everyone_and_one_without_a_bound_nobody() -> None:
    """Zero is a bound; None is for streams that ran before."""
    assert TierQueue[int](0).join(1, Tier.PREMIUM, 0.0) == 1
    endless: TierQueue[int] = TierQueue(None)
    assert [endless.join(item, Tier.BEST_EFFORT, 0.0) for item in range(3000)] == [None] * 3000
    assert len(endless) == 3000


class LineMachine(RuleBasedStateMachine):
    """The line against a plain list that is sorted every time."""

    @initialize(waiting_max=st.one_of(st.none(), st.integers(0, 5)))
    def begin(self, waiting_max: int | None) -> None:
        self.waiting_max = waiting_max
        self.line: TierQueue[int] = TierQueue(waiting_max)
        self.naive: list[tuple[Tier, float, int]] = []  # its number is its item
        self.joined = 0

    @rule(tier=TIERS, since_s=st.sampled_from([0.0, 1.0, 2.0, 3.0]))
    def joins(self, tier: Tier, since_s: float) -> None:
        self.joined += 1
        self.naive = sorted([*self.naive, (tier, since_s, self.joined)])
        out = None
        if self.waiting_max is not None and len(self.naive) > self.waiting_max:
            loser = self.naive.pop()
            out = loser[2]
            assert loser[:2] >= (tier, since_s)  # never by a lower tier, nor by a later one of its own
        assert self.line.join(self.joined, tier, since_s) == out

    @rule(pick=st.integers(0, 100))
    def leaves(self, pick: int) -> None:
        self.line.leave(-1)
        if self.naive:
            self.line.leave(self.naive.pop(pick % len(self.naive))[2])

    @rule()
    def first_gets_a_place(self) -> None:
        first = self.line.first()
        assert (first is None) == (not self.naive)
        if first is not None:
            assert first.item == self.naive.pop(0)[2]
            self.line.leave(first.item)

    @invariant()
    def is_the_same(self) -> None:
        if not hasattr(self, "line"):
            return
        assert [(w.tier, w.since_s, w.item) for w in self.line] == self.naive
        assert len(self.line) == len(self.naive)
        for tier in Tier:
            assert self.line.count(tier) == sum(1 for entry in self.naive if entry[0] is tier)


LineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestLine = LineMachine.TestCase
