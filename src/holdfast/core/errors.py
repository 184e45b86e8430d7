"""Error codes of requests, which of them are resumable, and the errors that are shown to users.

Code at the edge (sockets, engines) translates failures into these codes. A code is *resumable* if the frontend should
replay the prompt and the emitted tokens on another engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum

from holdfast.core.text import printable


class Code(StrEnum):
    CANNOT_CONNECT = "CannotConnect"
    DISCONNECTED = "Disconnected"
    CONNECTION_TIMEOUT = "ConnectionTimeout"
    RESPONSE_TIMEOUT = "ResponseTimeout"  # the worker hangs: its liveness says that it is lost
    # Control ejected the worker. Of frontends only: workers never send it, since older frontends do not know it.
    MOVED_BY_VERDICT = "MovedByVerdict"
    ENGINE_SHUTDOWN = "EngineShutdown"
    STREAM_INCOMPLETE = "StreamIncomplete"
    EMPTY_ANSWER = "EmptyAnswer"  # a worker ended the stream without a token
    WORKER_OVERLOADED = "WorkerOverloaded"
    PUSHED_OUT = "PushedOut"  # it waited in a queue that became full, and other requests were kept
    CANCELLED = "Cancelled"
    INVALID_REQUEST = "InvalidRequest"
    RESOURCE_EXHAUSTED = "ResourceExhausted"
    NO_WORKER = "NoWorker"
    REPLACED = "Replaced"  # a rollout removed its workers, and no other worker may continue it
    MODEL_UNAVAILABLE = "ModelUnavailable"  # its model is no longer desired, and has no worker left
    POISONED = "PoisonedRequest"  # it crashes engines; never retried
    INTERNAL = "InternalError"  # a bug of ours


RESUMABLE = frozenset(
    {
        Code.CANNOT_CONNECT,
        Code.DISCONNECTED,
        Code.CONNECTION_TIMEOUT,
        Code.RESPONSE_TIMEOUT,
        Code.MOVED_BY_VERDICT,
        Code.ENGINE_SHUTDOWN,
        Code.STREAM_INCOMPLETE,
        Code.EMPTY_ANSWER,
        Code.WORKER_OVERLOADED,
    }
)


def read_failure(code: str, message: str) -> tuple[Code, str]:
    """Return the code and text of a failure that another process reports. A code of a newer version counts as a failure
    of the attempt, which another worker may resume."""
    try:
        return Code(code), message
    except ValueError:
        return Code.ENGINE_SHUTDOWN, f"it failed with the unknown code '{printable(code)}': {message}"


class HoldfastError(Exception):
    """A failure with a `Code`; its text says the cause and, if there is one, the remedy."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class UserError(Exception):
    """A user's mistake, or something that is missing on the machine: shown as one line, without a traceback."""


class Refused(UserError):
    """An error that a retry cannot fix: the process exits with `REFUSED`, and its supervisor does not restart it."""


class UndecidedError(UserError):
    """The failure of a command whose exit status 1 is a normal answer: it exits with status 2."""


class TransientError(UserError):
    """A transient error: something is missing now, such as a network or a server, and a retry may succeed."""


@contextlib.contextmanager
def refuse_user_errors() -> Iterator[None]:
    """Turn a UserError or ValueError in the body into `Refused`, except `TransientError`. For code that depends on
    settings only: its errors cannot be fixed by a retry."""
    try:
        yield
    except (TransientError, Refused):
        raise
    except (UserError, ValueError) as error:
        raise Refused(str(error)) from error


REFUSED = 78  # the exit status after `Refused`; sysexits.h calls it EX_CONFIG


def exit_status(error: UserError | None) -> int:
    """Return the exit status of a process that ended with this error."""
    if isinstance(error, UndecidedError):
        return 2
    return 0 if error is None else REFUSED if isinstance(error, Refused) else 1
