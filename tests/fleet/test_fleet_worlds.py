"""Random worlds by their seeds: a tenth of those that `make prove-fleet` plays, most of that in `make test-all`."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.rigs.worlds.fleet_storms import Drains, Rollouts, play

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "0")) % 1_000_000
EACH = 100
PARTS = [0, 1, *(pytest.param(part, marks=pytest.mark.long) for part in range(2, 10))]
ROLLED = [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 4))]
BROKE = (
    907_935,  # one who was told to stop in vain was drained again and again
    911_179,  # a WARM one of an old version, told to come, was asked to drain at every look
)


@pytest.mark.parametrize("part", PARTS)
def test_whatever_befalls_a_fleet_its_promises_hold(part: int) -> None:
    """No vault over its bytes, no work cut short, nobody started twice, nobody kept evicted; from scratch the same
    plan; and at rest, when it is quiet, with what is wanted as far as there is room."""
    for number in range(EACH):
        play(SEED + part * EACH + number)


@pytest.mark.parametrize("part", ROLLED)
def test_another_version_takes_nobody_before_another_has_come(part: int) -> None:
    """Floors of WARM and HOT hold through rollouts, evictions and whatever else befalls; and at rest all are of the
    last version, as far as there is room."""
    for number in range(EACH):
        play(SEED + part * EACH + number, Rollouts)


def test_worlds_of_rollouts_replace_replicas() -> None:
    """The test above would show nothing if no replica were replaced. That is random, so these worlds are fixed."""
    counts = sum((play(number, Rollouts) for number in range(10)), Counter[str]())
    assert counts["outdated WARM"] > 0
    assert counts["outdated HOT"] > 0


@pytest.mark.parametrize("part", ROLLED)
def test_nothing_comes_to_a_cordoned_node_and_a_drained_one_empties(part: int) -> None:
    """What serves on a drained node, or is kept WARM there, leaves when another has come; at rest only what fits
    nowhere else is left there."""
    for number in range(EACH):
        play(SEED + part * EACH + number, Drains)


def test_worlds_of_drains_move_replicas() -> None:
    """The test above would show nothing if no replica were moved, or if all stayed. These worlds are fixed."""
    counts = sum((play(number, Drains) for number in range(10)), Counter[str]())
    assert counts["drained HOT"] > 0
    assert counts["drained WARM"] > 0
    assert counts["elsewhere"] > counts["stay"] > 0


@pytest.mark.parametrize("seed", BROKE)
def test_worlds_that_broke_once_hold(seed: int) -> None:
    """Each stands for a defect that random worlds found."""
    play(seed)
