"""The rule that keeps a set's last workers serving: a table of cases, and what holds for any set."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health.last_resort import NONE, RANKS, SPARE, WRONG, ResortCandidate, last_resorts, rank_of
from holdfast.health.standing import HealthCause

BREAKER, FAILING = RANKS[HealthCause.BREAKER], RANKS[HealthCause.CANARY_FAILING]


def sound(name: str) -> ResortCandidate[str]:
    return ResortCandidate(name, 1.0, NONE)


def doubted(name: str, doubt: int | None, **more: Any) -> ResortCandidate[str]:
    return ResortCandidate(name, 0.0, doubt, **more)


@pytest.mark.parametrize(
    ("members", "coming", "names"),
    [
        ([doubted("a", BREAKER)], False, "a"),  # the only one
        ([doubted("a", BREAKER), sound("b")], False, ""),  # half of them have weight
        ([doubted("a", BREAKER), doubted("b", BREAKER), sound("c")], False, "ab"),  # most at once
        ([doubted("a", BREAKER), doubted("b", FAILING), sound("c")], False, "a"),  # the least doubtful
        ([doubted("a", BREAKER), doubted("b", BREAKER, out=True), sound("c")], False, "a"),  # b was out before
        ([doubted("a", BREAKER), doubted("b", BREAKER, out=True)], False, "ab"),  # none has weight: b too
        ([doubted("a", None)], False, ""),  # it cannot serve
        ([doubted("a", None), doubted("b", WRONG)], False, "b"),  # wrong answers, flagged, before none
        ([doubted("a", WRONG)], True, ""),  # a standby takes over at once
        ([doubted("a", WRONG), doubted("b", WRONG), sound("c")], False, ""),  # c serves
        ([doubted("a", BREAKER), doubted("b", SPARE)], False, "b"),  # nothing speaks against a spare
        ([], False, ""),
    ],
)
def test_which_workers_serve_on(members: list[ResortCandidate[str]], coming: bool, names: str) -> None:
    """A check takes neither the last worker nor most of them."""
    assert last_resorts(members, coming=coming) == set(names)


@st.composite
def sets(draw: st.DrawFn) -> list[ResortCandidate[int]]:
    def member(name: int) -> ResortCandidate[int]:
        weight = draw(st.sampled_from([0.0, 0.5, 1.0]))
        doubts = st.sampled_from([None, SPARE, *sorted({d for d in RANKS.values() if d is not None})])
        return ResortCandidate(name, weight, draw(doubts), draw(st.booleans()))

    return [member(name) for name in range(draw(st.integers(0, 7)))]


@given(members=sets(), coming=st.booleans())
def test_what_holds_for_any_set(members: list[ResortCandidate[int]], coming: bool) -> None:
    """No set of workers that could serve is left with none, unless only wrong answers are left and a standby comes."""
    chosen = {member.name: member for member in members if member.name in last_resorts(members, coming=coming)}
    able = [member for member in members if member.rank is not None]
    serving = [member for member in able if member.weight]
    assert all(not member.weight and member.rank is not None for member in chosen.values())
    if 2 * len(serving) >= len(able):
        assert not chosen
    elif not serving:
        assert chosen or (coming and all(member.rank == WRONG for member in able))
    assert len({member.rank for member in chosen.values()}) <= 1
    if serving:
        assert not any(member.out or member.rank == WRONG for member in chosen.values())


@pytest.mark.parametrize(
    ("causes", "heard_s", "doubt"),
    [
        ([], 0.0, NONE),
        ([HealthCause.UNCHECKED], 0.0, None),  # its first check is under way
        ([HealthCause.UNCHECKED], 5.0, RANKS[HealthCause.UNCHECKED]),
        ([HealthCause.BREAKER, HealthCause.SLOW], 5.0, BREAKER),  # the worst counts
        ([HealthCause.WRONG, HealthCause.GONE], 5.0, None),
    ],
)
def test_how_much_the_causes_say_against_a_worker(causes: list[HealthCause], heard_s: float, doubt: int | None) -> None:
    """The worst counts, and some say that it cannot serve at all."""
    assert rank_of(dict.fromkeys(causes, "why"), heard_s) == doubt


def test_every_cause_has_its_doubt() -> None:
    """A cause without one would crash control when it is held."""
    assert set(RANKS) == set(HealthCause)
