"""What stands in the store of a worker's health: what control wrote down, and what frontends report to it.

Always true: a `HealthRecord` has all it takes to act on a verdict and to go on from it; a report's counts only grow
while its frontend lives, so that one that is missed is in the next.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.health import breaker, canary
from holdfast.health.bounds import Count, Seconds, UnixS
from holdfast.health.device_faults import Fault, Severity, device_address
from holdfast.health.history import WorkerError
from holdfast.health.standing import Standing, Status

STREAMS_MAX = 1_000_000  # of one frontend on one worker: more than it has descriptors


class HealthRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one worker."""

    name: str  # as `holdfast ps` calls it
    group: str = ""
    model: str = ""  # its card's checksum
    weights: str = ""  # as in its `Welcome`, and so is
    load: Count = 0
    devices: tuple[str, ...] = ()  # whose faults are its own (`device_name`), where that is known
    reloads: Count = 0  # how often its weights were asked to be loaded anew, without a long while between
    reload_next_s: UnixS = 0.0  # not before then again
    standing: Standing = Standing()
    breaker: breaker.Record = breaker.Record()
    canary: canary.Record = canary.Record()
    verified: bool = False  # since it answered wrongly its weights were found to be as they were written
    last_resort: bool = False  # it serves only because too few others of its set can: to be replaced
    spare: bool = False  # sound, and kept without traffic until capacity is lost
    errors: tuple[WorkerError, ...] = ()  # its last ones, the oldest first
    at_unix_s: UnixS = 0.0  # when it was written
    by: str = ""  # the control that did

    def __post_init__(self) -> None:
        """ValueError, where it is read: of a version that knows more, or nobody's. Who reads it takes it for no word
        at all, instead of failing later where nobody expects that."""
        breaker.State(self.breaker.state)
        Status(self.standing.status)

    @property
    def weight(self) -> float:
        """The share of traffic that it gets, of what it would."""
        return 0.0 if self.spare else self.standing.weight


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with one GPU; of several things the gravest, and the first of those."""

    severity: Severity
    reason: str
    number: Count = 0  # of the Xid, if it is one
    at_unix_s: UnixS = 0.0
    recovery: bool = False  # the driver asked for something to be done, and will say when it was
    cleared_unix_s: UnixS = 0.0  # when it did; 0: it has not
    by: str = ""  # the control that read it


def device_name(boot_id: str, pci: str) -> str:
    """One GPU of one machine, until that is restarted: what was wrong with it is forgotten then."""
    return f"{boot_id}/{device_address(pci) or pci}"


def device_after(known: DeviceRecord | None, fault: Fault, unix_s: float, by: str) -> DeviceRecord | None:
    """The record of a device that told this, to be written; None: it says nothing new."""
    if known is not None and known.cleared_unix_s:
        known = None
    ignorable = fault.severity is Severity.IGNORABLE
    if known is None or (fault.severity is Severity.FATAL and known.severity is not Severity.FATAL):
        recovery = fault.recovery or (known is not None and known.recovery)
        severity, reason, number = fault.severity, fault.reason, fault.number
        if ignorable:
            return None
        return DeviceRecord(severity=severity, reason=reason, number=number, at_unix_s=unix_s, recovery=recovery, by=by)
    if ignorable:
        mended = fault.recovery and known.recovery
        return msgspec.structs.replace(known, cleared_unix_s=unix_s, by=by) if mended else None
    return msgspec.structs.replace(known, recovery=True, by=by) if fault.recovery and not known.recovery else None


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as one frontend sees it. Counts are since the frontend began."""

    succeeded: Count = 0  # attempts
    failed: dict[str, Count] = {}  # by `breaker.Kind`
    outlived: Count = 0  # failures after which an attempt made tokens there
    excused: Count = 0  # failures that followed their request to another worker
    tokens: Count = 0
    stream_s: Seconds = 0.0  # streams' time on it, all together: with `tokens` its pace
    open: Annotated[int, msgspec.Meta(ge=0, le=STREAMS_MAX)] = 0  # streams that run there now
    silent_s: Seconds = 0.0  # how long the stream that has waited longest for a token does so
    fall: Count = 0  # the last of which its streams were moved


class Demand(msgspec.Struct, frozen=True):
    """Requests for one model that wait."""

    waiting: Count
    since_unix_s: UnixS  # when the first of them came


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was ended by somebody's word."""

    id: str
    model: str
    by: str  # "key": by who may through a frontend; "operator"
    at_unix_s: UnixS


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend sees; workers by instance, in hex."""

    name: str
    at_unix_s: UnixS
    process: str = ""  # as `holdfast ps` calls it
    workers: dict[str, Seen] = {}  # of every one that it has sent anything to
    # Those that it is connected to and understands, that lead and are well as far as it can tell: each is sent requests
    # as soon as control's verdict gives it any weight.
    admitted: tuple[str, ...] = ()
    refused: dict[str, str] = {}  # those whose card it cannot use, and why
    waiting: Count = 0  # requests without a place,
    held: dict[str, Count] = {}  # and of those, by the namespace of their set, the ones that had begun
    demand: dict[str, Demand] = {}  # and all of them, by model
    killed: tuple[Killed, ...] = ()  # of the last minute
    # Requests that came to their good end since the frontend began, and their tokens: what requests are like.
    ended: Count = 0
    prompt_tokens: Count = 0
    answer_tokens: Count = 0
    # Answers to requests for completions since the frontend began, counted when their status was sent, and those of
    # them with a status of 400 or more.
    answers: Count = 0
    answers_failed: Count = 0


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A control that runs."""

    name: str
    leads: bool
    pid: int = 0
    status: str = ""  # where its pages are
