"""What control decided, as people should see it: the pages of one look, read together. Pure.

Always true: a control that leads is believed before one that follows, and both before what frontends remember; of a
worker that no page mentions nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from holdfast.health.status_page import ControlPage, LevelShown, VerdictShown, control_page
from holdfast.supervise.status import Status

HEALTHY = "HEALTHY"
UNKNOWN = "unknown"
UNCHECKED = "unchecked"  # `standing.Cause`; alone it is a beginning, not a failure


def decided(pages: Sequence[Mapping[str, Any]]) -> ControlPage | None:
    """Return what the control that leads says, or another that runs; None: there is none."""
    found = [page for facts in pages if (page := control_page(dict(facts))) is not None]
    return max(found, key=lambda page: page.leads, default=None)


def rows_of(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A frontend's rows of its workers; those of another version may be anything."""
    rows = facts.get("workers") if facts.get("role") == "frontend" else ()
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []


def remembered(pages: Sequence[Mapping[str, Any]]) -> list[VerdictShown]:
    """Return what frontends go by, which keep what was last decided."""
    rows = [row for facts in pages for row in rows_of(facts)]
    told = {
        str(row.get("instance") or UNKNOWN): row
        for row in rows
        if isinstance(row.get("weight"), int | float) and row.get("standing")
    }
    return [
        VerdictShown(
            worker=str(row.get("name") or UNKNOWN),
            name=str(row.get("name") or UNKNOWN),
            instance=instance,
            group=str(row.get("group") or ""),
            status=str(row["standing"]).upper(),
            weight=float(row["weight"]),
            reason=str(row.get("standing_reason") or ""),
            spare=row.get("spare") is True,
        )
        for instance, row in told.items()
    ]


def followed(pages: Sequence[Mapping[str, Any]]) -> LevelShown | None:
    """The worst level that a frontend goes by; None: none says."""
    levels = [facts.get("level") for facts in pages if facts.get("role") == "frontend"]
    worst = max((level for level in levels if isinstance(level, int)), default=None)
    return None if worst is None else LevelShown(level=worst, reason="the level that frontends last received")


def word(verdict: VerdictShown) -> str:
    """One word for what it has earned."""
    if verdict.quarantined:
        return "quarantined"
    if set(verdict.causes) == {UNCHECKED}:
        return UNCHECKED
    if verdict.spare and verdict.status == HEALTHY:
        return "spare"
    return verdict.status.lower()


# Causes (`standing.Cause`) that take a worker's traffic and are incidents, the gravest first. A first check
# and a process that ended (which its supervisor tells) are none.
TAKEN = (
    "wrong-answer", "device-lost", "engine-failed", "lost", "breaker-open", "canary-failing", "device-sick", "crawling",
)  # fmt: skip


def trouble(verdict: VerdictShown) -> str:
    """The cause for which it has no traffic, if that is an incident."""
    if verdict.weight > 0.0 or verdict.status == "DEAD":
        return ""
    return _gravest(verdict.causes)


def last_trouble(verdict: VerdictShown) -> str:
    """The cause for which it last fell, if that was an incident; it may have its traffic again."""
    return _gravest(verdict.fell_for)


def _gravest(causes: Mapping[str, str]) -> str:
    return next((cause for cause in TAKEN if cause in causes), "")


def verdict_on(name: str, instance: str, verdicts: Sequence[VerdictShown]) -> VerdictShown | None:
    """Return the verdict on the worker that has the name now, not on one that had it before or has it elsewhere; on any
    of that name, where the instance is not known."""
    named = [verdict for verdict in verdicts if verdict.name == name]
    return next((verdict for verdict in reversed(named) if instance in ("", verdict.instance)), None)


def with_verdicts(statuses: Sequence[Status], verdicts: Sequence[VerdictShown]) -> list[Status]:
    """Every worker with what was decided of it."""
    return [_with_verdict(status, verdict_on(status.name, status.instance, verdicts)) for status in statuses]


def _with_verdict(status: Status, verdict: VerdictShown | None) -> Status:
    if verdict is None or status.role != "worker":
        return status
    why = "" if verdict.status == HEALTHY else verdict.reason
    said = {"health": word(verdict), "weight": verdict.weight, "health_reason": why, "errors": verdict.errors}
    return structs.replace(status, **said)
