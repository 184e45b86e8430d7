"""What follows from each name of a failure."""

from __future__ import annotations

import pytest

from holdfast.core.errors import RESUMABLE, Code
from holdfast.routing.table import Standing
from holdfast.streams.ledger import (
    BARREN_ATTEMPTS_MAX,
    DEATHS,
    POISON_DEATHS,
    SUSPECT_DEATHS,
    Fail,
    Resume,
    after_failure,
    standing_of,
)

RESUMED = {
    Code.CANNOT_CONNECT: True,
    Code.DISCONNECTED: True,
    Code.CONNECTION_TIMEOUT: True,
    Code.RESPONSE_TIMEOUT: True,
    Code.ENGINE_SHUTDOWN: True,
    Code.STREAM_INCOMPLETE: True,
    Code.WORKER_OVERLOADED: True,
    Code.CANCELLED: False,
    Code.INVALID_REQUEST: False,
    Code.RESOURCE_EXHAUSTED: False,
    Code.NO_WORKER: False,
    Code.POISONED: False,
    Code.INTERNAL: False,
}


@pytest.mark.parametrize("code", list(Code))
def test_every_code_is_decided(code: Code) -> None:
    """The seven names that stand for a worker's failure are resumed elsewhere, all others fail under their own name."""
    verdict = after_failure(code, "why", barren=0)
    if RESUMED[code]:
        assert verdict == Resume(avoid_worker=True)
    else:
        assert verdict == Fail(code, "why")
    assert RESUMED[code] is (code in RESUMABLE)


@pytest.mark.parametrize("code", sorted(RESUMABLE))
def test_fruitless_attempts_end_by_name(code: Code) -> None:
    """At the bound a resumable failure fails the stream, with its name and the count; deaths are counted apart."""
    assert after_failure(code, "why", BARREN_ATTEMPTS_MAX - 1) == Resume(avoid_worker=True)
    verdict = after_failure(code, "why", BARREN_ATTEMPTS_MAX)
    if code in DEATHS:
        assert verdict == Resume(avoid_worker=True)
    else:
        assert verdict == Fail(code, f"gave up after {BARREN_ATTEMPTS_MAX} attempts without a token; the last: why")


def test_the_third_barren_death_is_the_last() -> None:
    """Two make a suspect, which is tried again; the third fails it under its own name."""
    assert [standing_of(1, deaths) for deaths in range(3)] == [Standing.RESUMED, Standing.RESUMED, Standing.SUSPECT]
    assert standing_of(0, 0) is Standing.FRESH
    assert after_failure(Code.DISCONNECTED, "why", 0, SUSPECT_DEATHS) == Resume(avoid_worker=True)
    verdict = after_failure(Code.DISCONNECTED, "why", 0, POISON_DEATHS)
    told = "3 engines died while they worked on this request, the last time it was tried alone"
    assert verdict == Fail(Code.POISONED, told)


def test_an_unknown_code_fails_and_is_quoted() -> None:
    """A worker of another make cannot bring up a name that nobody handles."""
    verdict = after_failure("Frobnicated", "why", barren=0)
    assert isinstance(verdict, Fail)
    assert verdict.code is Code.ENGINE_SHUTDOWN
    assert "'Frobnicated'" in verdict.message
    assert "why" in verdict.message
