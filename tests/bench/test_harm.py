"""A tenth of `make prove-harm`: some checks, by the seed, are given an alarm each while eight long streams run."""

from __future__ import annotations

import json
import os
import random

import pytest

from bench.harm.cells import CHECKS
from bench.harm.run import one

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.timeout(600)]

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "1"))
QUICK, LONG = 2, 4  # cells of `make test`, and of `make test-all`
ALL = [(check, case) for check, cells in CHECKS.items() for case in cells]
CHOSEN = random.Random(SEED).sample(ALL, QUICK + LONG)


def places(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize(
    "place", [*places(QUICK), *(pytest.param(n, marks=pytest.mark.long) for n in places(LONG, QUICK))]
)
def test_a_check_takes_no_stream_with_it(place: int) -> None:
    """Nothing is lost by a false alarm, or by a true one of two; by one on the only worker answers are right, flagged,
    or fail by name; and the service is back after one load."""
    check, case = CHOSEN[place]
    row = one(check, case, print)
    assert row.get("missed", []) == [], f"{check} {case}: {json.dumps(row, indent=1)}"
