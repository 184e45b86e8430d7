"""A deployment at a glance, from one look around it: what `holdfast top` shows, and prints as JSON. Pure.

Always true: a figure that nobody has told is None or empty, never a guess; a rate is what was counted between two
looks at the same process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.cli.ps import Looked
from holdfast.health.shown import CapacityShown, Level, Verdict
from holdfast.supervise.incidents import Incident
from holdfast.supervise.status import Status, count, web_address
from holdfast.supervise.verdicts import HEALTHY, rows_of, verdict_on, word

INCIDENTS = 5  # the latest


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's line."""

    name: str
    pid: int = 0
    group: str = ""
    state: str = ""  # as `holdfast ps` says it; empty: it does not run here
    health: str = ""  # empty: nobody has decided anything
    weight: float | None = None
    reason: str = ""  # why it has not all its traffic
    breaker: str = ""
    streams: int | None = None
    tokens_per_s: float | None = None
    tokens_total: int | None = None
    canary: str = ""  # how the last one went: passed, failed
    canary_age_s: float | None = None
    note: str = ""


class FrontendSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend's line."""

    name: str
    state: str
    address: str
    streams: int = 0
    held: int | None = None  # for want of a worker, or of a place
    resumed_total: int | None = None
    store: str = ""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, at one moment."""

    at_unix_s: float
    monotonic_s: float
    control: str = ""  # leads, follows; empty: none runs
    control_note: str = ""
    level: Level | None = None
    capacity: CapacityShown | None = None
    workers: list[WorkerSeen] = []
    frontends: list[FrontendSeen] = []
    others: list[str] = []  # processes of other roles that are not well
    incidents: list[Incident] = []

    @property
    def tokens_per_s(self) -> float | None:
        rates = [worker.tokens_per_s for worker in self.workers if worker.tokens_per_s is not None]
        return sum(rates) if rates else None


def overview(
    looked: Looked, incidents: Sequence[Incident], *, before: Overview | None, unix_s: float, monotonic_s: float
) -> Overview:
    """What was found; `before`: what was shown the last time."""
    local = [status for status in looked.statuses if status.role == "worker"]
    counted = {(worker.name, worker.pid): worker.tokens_total for worker in before.workers} if before else {}
    passed_s = monotonic_s - before.monotonic_s if before else 0.0
    served = _streams(looked.pages)

    def seen(status: Status | None, verdict: Verdict | None) -> WorkerSeen:
        page = looked.pages.get(status.name, {}) if status is not None else {}
        total = count(page.get("tokens_total"))
        last = counted.get((status.name, status.pid)) if status is not None else None
        rate = (total - last) / passed_s if total is not None and last is not None and passed_s > 0.0 else None
        return _worker(status, verdict, served, unix_s, total=total, rate=rate)

    elsewhere = [verdict for verdict in looked.verdicts if verdict.name not in {status.name for status in local}]
    control = looked.control
    return Overview(
        at_unix_s=unix_s,
        monotonic_s=monotonic_s,
        control="" if control is None else "leads" if control.leads else "follows",
        control_note="" if control is None else control.reason,
        level=looked.level,
        capacity=control.capacity if control is not None else None,
        workers=[seen(status, verdict_on(status.name, status.instance, looked.verdicts)) for status in local]
        + [seen(None, verdict) for verdict in elsewhere],
        frontends=[_frontend(status, looked.pages.get(status.name, {})) for status in _of(looked, "frontend")],
        others=_unwell(looked.statuses),
        incidents=list(incidents[-INCIDENTS:]),
    )


def _of(looked: Looked, role: str) -> list[Status]:
    return [status for status in looked.statuses if status.role == role]


def _streams(pages: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """Streams of all frontends, by worker."""
    served: dict[str, int] = {}
    for page in pages.values():
        for row in rows_of(page):
            name, streams = row.get("name"), row.get("streams")
            if isinstance(name, str) and isinstance(streams, int):  # what it does not say is not known
                served[name] = served.get(name, 0) + streams
    return served


def _worker(
    status: Status | None,
    verdict: Verdict | None,
    served: Mapping[str, int],
    unix_s: float,
    *,
    total: int | None,
    rate: float | None,
) -> WorkerSeen:
    name = status.name if status is not None else verdict.worker if verdict is not None else ""
    asked_s = verdict.canary_unix_s if verdict is not None else 0.0
    failed = verdict is not None and verdict.canary_passed_unix_s < asked_s
    return WorkerSeen(
        name=name,
        pid=status.pid if status is not None else 0,
        group=status.group if status is not None else verdict.group if verdict is not None else "",
        state=status.state if status is not None else "",
        health=word(verdict) if verdict is not None else "",
        weight=verdict.weight if verdict is not None else None,
        reason=verdict.reason if verdict is not None and verdict.status != HEALTHY else "",
        breaker=verdict.breaker if verdict is not None else "",
        streams=status.streams if status is not None else served.get(name),
        tokens_per_s=None if rate is None else round(max(0.0, rate), 1),
        tokens_total=total,
        canary="" if not asked_s else "failed" if failed else "passed",
        canary_age_s=round(max(0.0, unix_s - asked_s), 1) if asked_s else None,
        note=status.note if status is not None else "",
    )


def _frontend(status: Status, page: Mapping[str, Any]) -> FrontendSeen:
    return FrontendSeen(
        name=status.name,
        state=status.state,
        address=web_address(status.address) if status.address else "",
        streams=status.streams,
        held=count(page.get("held")),
        resumed_total=count(page.get("resumed_total")),
        store=str(page.get("store") or ""),
    )


def _unwell(statuses: Sequence[Status]) -> list[str]:
    """Of all others, who is not as it should be."""
    rest = [status for status in statuses if status.role not in ("worker", "frontend")]
    told = [(status, ": ".join(filter(None, (status.state, status.note)))) for status in rest]
    return [f"{status.name}: {words}" for status, words in told if status.state != "ready" or status.note]
