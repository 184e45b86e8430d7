"""A fleet of real processes under attack: a tenth of what `make prove-fleet-local` does."""

from __future__ import annotations

import os

import pytest

from bench.fleet_local import storm
from bench.prove_fleet_local import STORM_S

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "0"))


@pytest.mark.long
def test_three_models_take_turns_while_they_are_killed() -> None:
    """No request is lost or answered wrongly, no device has more than there is, and no model gives way before its
    time."""
    row = storm.run(STORM_S / 10, SEED)
    assert row["met"], str(row)
