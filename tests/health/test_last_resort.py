"""The rule that keeps a set's last workers serving: a table of cases, and what holds for any set."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health.last_resort import DOUBTS, NONE, SPARE, WRONG, Member, doubt_of, kept
from holdfast.health.standing import Cause

BREAKER, FAILING = DOUBTS[Cause.BREAKER], DOUBTS[Cause.CANARY_FAILING]


def sound(name: str) -> Member[str]:
    return Member(name, 1.0, NONE)


def doubted(name: str, doubt: int | None, **more: Any) -> Member[str]:
    return Member(name, 0.0, doubt, **more)


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
def test_which_workers_serve_on(members: list[Member[str]], coming: bool, names: str) -> None:
    """A check takes neither the last worker nor most of them."""
    assert kept(members, coming=coming) == set(names)


@st.composite
def sets(draw: st.DrawFn) -> list[Member[int]]:
    def member(name: int) -> Member[int]:
        weight = draw(st.sampled_from([0.0, 0.5, 1.0]))
        doubts = st.sampled_from([None, SPARE, *sorted({d for d in DOUBTS.values() if d is not None})])
        return Member(name, weight, draw(doubts), draw(st.booleans()))

    return [member(name) for name in range(draw(st.integers(0, 7)))]


@given(members=sets(), coming=st.booleans())
def test_what_holds_for_any_set(members: list[Member[int]], coming: bool) -> None:
    """No set of workers that could serve is left with none, unless only wrong answers are left and a standby comes."""
    chosen = {member.name: member for member in members if member.name in kept(members, coming=coming)}
    able = [member for member in members if member.doubt is not None]
    serving = [member for member in able if member.weight]
    assert all(not member.weight and member.doubt is not None for member in chosen.values())
    if 2 * len(serving) >= len(able):
        assert not chosen
    elif not serving:
        assert chosen or (coming and all(member.doubt == WRONG for member in able))
    assert len({member.doubt for member in chosen.values()}) <= 1
    if serving:
        assert not any(member.out or member.doubt == WRONG for member in chosen.values())


@pytest.mark.parametrize(
    ("causes", "heard_s", "doubt"),
    [
        ([], 0.0, NONE),
        ([Cause.UNCHECKED], 0.0, None),  # its first check is under way
        ([Cause.UNCHECKED], 5.0, DOUBTS[Cause.UNCHECKED]),
        ([Cause.BREAKER, Cause.SLOW], 5.0, BREAKER),  # the worst counts
        ([Cause.WRONG, Cause.GONE], 5.0, None),
    ],
)
def test_how_much_the_causes_say_against_a_worker(causes: list[Cause], heard_s: float, doubt: int | None) -> None:
    """The worst counts, and some say that it cannot serve at all."""
    assert doubt_of(dict.fromkeys(causes, "why"), heard_s) == doubt


def test_every_cause_has_its_doubt() -> None:
    """A cause without one would crash control when it is held."""
    assert set(DOUBTS) == set(Cause)
