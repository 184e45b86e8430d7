"""Two deployments with the same components, one's name a beginning of the other's, on one machine and in one store."""

from __future__ import annotations

import pytest

from bench.apart import crosstalk, sharing

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.long]


def test_no_answer_is_the_others() -> None:
    """A tenth of what `make prove-apart` asks: every answer has its own set's tokens, no frontend knows a worker of the
    other, and when one is deleted the other's processes, records and answers are what they were."""
    row = crosstalk.run(1_000, lambda _: None)
    assert row["met"], row


def test_a_shared_frontend_mixes_nothing() -> None:
    """Two deployments of workers behind the frontend of a third: each answer is of the one that was asked for, also
    while one of them is replaced, which the other does not notice."""
    row = sharing.run(100, lambda _: None)
    assert row["met"], row
