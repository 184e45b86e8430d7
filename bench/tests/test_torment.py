"""A tenth of `make prove-torment`: all of a real engine's deployment is killed, stopped and starved, under load."""

from __future__ import annotations

import os

import pytest

from bench.torment import campaign as torment
from bench.torment.load import judged
from holdfast.testing.answers import Answer

pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_wrong_whatever_is_killed_or_stopped() -> None:
    """A minute of random faults: every answer equals its unbroken one, redundancy comes back each time, and nothing is
    left behind."""
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", "1"))
    row = torment.run(print, torment.Torment(seconds=60.0, seed=seed))
    assert row["met"], row


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_is_lost_while_control_judges() -> None:
    """The same with the sim engine, one worker or two by the seed, and failing requests, resets and false canaries."""
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", "1"))
    row = torment.run(print, torment.Torment(seconds=60.0, seed=seed, workers=1 + seed % 2, engine="sim"))
    assert row["met"], row


def test_a_missing_choice_is_seen() -> None:
    """An answer of fewer choices than the unbroken one is wrong, and so is one choice among several."""
    right = [Answer("one", [1], "length", done=True), Answer("two", [2], "length", done=True)]
    assert judged(right, right) == ""
    assert judged(right, right[:1]) == "1 choices instead of 2"
    assert judged(right, [right[0], Answer("too", [3], "length", done=True)]).startswith("choice 1: token 0 differs")
