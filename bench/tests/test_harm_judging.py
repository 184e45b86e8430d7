"""Tests how `make prove-harm` judges a cell, and that no check and no alarm is left out without a reason."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harm.cells import CASES, CHECKS, POISON
from bench.harm.judging import Seen, missed, row_of
from bench.harm.table import table
from bench.harm.watch import STREAMS, Ended, Probe, expected, longest_away_s, prompt

# Those of issue 25 that can end, drain, rest or refuse.
ALL = {
    "canary", "proof", "breaker", "watchdog", "poison", "device", "level", "fence", "weights", "planner", "rollout",
}  # fmt: skip
RIGHT = Ended()
LOST = Ended(lost="no worker could take it within 30 s", code="NoWorkers", failed_s=31.0)
NAMELESS = Ended(lost="no [DONE]")
LATE = Ended(lost="no worker", code="NoWorkers", failed_s=80.0)
WRONG = Ended(wrong=True)
FLAGGED = Ended(wrong=True, flagged=True)


def seen(*ended: Ended, away_s: float = 1.0) -> Seen:
    return Seen((RIGHT, *ended), away_s, load_s=8.0)


@pytest.mark.parametrize(
    ("case", "given", "told"),
    [
        ("a", seen(), ""),
        ("a", seen(LOST), "1 of 2 streams lost: no worker could take it within 30 s"),
        ("b", seen(WRONG), "1 of 2 answers wrong, and no engine computed wrongly"),
        ("c", seen(FLAGGED), ""),
        ("c", seen(NAMELESS), "1 of 2 streams lost: no [DONE]"),
        ("d", seen(LOST, FLAGGED), ""),
        ("d", seen(NAMELESS), "1 of 2 streams ended without a name: no [DONE]"),
        ("d", seen(LATE), "1 of 2 streams failed after 80 s of silence"),
        ("d", seen(WRONG), "1 of 2 wrong answers were not flagged"),
        ("a", seen(away_s=12.0), "the service was away for 12.0 s; one load takes 8.0 s"),
        ("d", seen(away_s=12.0), "the service was away for 12.0 s; one load takes 8.0 s"),
    ],
)
def test_what_a_cell_must_show(case: str, given: Seen, told: str) -> None:
    """Nothing is lost in a, b and c; in d an answer is right, flagged, or fails by name in time."""
    assert "; ".join(missed(case, given)) == told
    row = row_of("what", case, given)
    assert row["met"] == (told == "")


@pytest.mark.parametrize(
    ("probes", "away_s"),
    [
        ([], 10.0),
        ([(0.0, 1.0, ""), (8.5, 9.0, "")], 8.0),
        ([(0.0, 1.0, ""), (4.0, 5.0, "503"), (8.5, 9.0, "")], 8.0),
        ([(0.0, 4.0, ""), (4.5, 5.0, ""), (8.5, 9.0, ""), (11.0, 12.0, "")], 4.0),
    ],
)
def test_how_long_the_service_was_away(probes: list[tuple[float, float, str]], away_s: float) -> None:
    """Between the ends of two good answers: a request that is held for long is time without service."""
    assert longest_away_s([Probe(*probe) for probe in probes], 0.0, 10.0) == away_s


def test_every_check_has_its_four_alarms() -> None:
    """Each says what it does; one that makes no sense has the reason in place of a site."""
    assert set(CHECKS) == ALL
    for cells in CHECKS.values():
        assert list(cells) == list(CASES)
        assert all(cell.what for cell in cells.values())


def test_only_the_poison_is_poison() -> None:
    """A stream that said the poisonous token itself would kill its engine when it is resumed."""
    longest = max(cell.tokens for cell in CHECKS["poison"].values())
    assert not any(POISON in (*prompt(number), *expected(number, longest)) for number in range(STREAMS))


def test_the_table_has_every_check() -> None:
    """A row for each, with what was missed marked, and what was not run or has no sense told."""
    given: dict[str, dict[str, Any]] = {"a": row_of("x", "a", seen(LOST)), "b": {"absent": "no such thing"}}
    given["d"] = row_of("x", "d", seen(LOST, FLAGGED))
    last = table({"canary": {"cells": given}}).splitlines()[-1]
    told = ("1 lost, away 1 s **missed**", "none: no such thing", "not run")
    assert last == f"| canary | {' | '.join(told)} | 1 right, 1 flagged, 1 failed by name, away 1 s |"
