"""For which causes, and for how many of a set, control asks for another engine: tables, and what holds for any set."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health.replacement import (
    CRAWLING_S,
    DOUBT_S,
    REPLACE_AFTER_S,
    UnfitWorker,
    asked_for,
    replace_due_s,
    replace_reason,
)
from holdfast.health.standing import TABLE, WEIGHTS, HealthCause


@pytest.mark.parametrize(
    ("causes", "after_s"),
    [
        ([], None),
        ([HealthCause.WRONG], 0.0),
        ([HealthCause.CANARY_FAILING], 0.0),
        ([HealthCause.DEVICE_LOST], 0.0),
        ([HealthCause.DEVICE_SICK], 0.0),
        ([HealthCause.BREAKER], DOUBT_S),  # it may close
        ([HealthCause.LOST], DOUBT_S),  # unreachable for a moment
        ([HealthCause.ENGINE], DOUBT_S),  # its supervisor starts it again
        ([HealthCause.CRAWLING], CRAWLING_S),
        ([HealthCause.BREAKER, HealthCause.WRONG], 0.0),  # the cause that asks first decides
        ([HealthCause.BREAKER, HealthCause.UNCHECKED], DOUBT_S),
        ([HealthCause.SLOW], None),
        ([HealthCause.CANARY_SLOW], None),
        ([HealthCause.CANARY_FAILED], None),  # the first ones may be chance
        ([HealthCause.UNCHECKED], None),
        ([HealthCause.DISPUTED], None),
        ([HealthCause.PROBATION], None),
        ([HealthCause.GONE], None),  # its supervisor starts it again
    ],
)
def test_which_causes_ask_for_a_replacement_and_when(causes: list[HealthCause], after_s: float | None) -> None:
    """The reason is that of a cause whose time is over; before that there is none."""
    whys = {cause: f"because of {cause}" for cause in causes}
    assert replace_due_s(whys, 100.0) == (None if after_s is None else 100.0 + after_s)
    if after_s is None:
        assert replace_reason(whys, 100.0, 1e9) == ""
    else:
        assert replace_reason(whys, 100.0, 100.0 + after_s - 0.1) == ""
        assert replace_reason(whys, 100.0, 100.0 + after_s).startswith("because of ")


def test_every_cause_is_in_the_table_and_only_causes_without_weight_ask() -> None:
    """A worker that serves by its own merit is never replaced for its health."""
    assert REPLACE_AFTER_S.keys() == TABLE.keys()
    asking = [cause for cause, after_s in REPLACE_AFTER_S.items() if after_s is not None]
    assert {WEIGHTS[TABLE[cause][0]] for cause in asking} == {0.0}


@given(
    members=st.integers(1, 9),
    unfit=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=9),
)
def test_a_set_is_never_emptied(members: int, unfit: list[tuple[int, bool]]) -> None:
    """At most half of a set is replaced at once, or one; one that was asked for is asked for on."""
    workers = [
        UnfitWorker(str(number), "why", float(since_s), asked)
        for number, (since_s, asked) in enumerate(unfit[:members])
    ]
    asked = asked_for(workers, members)
    assert len(asked) <= max(1, members // 2)
    assert bool(asked) is bool(workers)
    before = [one.name for one in workers if one.asked]
    assert not before or set(asked) & set(before)


def test_the_docs_have_the_same_table() -> None:
    """docs/health.md says of every cause when another engine is asked for."""
    page = (Path(__file__).parents[2] / "docs" / "health.md").read_text()
    words = {None: "never", 0.0: "at once"}
    for cause, after_s in REPLACE_AFTER_S.items():
        assert f"| {cause.value} | {words.get(after_s, f'after {after_s or 0:g} s')} |" in page
