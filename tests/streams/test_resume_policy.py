"""What follows from each name of a failure."""

from __future__ import annotations

import pytest

from holdfast.core.errors import RESUMABLE, Code, read_failure
from holdfast.routing.table import PriorityClass
from holdfast.streams.ledger import (
    DEATHS,
    EMPTY_ATTEMPTS_MAX,
    POISON_DEATHS,
    SUSPECT_DEATHS,
    EndStream,
    ResumeElsewhere,
    after_failure,
    priority_of,
)

# The names are part of the contract with clients, dashboards and other versions: renaming one breaks somebody's alert.
RESUMED = {
    "CannotConnect": True,
    "Disconnected": True,
    "ConnectionTimeout": True,
    "ResponseTimeout": True,
    "MovedByVerdict": True,
    "EngineShutdown": True,
    "StreamIncomplete": True,
    "EmptyAnswer": True,
    "WorkerOverloaded": True,
    "PushedOut": False,
    "Cancelled": False,
    "InvalidRequest": False,
    "ResourceExhausted": False,
    "NoWorker": False,
    "Replaced": False,
    "ModelUnavailable": False,
    "PoisonedRequest": False,
    "InternalError": False,
}


@pytest.mark.parametrize("name", sorted({*RESUMED, *Code}))
def test_every_code_is_decided(name: str) -> None:
    """The names that stand for a worker's failure are resumed elsewhere, all others fail under their own name."""
    code = Code(name)
    assert after_failure(code, "why", empty_attempts=0) == (
        ResumeElsewhere() if RESUMED[name] else EndStream(code, "why")
    )
    assert RESUMED[name] is (code in RESUMABLE)


@pytest.mark.parametrize("code", sorted(RESUMABLE))
def test_fruitless_attempts_end_by_name(code: Code) -> None:
    """At the bound a resumable failure fails the stream, with its name and the count; deaths are counted apart."""
    assert after_failure(code, "why", EMPTY_ATTEMPTS_MAX - 1) == ResumeElsewhere()
    verdict = after_failure(code, "why", EMPTY_ATTEMPTS_MAX)
    if code in DEATHS:
        assert verdict == ResumeElsewhere()
    else:
        why = f"gave up after {EMPTY_ATTEMPTS_MAX} attempts without a token; the last: why"
        assert verdict == EndStream(code, why, no_token=True)


def test_the_third_death_without_a_token_is_the_last() -> None:
    """Two make a suspect, which is tried again; the third fails it under its own name."""
    assert [priority_of(1, deaths) for deaths in range(3)] == [
        PriorityClass.RESUMED,
        PriorityClass.RESUMED,
        PriorityClass.ON_TRIAL,
    ]
    assert priority_of(0, 0) is PriorityClass.FRESH
    assert after_failure(Code.DISCONNECTED, "why", 0, SUSPECT_DEATHS) == ResumeElsewhere()
    verdict = after_failure(Code.DISCONNECTED, "why", 0, POISON_DEATHS)
    told = "3 engines died while they worked on this request, the last time it was tried alone"
    assert verdict == EndStream(Code.POISONED, told)


def test_an_unknown_code_is_resumed_and_quoted() -> None:
    """A code of a newer worker fails the attempt, not the stream; after five in a row the text names it, on one
    line."""
    code, message = read_failure("Frob\nnicated", "why")
    assert code is Code.ENGINE_SHUTDOWN
    assert after_failure(code, message, empty_attempts=0) == ResumeElsewhere()
    verdict = after_failure(code, message, EMPTY_ATTEMPTS_MAX)
    assert isinstance(verdict, EndStream)
    assert "Frob" in verdict.message
    assert "why" in verdict.message
    assert verdict.message.isprintable()
    assert read_failure("EmptyAnswer", "why") == (Code.EMPTY_ANSWER, "why")
