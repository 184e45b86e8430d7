"""A worker's last errors, with time and reason, for people to read. Pure; no decision uses them.

Always true: a history has at most `ERRORS_MAX` entries, the oldest first; an error equal to the last one only raises
its count, so that a fault that repeats every second does not displace the others.
"""

from __future__ import annotations

import msgspec

from holdfast.health import standing as s
from holdfast.health.bounds import Count, UnixS

ERRORS_MAX = 16
REASON_CHARS_MAX = 200  # with 16 of them a record stays below 4 KiB
FAILED_REQUEST = "failed-request"
ACCUSED = "accused"
# Waiting for a first check and being on probation are no errors.
NO_ERRORS = frozenset({s.HealthCause.UNCHECKED, s.HealthCause.PROBATION})


class WorkerError(msgspec.Struct, frozen=True, kw_only=True):
    at_unix_s: UnixS  # the last time
    kind: str  # a cause of its standing (`standing.HealthCause`), `FAILED_REQUEST` or `ACCUSED`
    reason: str
    count: Count = 1  # times in a row


History = tuple[WorkerError, ...]


def with_error(history: History, kind: str, reason: str, now_s: float) -> History:
    reason = reason[:REASON_CHARS_MAX]
    last = history[-1] if history else None
    if last is not None and (last.kind, last.reason) == (kind, reason):
        return (*history[:-1], msgspec.structs.replace(last, at_unix_s=now_s, count=last.count + 1))
    return (*history, WorkerError(at_unix_s=now_s, kind=kind, reason=reason))[-ERRORS_MAX:]


def after_step(
    history: History, before: s.WorkerStanding, after: s.WorkerStanding, event: s.StandingEvent, now_s: float
) -> History:
    """Return the history after a step of a worker's standing: it gains each new cause, or the failed canary if that
    added no cause."""
    found = {cause: why for cause, why in after.causes.items() if cause not in before.causes and cause not in NO_ERRORS}
    if not found and isinstance(event, s.CanaryFailed) and event.load == after.load:
        found = {s.HealthCause.CANARY_FAILED: f"canary {event.failing}: {event.reason}"}
    for cause, why in found.items():
        history = with_error(history, str(cause), why, now_s)
    return history
