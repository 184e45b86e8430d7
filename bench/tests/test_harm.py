"""A tenth of `make prove-harm`: cells in which streams were lost before a worker could be a last resort."""

from __future__ import annotations

import json

import pytest

from bench.harm.run import one

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("check", "case"), [("canary", "a"), ("breaker", "b"), ("device", "a"), ("weights", "a")], ids=lambda one: one
)
def test_a_check_takes_no_stream_with_it(check: str, case: str) -> None:
    """Eight long streams end whole beside a false alarm, and the service is never away for longer than one load."""
    row = one(check, case, print)
    assert row.get("missed", []) == [], f"{check} {case}: {json.dumps(row, indent=1)}"
