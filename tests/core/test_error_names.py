"""The names of failures are part of the contract with clients, dashboards and other versions."""

from __future__ import annotations

from holdfast.core.errors import RESUMABLE, Code, HoldfastError


def test_the_names_are_those_of_the_design() -> None:
    """Renaming one breaks somebody's alert: they stand here once more."""
    assert {code.value for code in Code} == {
        "CannotConnect",
        "Disconnected",
        "ConnectionTimeout",
        "ResponseTimeout",
        "EngineShutdown",
        "StreamIncomplete",
        "WorkerOverloaded",
        "Cancelled",
        "InvalidRequest",
        "ResourceExhausted",
        "NoWorker",
        "PoisonedRequest",
        "InternalError",
    }


def test_what_is_resumed_is_what_the_design_says() -> None:
    """A client's own fault, its leaving, and a request too large anywhere are not resumed."""
    assert set(Code) - RESUMABLE == {
        Code.CANCELLED,
        Code.INVALID_REQUEST,
        Code.RESOURCE_EXHAUSTED,
        Code.NO_WORKER,
        Code.POISONED,
        Code.INTERNAL,
    }


def test_an_error_keeps_name_and_sentence() -> None:
    """Both reach whoever translates it for a client."""
    error = HoldfastError(Code.INVALID_REQUEST, "tokens must not be empty")
    assert (error.code, error.message, str(error)) == ("InvalidRequest", error.message, error.message)
