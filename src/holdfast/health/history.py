"""A worker's last errors, with time and reason, for people to read. Pure; nothing is decided by them.

Always true: a history has at most `ERRORS_MAX` entries, the oldest first; an error that repeats the last one is counted
there, so that a fault that comes every second does not push the others out.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.health import standing as s
from holdfast.health.bounds import Count, UnixS
from holdfast.health.breaker import Kind

ERRORS_MAX = 16
REASON_CHARS_MAX = 200  # with 16 of them a record stays below 4 KiB
FAILED_REQUEST = "failed-request"
ACCUSED = "accused"
# To wait for a first check, or to be tried again, is no error.
NO_ERRORS = frozenset({s.Cause.UNCHECKED, s.Cause.PROBATION})


class WorkerError(msgspec.Struct, frozen=True, kw_only=True):
    """One error of a worker."""

    at_unix_s: UnixS  # the last time
    kind: str  # a cause of its standing (`standing.Cause`), `FAILED_REQUEST` or `ACCUSED`
    reason: str
    count: Count = 1  # times in a row


History = tuple[WorkerError, ...]


def with_error(history: History, kind: str, reason: str, now_s: float) -> History:
    """Return the history with one more error."""
    reason = reason[:REASON_CHARS_MAX]
    last = history[-1] if history else None
    if last is not None and (last.kind, last.reason) == (kind, reason):
        return (*history[:-1], msgspec.structs.replace(last, at_unix_s=now_s, count=last.count + 1))
    return (*history, WorkerError(at_unix_s=now_s, kind=kind, reason=reason))[-ERRORS_MAX:]


def after_step(history: History, before: s.Standing, after: s.Standing, event: s.Event, now_s: float) -> History:
    """Return the history after a step of a worker's standing: with each cause that it did not hold before, and with a
    failed canary that added none."""
    found = {cause: why for cause, why in after.causes.items() if cause not in before.causes and cause not in NO_ERRORS}
    if not found and isinstance(event, s.CanaryFailed) and event.load == after.load:
        found = {s.Cause.CANARY_FAILED: f"canary {event.failing}: {event.reason}"}
    for cause, why in found.items():
        history = with_error(history, str(cause), why, now_s)
    return history


def after_attempts(history: History, failed: Mapping[Kind, int], now_s: float) -> History:
    """Return the history after clients' requests failed on the worker, by kind of failure."""
    for kind, count in failed.items():
        if count:
            history = with_error(history, FAILED_REQUEST, str(kind), now_s)
    return history
