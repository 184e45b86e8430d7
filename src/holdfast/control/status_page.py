"""Builds control's status page, which `ps`, `top` and the supervisor's witness read. Pure.

Always true: the page is derived from the store and current measurements, so two controls of one deployment show the
same verdicts; the shown name of a worker is unique.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.health import breaker
from holdfast.health.expectations import ExpectationsRecord
from holdfast.health.records import HealthRecord
from holdfast.health.standing import HealthStatus
from holdfast.health.status_page import CapacityShown, ControlPage, LevelShown, VerdictShown
from holdfast.routing.capacity import Capacity
from holdfast.routing.degradation import LevelRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlView:
    """What a control knows at one moment."""

    name: str
    leads: bool
    records: Mapping[str, HealthRecord] = field(default_factory=dict)  # by the worker's path in the store
    # Of each connected engine, by path: its group, and whether it is active.
    members: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    level: LevelRecord | None = None
    capacity: Capacity | None = None
    store: str = "connected"
    reason: str = ""  # why it does not lead, or decides nothing
    fault_sources: Mapping[str, str] = field(default_factory=dict)  # by name: what it reads, or why it cannot
    refuted: Sequence[str] = ()  # from `refuted_of`
    unix_s: float = 0.0  # the time of this view

    @property
    def groups(self) -> dict[str, int]:
        """Return the number of standbys in each group of engines that take over from each other."""
        named = [(group, active) for group, active in self.members.values() if group]
        standbys = Counter(group for group, active in named if not active)
        return {group: standbys[group] for group, _ in named}

    def asleep(self, path: str) -> bool:
        """Return True if the worker is a standby, which gets no questions."""
        return not self.members.get(path, ("", True))[1]


def ids(records: Mapping[str, HealthRecord]) -> dict[str, str]:
    """Return the shown name of each worker, by path: its name in `holdfast status`, with its instance where two living
    workers share a name (on two machines, say). A dead worker is left out where another has its name."""
    living = {path: record for path, record in records.items() if record.standing.status != HealthStatus.DEAD}
    names = Counter(record.name for record in living.values())
    shown = {
        path: record.name if names[record.name] == 1 else f"{record.name}-{path.rpartition('/')[2]}"
        for path, record in living.items()
    }
    dead = [(record.standing.since_s, path, record.name) for path, record in records.items() if path not in living]
    for _, path, name in sorted(dead, reverse=True):
        if name not in names:  # the latest of several
            names[name] = 1
            shown[path] = name
    return shown


def refuted_of(expected: Iterable[ExpectationsRecord]) -> list[str]:
    """Return the cards' expected answers that were withdrawn, with the reason."""
    return [
        f"canary_prompts[{place}] of card {record.key.card}: {entry.refuted}"
        for record in expected
        for place, entry in enumerate(record.entries)
        if entry.refuted
    ]


def group_of(record: HealthRecord) -> str:
    """Return the worker's group of engines; a worker without a group is its own group."""
    return record.group or record.name


def page(view: ControlView) -> ControlPage:
    """Return what /health shows."""
    named, level = ids(view.records), view.level
    shown = sorted(named, key=lambda path: (len(named[path]), named[path]))
    return ControlPage(
        leads=view.leads,
        reason=view.reason,
        store=view.store,
        level=LevelShown(level=level.level, reason=level.reason, vacant=level.vacant) if level is not None else None,
        capacity=_capacity(view.capacity),
        standbys=view.groups,
        fault_sources=dict(view.fault_sources),
        refuted=list(view.refuted),
        verdicts=[_verdict(path, named[path], view.records[path], view.unix_s) for path in shown],
    )


def _verdict(path: str, worker: str, record: HealthRecord, unix_s: float) -> VerdictShown:
    standing = record.standing
    return VerdictShown(
        worker=worker,
        name=record.name,
        instance=path.rpartition("/")[2],
        group=record.group,
        weights=record.weights,
        status=HealthStatus(standing.status).name,
        weight=record.weight,
        spare=record.spare,
        quarantined=standing.quarantined,
        last_resort=record.last_resort,
        replace=record.replace,
        reason=standing.reason + _remedy(record, unix_s),
        since_unix_s=standing.since_s,
        causes=dict(standing.causes),
        fall=standing.fall,
        fell_unix_s=standing.fell_s,
        fell_for=dict(standing.fell_for),
        written_unix_s=record.at_unix_s,
        breaker=breaker.BreakerState(record.breaker.state).name.lower(),
        breaker_reason=record.breaker.reason,
        canary_unix_s=standing.heard_s,
        canary_passed_unix_s=standing.good_s,
        errors=list(record.errors),
    )


def _remedy(record: HealthRecord, unix_s: float) -> str:
    """Return what control does about wrong answers, and what an operator can do."""
    if not record.standing.quarantined or record.standing.status == HealthStatus.DEAD:
        return ""
    if record.verified:
        why = "its weights are as they were written, so its process or its device computes wrongly"
        return f"; {why}: restart it, and if the next process is wrong too, replace the device"
    if record.reloads < 2:  # the first reload follows from the verdict
        return "; its weights are being verified"
    left_s = max(0.0, record.reload_next_s - unix_s)
    soon = f"{left_s:.0f} s" if left_s < 120.0 else f"{left_s / 60.0:.0f} min"
    return f"; asked to verify its weights {record.reloads} times, next in {soon}"


def _capacity(capacity: Capacity | None) -> CapacityShown | None:
    if capacity is None:
        return None
    requests, tokens = round(capacity.rates.requests_per_s, 3), round(capacity.rates.tokens_per_s, 3)
    return CapacityShown(
        ratio=capacity.ratio,
        promised=capacity.promised is not None,
        words=str(capacity),
        requests_per_s=requests,
        tokens_per_s=tokens,
        carriers=capacity.carriers,
        unmeasured=capacity.unmeasured,
    )
