"""Refusals in OpenAI's shape, with the field that is to blame.

Always true: whatever a client sends, it gets a request that runs or an `ApiError`; its message names the cause and,
for a 400, `param` names the field by its path (`messages[0].role`).
"""

from __future__ import annotations

import logging

import msgspec

from holdfast.core.errors import Code
from holdfast.wire.http.response import Headers

log = logging.getLogger("holdfast.frontend")

INVALID_REQUEST = "invalid_request_error"
OVERLOADED = "overloaded_error"
UNAVAILABLE = "service_unavailable_error"
SERVER = "server_error"

REASON_HEADER = b"x-holdfast-reason"

# When to ask again for a model without a worker: an engine takes about as long to load.
NO_WORKER_RETRY_S = 10.0

_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """An answer other than 200. `retry_after_s` becomes the Retry-After header, `reason` the one that says for which
    want of capacity it is refused."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.reason = reason

    def __repr__(self) -> str:
        return f"ApiError({self.status}, {self.message!r}, param={self.param!r}, code={self.code!r})"

    @property
    def headers(self) -> Headers:
        headers: Headers = ((REASON_HEADER, self.reason.encode()),) if self.reason else ()
        if self.retry_after_s is not None:
            headers = (*headers, (b"retry-after", b"%d" % max(1, round(self.retry_after_s))))
        return headers

    def body(self) -> bytes:
        """`{"error": {...}}` as the body of a response or the data of a last event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return _encode({"error": error})


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, INVALID_REQUEST, param, code)


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"the model {model!r} does not exist here", INVALID_REQUEST, "model", "model_not_found")


def no_worker(model: str, why: str) -> ApiError:
    """A model of ours that nobody serves now: worth another try, which a 404 would say it is not."""
    message = f"the model {model!r} has no worker now: {why}"
    return ApiError(503, message, UNAVAILABLE, "model", Code.NO_WORKER.value, NO_WORKER_RETRY_S)


# How a failure inside becomes a status outside. Resumable ones get here only once every resumption has failed.
_OF_CODE: dict[Code, tuple[int, str]] = {
    Code.INVALID_REQUEST: (400, INVALID_REQUEST),
    Code.RESOURCE_EXHAUSTED: (429, OVERLOADED),
    Code.WORKER_OVERLOADED: (429, OVERLOADED),
    Code.PUSHED_OUT: (429, OVERLOADED),
    Code.NO_WORKER: (503, UNAVAILABLE),
    Code.REPLACED: (503, UNAVAILABLE),
    Code.MODEL_UNAVAILABLE: (404, INVALID_REQUEST),  # as a name that nobody ever had
    Code.CANCELLED: (499, "cancelled"),
    Code.INTERNAL: (500, SERVER),
    Code.POISONED: (500, SERVER),  # not 503: trying again would only cost more engines
}


# Of a request that could have run, had there been a place for it.
REASONS = {Code.WORKER_OVERLOADED: "no_place", Code.PUSHED_OUT: "pushed_out"}


def of_failure(code: Code, message: str, param: str | None = None, retry_after_s: float | None = None) -> ApiError:
    """A named failure as an answer; what is not listed is a worker's fault, and worth another try later."""
    status, kind = _OF_CODE.get(code, (503, UNAVAILABLE))
    return ApiError(status, message, kind, param, code.value, retry_after_s, REASONS.get(code, ""))


def too_busy(why: str, reason: str) -> ApiError:
    """Overload of this frontend itself; a worker's has the same status."""
    status, kind = _OF_CODE[Code.RESOURCE_EXHAUSTED]
    return ApiError(status, f"{why}; try again soon", kind, None, Code.RESOURCE_EXHAUSTED.value, 1.0, reason)


def log_failure(name: str, error: ApiError) -> None:
    """Our own failures are the operator's to see; what a client did wrong is between it and its answer."""
    level = logging.WARNING if error.status >= 500 else logging.DEBUG
    log.log(level, "request %s failed: %d %s: %s", name, error.status, error.code or error.type, error.message)
