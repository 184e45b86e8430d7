"""The content of control's status page, which `ps`, `top` and the supervisor's witness read. Plain data.

Always true: every field has a default, so a page of another version can be decoded.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.health.history import WorkerError


class VerdictShown(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one worker, from its record (`records.HealthRecord`)."""

    worker: str = ""  # its name, with its instance where another has the name too
    name: str = ""  # as `holdfast status` calls it
    instance: str = ""  # hex
    group: str = ""
    weights: str = ""
    status: str = ""  # a name in `standing.HealthStatus`
    weight: float = 1.0
    spare: bool = False
    quarantined: bool = False
    last_resort: bool = False  # it serves only because too few others can
    replace: str = ""  # why control asks for another engine in its place; "": it does not
    reason: str = ""
    since_unix_s: float = 0.0  # of this status
    causes: dict[str, str] = {}  # by `standing.HealthCause`
    fall: int = 0
    fell_unix_s: float = 0.0
    fell_for: dict[str, str] = {}  # the causes at that time
    written_unix_s: float = 0.0
    breaker: str = ""  # closed, open, half_open
    breaker_reason: str = ""
    canary_unix_s: float = 0.0  # when the last canary with a result was sent; 0: none
    canary_passed_unix_s: float = 0.0  # when the last that passed was sent
    errors: list[WorkerError] = []  # its last ones, the oldest first


class LevelShown(msgspec.Struct, frozen=True, kw_only=True):
    level: int = 0
    reason: str = ""
    vacant: bool = False


class CapacityShown(msgspec.Struct, frozen=True, kw_only=True):
    """The workers' capacity, compared with the promise."""

    ratio: float = 1.0  # without a promise: 1 while any worker has capacity
    promised: bool = True
    words: str = ""
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    carriers: int = 0  # workers with capacity, waking ones included
    unmeasured: int = 0  # of those, the ones that count with an assumed rate


class ControlPage(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ready"
    ready: bool = True
    role: str = "control"
    leads: bool = False
    reason: str = ""
    store: str = ""
    level: LevelShown | None = None
    capacity: CapacityShown | None = None
    standbys: dict[str, int] = {}  # by group
    fault_sources: dict[str, str] = {}  # of its machine's GPUs, by name: what is read, or why it cannot be
    verdicts: list[VerdictShown] = []
    refuted: list[str] = []  # cards' expectations that were withdrawn, with the reason


def control_page(facts: dict[str, Any]) -> ControlPage | None:
    """Return the decoded page; None if it is not a control's."""
    if facts.get("role") != "control":
        return None
    try:
        return msgspec.convert(facts, ControlPage)
    except msgspec.ValidationError:
        return None
