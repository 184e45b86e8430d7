"""What follows from each name of a failure."""

from __future__ import annotations

import pytest

from holdfast.core.errors import RESUMABLE, Code
from holdfast.migration.policy import BARREN_ATTEMPTS_MAX, BLAMELESS, Fail, Resume, after_failure

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
}


@pytest.mark.parametrize("code", list(Code))
def test_every_code_is_decided(code: Code) -> None:
    """The seven names of the design are resumed elsewhere, all others fail under their own name."""
    verdict = after_failure(code, "why", barren=0)
    if RESUMED[code]:
        assert verdict == Resume(avoid_worker=True)
    else:
        assert verdict == Fail(code, "why")
    assert RESUMED[code] is (code in RESUMABLE)


@pytest.mark.parametrize("code", sorted(RESUMABLE))
def test_fruitless_attempts_end_by_name(code: Code) -> None:
    """At the bound a resumable failure fails the stream, with its name and the count; overload never does."""
    assert after_failure(code, "why", BARREN_ATTEMPTS_MAX - 1) == Resume(avoid_worker=True)
    verdict = after_failure(code, "why", BARREN_ATTEMPTS_MAX)
    if code in BLAMELESS:
        assert verdict == Resume(avoid_worker=True)
    else:
        assert verdict == Fail(code, f"gave up after {BARREN_ATTEMPTS_MAX} attempts without a token; the last: why")


def test_an_unknown_code_fails_and_is_quoted() -> None:
    """A worker of another make cannot bring up a name that nobody handles."""
    verdict = after_failure("Frobnicated", "why", barren=0)
    assert isinstance(verdict, Fail)
    assert verdict.code is Code.ENGINE_SHUTDOWN
    assert "'Frobnicated'" in verdict.message
    assert "why" in verdict.message
