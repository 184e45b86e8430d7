"""Errors in OpenAI's format, with the field that is to blame.

Always true: whatever a client sends, its request runs or it gets an `ApiError`. The message names the cause; for a 400,
`param` names the field by its path (`messages[0].role`).
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

_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """A response other than 200. `retry_after_s` becomes the Retry-After header; `reason` becomes the header that says
    which capacity is lacking."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        reason: str = "",
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.reason = reason
        self._own_headers = headers

    def __repr__(self) -> str:
        return f"ApiError({self.status}, {self.message!r}, param={self.param!r}, code={self.code!r})"

    @property
    def headers(self) -> Headers:
        headers = self._own_headers
        if self.reason:
            headers = (*headers, (REASON_HEADER, self.reason.encode()))
        if self.retry_after_s is not None:
            headers = (*headers, (b"retry-after", b"%d" % max(1, round(self.retry_after_s))))
        return headers

    def body(self) -> bytes:
        """Return `{"error": {...}}` as the body of a response or the data of a last event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return _encode({"error": error})


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """Return a 400 that names the field."""
    return ApiError(400, message, INVALID_REQUEST, param, code)


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"the model {model!r} does not exist here", INVALID_REQUEST, "model", "model_not_found")


# The HTTP status of each failure. Resumable failures get here only once every resumption has failed.
_OF_CODE: dict[Code, tuple[int, str]] = {
    Code.INVALID_REQUEST: (400, INVALID_REQUEST),
    Code.RESOURCE_EXHAUSTED: (429, OVERLOADED),
    Code.WORKER_OVERLOADED: (429, OVERLOADED),
    Code.PUSHED_OUT: (429, OVERLOADED),
    Code.NO_WORKER: (503, UNAVAILABLE),
    Code.REPLACED: (503, UNAVAILABLE),
    Code.MODEL_UNAVAILABLE: (404, INVALID_REQUEST),  # as an unknown name
    Code.CANCELLED: (499, "cancelled"),
    Code.INTERNAL: (500, SERVER),
    Code.POISONED: (500, SERVER),  # not 503: trying again would only cost more engines
}


# The reason header of requests that were refused only because no place was free.
REASONS = {Code.WORKER_OVERLOADED: "no_place", Code.PUSHED_OUT: "pushed_out"}


def of_failure(code: Code, message: str, param: str | None = None, retry_after_s: float | None = None) -> ApiError:
    """Return a failure as an HTTP error. A code that is not listed is a worker's fault and worth a retry: 503."""
    status, kind = _OF_CODE.get(code, (503, UNAVAILABLE))
    return ApiError(status, message, kind, param, code.value, retry_after_s, REASONS.get(code, ""))


def too_busy(why: str, reason: str) -> ApiError:
    """Return the 429 for overload of this frontend itself; overload of workers has the same status."""
    status, kind = _OF_CODE[Code.RESOURCE_EXHAUSTED]
    return ApiError(status, f"{why}; try again soon", kind, None, Code.RESOURCE_EXHAUSTED.value, 1.0, reason)


def log_failure(name: str, error: ApiError) -> None:
    """Log a failure: our own as a warning, which the operator sees; a client's mistake only for debugging."""
    level = logging.WARNING if error.status >= 500 else logging.DEBUG
    log.log(level, "request %s failed: %d %s: %s", name, error.status, error.code or error.type, error.message)
