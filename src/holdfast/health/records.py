"""The stored records of workers' health: control's verdicts, devices' faults, and the frontends' reports.

Always true: a `HealthRecord` is enough to act on a verdict and to continue from it, also one with states and causes of
a newer version: its weight counts; a report's counts only grow while
its frontend lives, so that the next report makes up for a missed one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.health import breaker, canary
from holdfast.health.bounds import Count, Seconds, UnixS
from holdfast.health.device_faults import DeviceFault, Severity, device_address
from holdfast.health.history import WorkerError
from holdfast.health.standing import DeviceReport, WorkerStanding

STREAMS_MAX = 1_000_000  # of one frontend on one worker: more than it has descriptors


class HealthRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one worker."""

    name: str  # as `holdfast status` calls it
    group: str = ""
    model: str = ""  # its card's checksum
    weights: str = ""  # as in its `Welcome`, like `load`
    load: Count = 0
    devices: tuple[str, ...] = ()  # devices with faults that count against it (`device_name`), where known
    reloads: Count = 0  # how often a reload of its weights was requested, without a long pause between
    reload_next_s: UnixS = 0.0  # the earliest time of the next request
    standing: WorkerStanding = WorkerStanding()
    breaker: breaker.BreakerRecord = breaker.BreakerRecord()
    canary: canary.CanaryRecord = canary.CanaryRecord()
    verified: bool = False  # after its wrong answer its weights were found equal to their source
    last_resort: bool = False  # it serves only because too few others of its set can
    spare: bool = False  # healthy, and gets no traffic until capacity is lost
    replace: str = ""  # why another engine is needed in its place (`replacement.py`); "": none is
    unfit_s: UnixS = 0.0  # since when a cause against it may ask for that; 0: none does
    errors: tuple[WorkerError, ...] = ()  # its last ones, the oldest first
    at_unix_s: UnixS = 0.0  # when it was written
    by: str = ""  # the control that wrote it

    @property
    def weight(self) -> float:
        """Return the share of its normal traffic that the worker gets."""
        return 0.0 if self.spare else self.standing.weight


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The gravest fault of one device; of equally grave ones the first."""

    severity: Severity
    reason: str
    number: Count = 0  # of the Xid, if it is one
    at_unix_s: UnixS = 0.0
    recovery: bool = False  # the driver requested a recovery action, and will report when it was done
    cleared_unix_s: UnixS = 0.0  # when that was done; 0: not yet
    by: str = ""  # the control that read it

    def report(self, device: str) -> DeviceReport:
        if self.cleared_unix_s:
            return DeviceReport(None, self.cleared_unix_s)
        return DeviceReport(DeviceFault(device, self.severity, self.reason, self.number), self.at_unix_s)


def device_name(boot_id: str, pci: str) -> str:
    """Return the key of a device. It changes when the machine restarts, which clears its faults."""
    return f"{boot_id}/{device_address(pci) or pci}"


def device_after(known: DeviceRecord | None, fault: DeviceFault, unix_s: float, by: str) -> DeviceRecord | None:
    """Return the record to write after this fault; None: nothing changes."""
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


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as one frontend sees it. Counts are since the frontend's start."""

    succeeded: Count = 0  # attempts
    failed: dict[str, Count] = {}  # by `breaker.FailureKind`
    outlived: Count = 0  # failures after which an attempt made tokens on this worker
    excused: Count = 0  # failures of requests that then failed on another worker too
    tokens: Count = 0
    stream_s: Seconds = 0.0  # sum of the streams' time on it; divided by `tokens` it is the pace
    open: Annotated[int, msgspec.Meta(ge=0, le=STREAMS_MAX)] = 0  # streams that run on it now
    silent_s: Seconds = 0.0  # the longest current wait of a stream for a token
    fall: Count = 0  # number of the last ejection (`standing`) for which its streams were moved


class Demand(msgspec.Struct, frozen=True):
    """The waiting requests for one model."""

    waiting: Count
    since_unix_s: UnixS  # when the first of them came


class KilledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was killed by a client or an operator."""

    id: str
    model: str
    by: str  # "key": by DELETE /v1/requests; "operator"
    at_unix_s: UnixS


class ReportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend's report; workers are named by instance, in hex."""

    name: str
    at_unix_s: UnixS
    process: str = ""  # as `holdfast status` calls it
    workers: dict[str, WorkerSeen] = {}  # every worker to which it has sent a request
    # Workers that the frontend finds connected, compatible, active and well: each gets requests as soon as control's
    # verdict gives it weight.
    admitted: tuple[str, ...] = ()
    refused: dict[str, str] = {}  # workers with a card that it cannot use, and why
    waiting: Count = 0  # requests that wait for a worker
    held: dict[str, Count] = {}  # of the waiting requests, those that had begun, by the namespace of their set
    demand: dict[str, Demand] = {}  # all waiting requests, by model
    killed: tuple[KilledRequest, ...] = ()  # of the last minute
    # Requests that ended well since the frontend's start, and the sums of their tokens.
    ended: Count = 0
    prompt_tokens: Count = 0
    answer_tokens: Count = 0
    # HTTP answers to completion requests since the frontend's start, counted when their status was sent, and those of
    # them with a status of 400 or more.
    answers: Count = 0
    answers_failed: Count = 0


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record under which a running control is registered."""

    name: str
    leads: bool
    pid: int = 0
    status: str = ""  # where its pages are
