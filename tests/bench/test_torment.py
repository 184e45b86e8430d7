"""A tenth of `make prove-torment`: all of a real engine's deployment is killed, stopped and starved, under load."""

from __future__ import annotations

import os

import pytest

from bench.torment import campaign as torment
from bench.torment.load import Said, difference

pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_wrong_whatever_is_killed_or_stopped() -> None:
    """A minute of random faults: every answer equals its unbroken one, redundancy comes back each time, and nothing is
    left behind."""
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", "1"))
    row = torment.run(torment.Torment(seconds=60.0, seed=seed), print)
    assert row["met"], row


def test_a_wrong_answer_is_seen() -> None:
    """The judge itself: another token, a lost end, a missing choice and another reason of the end are all differences;
    the beginning of an answer is right only for who left early."""
    right = (Said("one two", (1, 2), "length"),)
    assert difference(right, right, part=False) == ""
    assert "token 1 differs" in difference(right, (Said("one too", (1, 3), "length"),), part=False)
    assert "1 tokens" in difference(right, (Said("one", (1,), "length"),), part=False)
    assert "choices" in difference(right, (), part=False)
    assert "stop" in difference(right, (Said("one two", (1, 2), "stop"),), part=False)
    assert difference(right, (Said("one", (1,), None),), part=True) == ""
    assert difference(right, (Said("two", (2,), None),), part=True) != ""
