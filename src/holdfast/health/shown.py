"""What control's status page says, as whoever reads it takes it: `ps`, `top`, the supervisor's witness. Plain data.

Always true: every field has a default, so a page of another version reads as far as it goes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.health.history import WorkerError


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as it was written down (`records.HealthRecord`)."""

    worker: str = ""  # its name, with its instance where another has the name too
    name: str = ""  # as `holdfast ps` calls it
    instance: str = ""  # hex
    group: str = ""
    weights: str = ""
    status: str = ""  # of `standing.Status`, its name
    weight: float = 1.0
    spare: bool = False
    quarantined: bool = False
    last_resort: bool = False  # it serves only because too few others can
    reason: str = ""
    since_unix_s: float = 0.0  # of this status
    causes: dict[str, str] = {}  # by `standing.Cause`
    fall: int = 0
    fell_unix_s: float = 0.0
    fell_for: dict[str, str] = {}  # the causes that were held then
    written_unix_s: float = 0.0
    breaker: str = ""  # closed, open, half_open
    breaker_reason: str = ""
    canary_unix_s: float = 0.0  # when the last that was heard of was sent; 0: none
    canary_passed_unix_s: float = 0.0  # when the last that passed was
    errors: list[WorkerError] = []  # its last ones, the oldest first


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """How far service is degraded, and why."""

    level: int = 0
    reason: str = ""
    vacant: bool = False


class CapacityShown(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers carry, of what is promised."""

    ratio: float = 1.0  # without a promise: 1 while anybody carries anything
    promised: bool = True
    words: str = ""
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    carriers: int = 0  # workers that carry it, with those that are waking
    unmeasured: int = 0  # of those that count as what is assumed of them


class ControlPage(msgspec.Struct, frozen=True, kw_only=True):
    """What a control knows in one moment."""

    status: str = "ready"
    ready: bool = True
    role: str = "control"
    leads: bool = False
    reason: str = ""
    store: str = ""
    level: Level | None = None
    capacity: CapacityShown | None = None
    standbys: dict[str, int] = {}  # by group
    fault_sources: dict[str, str] = {}  # of its machine's GPUs, by name: what is read, or why it cannot be
    verdicts: list[Verdict] = []
    refuted: list[str] = []  # what cards expect of known questions and workers do not answer: it is not judged by


def control_page(facts: dict[str, Any]) -> ControlPage | None:
    """A status page as control's, if it is one."""
    if facts.get("role") != "control":
        return None
    try:
        return msgspec.convert(facts, ControlPage)
    except msgspec.ValidationError:
        return None
