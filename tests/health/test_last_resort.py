"""The rule that keeps a set's last workers serving: a table of cases, and what holds for any set."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health.last_resort import (
    NONE,
    SPARE_UNFITNESS,
    UNFITNESS,
    WRONG,
    ResortCandidate,
    last_resorts,
    unfitness_of,
)
from holdfast.health.standing import HealthCause

BREAKER, FAILING = UNFITNESS[HealthCause.BREAKER], UNFITNESS[HealthCause.CANARY_FAILING]


def sound(name: str) -> ResortCandidate[str]:
    return ResortCandidate(name, 1.0, NONE)


def unfit(name: str, unfitness: int | None, **more: Any) -> ResortCandidate[str]:
    return ResortCandidate(name, 0.0, unfitness, **more)


@pytest.mark.parametrize(
    ("members", "coming", "names"),
    [
        ([unfit("a", BREAKER)], False, "a"),  # the only one
        ([unfit("a", BREAKER), sound("b")], False, ""),  # half of them have weight
        ([unfit("a", BREAKER), unfit("b", BREAKER), sound("c")], False, "ab"),  # most at once
        ([unfit("a", BREAKER), unfit("b", FAILING), sound("c")], False, "a"),  # the least unfit
        ([unfit("a", BREAKER), unfit("b", BREAKER, out=True), sound("c")], False, "a"),  # b was out before
        ([unfit("a", BREAKER), unfit("b", BREAKER, out=True)], False, "ab"),  # none has weight: b too
        ([unfit("a", None)], False, ""),  # it cannot serve
        ([unfit("a", None), unfit("b", WRONG)], False, "b"),  # wrong answers, flagged, before none
        ([unfit("a", WRONG)], True, ""),  # a standby takes over at once
        ([unfit("a", WRONG), unfit("b", WRONG), sound("c")], False, ""),  # c serves
        ([unfit("a", BREAKER), unfit("b", SPARE_UNFITNESS)], False, "b"),  # nothing speaks against a spare
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
        each_unfitness = st.sampled_from(
            [None, SPARE_UNFITNESS, *sorted({d for d in UNFITNESS.values() if d is not None})]
        )
        return ResortCandidate(name, weight, draw(each_unfitness), draw(st.booleans()))

    return [member(name) for name in range(draw(st.integers(0, 7)))]


@given(members=sets(), coming=st.booleans())
def test_what_holds_for_any_set(members: list[ResortCandidate[int]], coming: bool) -> None:
    """No set of workers that could serve is left with none, unless only wrong answers are left and a standby comes."""
    chosen = {member.name: member for member in members if member.name in last_resorts(members, coming=coming)}
    able = [member for member in members if member.unfitness is not None]
    serving = [member for member in able if member.weight]
    assert all(not member.weight and member.unfitness is not None for member in chosen.values())
    if 2 * len(serving) >= len(able):
        assert not chosen
    elif not serving:
        assert chosen or (coming and all(member.unfitness == WRONG for member in able))
    assert len({member.unfitness for member in chosen.values()}) <= 1
    if serving:
        assert not any(member.out or member.unfitness == WRONG for member in chosen.values())


@pytest.mark.parametrize(
    ("causes", "heard_s", "unfitness"),
    [
        ([], 0.0, NONE),
        ([HealthCause.UNCHECKED], 0.0, None),  # its first check is under way
        ([HealthCause.UNCHECKED], 5.0, UNFITNESS[HealthCause.UNCHECKED]),
        ([HealthCause.BREAKER, HealthCause.SLOW], 5.0, BREAKER),  # the worst counts
        ([HealthCause.WRONG, HealthCause.GONE], 5.0, None),
    ],
)
def test_how_much_the_causes_say_against_a_worker(
    causes: list[HealthCause], heard_s: float, unfitness: int | None
) -> None:
    """The worst counts, and some say that it cannot serve at all."""
    assert unfitness_of(dict.fromkeys(causes, "why"), heard_s) == unfitness


def test_every_cause_has_its_doubt() -> None:
    """A cause without one would crash control when it is held."""
    assert set(UNFITNESS) == set(HealthCause)
