"""The names of what can go wrong with a request, and whether another worker may take it up.

The outside world's failures are translated into these names at the edge where they happen. A code is
*resumable* when replaying prompt + emitted tokens on another engine is the right answer to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum


class Code(StrEnum):
    """Every failure of a request, by name."""

    CANNOT_CONNECT = "CannotConnect"
    DISCONNECTED = "Disconnected"
    CONNECTION_TIMEOUT = "ConnectionTimeout"
    RESPONSE_TIMEOUT = "ResponseTimeout"
    ENGINE_SHUTDOWN = "EngineShutdown"
    STREAM_INCOMPLETE = "StreamIncomplete"
    EMPTY_ANSWER = "EmptyAnswer"  # a worker says that it is the end, and made nothing
    WORKER_OVERLOADED = "WorkerOverloaded"
    PUSHED_OUT = "PushedOut"  # it waited, and a line that was full kept others
    CANCELLED = "Cancelled"
    INVALID_REQUEST = "InvalidRequest"
    RESOURCE_EXHAUSTED = "ResourceExhausted"
    NO_WORKER = "NoWorker"
    REPLACED = "Replaced"  # a rollout took its workers away for good, and no others may go on with it
    MODEL_UNAVAILABLE = "ModelUnavailable"  # nobody wants its model any more, and no worker of it is left
    POISONED = "PoisonedRequest"  # engines die of it; never tried again
    INTERNAL = "InternalError"  # a bug of ours, which cost this request


RESUMABLE = frozenset(
    {
        Code.CANNOT_CONNECT,
        Code.DISCONNECTED,
        Code.CONNECTION_TIMEOUT,
        Code.RESPONSE_TIMEOUT,
        Code.ENGINE_SHUTDOWN,
        Code.STREAM_INCOMPLETE,
        Code.EMPTY_ANSWER,
        Code.WORKER_OVERLOADED,
    }
)


class HoldfastError(Exception):
    """A failure with a name from `Code`; its text says the cause and, where there is one, the mend."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class UserError(Exception):
    """A person's mistake, or a missing thing on their machine: shown as one line, without a traceback."""


class Refused(UserError):
    """A mistake that no second try mends: a process that meets it exits with `REFUSED`, and is not started again."""


class Untold(UserError):
    """What was asked cannot be told, by a command whose status 1 is an answer: status 2."""


class Passing(UserError):
    """Something that is missing now and may be there the next time: a network, a server."""


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Whatever follows from settings alone is made inside: what is wrong there no second try mends."""
    try:
        yield
    except (Passing, Refused):
        raise
    except (UserError, ValueError) as error:
        raise Refused(str(error)) from error


REFUSED = 78  # the exit status of what was refused; sysexits.h calls it EX_CONFIG


def exit_status(error: UserError | None) -> int:
    """What a process that ended so tells who started it."""
    if isinstance(error, Untold):
        return 2
    return 0 if error is None else REFUSED if isinstance(error, Refused) else 1
