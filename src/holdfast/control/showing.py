"""What control shows: the facts of its status page, which `ps`, `top` and the supervisor's witness read. Pure.

Always true: everything follows from what stands in the store and from what is measured in that moment, so two controls
of one deployment show the same verdicts; a worker has one name here that no other has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.health import breaker
from holdfast.health.expectations import Record
from holdfast.health.records import HealthRecord
from holdfast.health.shown import CapacityShown, ControlPage, Level, Verdict
from holdfast.health.standing import Status
from holdfast.routing.capacity import Capacity
from holdfast.routing.degradation import LevelRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a control knows in one moment."""

    name: str
    leads: bool
    records: Mapping[str, HealthRecord] = field(default_factory=dict)  # by the worker's path in the store
    # Of each engine that is there, by path: its group, and whether it is active.
    members: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    level: LevelRecord | None = None
    capacity: Capacity | None = None
    store: str = "connected"
    reason: str = ""  # why it leads nobody, or decides nothing
    fault_sources: Mapping[str, str] = field(default_factory=dict)  # by name: what it reads, or why it cannot
    refuted: Sequence[str] = ()  # as `refuted_of` says
    unix_s: float = 0.0  # when that was

    @property
    def groups(self) -> dict[str, int]:
        """How many stand by in each group of engines that take over from each other."""
        named = [(group, active) for group, active in self.members.values() if group]
        standbys = Counter(group for group, active in named if not active)
        return {group: standbys[group] for group, _ in named}

    def asleep(self, path: str) -> bool:
        """Whether it stands by: nobody asks it anything."""
        return not self.members.get(path, ("", True))[1]


def ids(records: Mapping[str, HealthRecord]) -> dict[str, str]:
    """What each worker is called, by path. Its name, as `holdfast ps` has it; where two who live have one (on two
    machines, say) with their instance. One that is dead is not shown where another of its name has come since."""
    living = {path: record for path, record in records.items() if record.standing.status != Status.DEAD}
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


def refuted_of(expected: Iterable[Record]) -> list[str]:
    """Return what cards expect of known questions that was withdrawn, with the reason."""
    return [
        f"canary_prompts[{place}] of card {record.key.card}: {entry.refuted}"
        for record in expected
        for place, entry in enumerate(record.entries)
        if entry.refuted
    ]


def group_of(record: HealthRecord) -> str:
    """The engines that it takes turns with; one that has none is a group of its own."""
    return record.group or record.name


def page(view: View) -> ControlPage:
    """What /health shows."""
    named = ids(view.records)
    shown = sorted(named, key=lambda path: (len(named[path]), named[path]))
    return ControlPage(
        leads=view.leads,
        reason=view.reason,
        store=view.store,
        level=_level(view.level),
        capacity=_capacity(view.capacity),
        standbys=view.groups,
        fault_sources=dict(view.fault_sources),
        refuted=list(view.refuted),
        verdicts=[_verdict(path, named[path], view.records[path], view.unix_s) for path in shown],
    )


def _verdict(path: str, worker: str, record: HealthRecord, unix_s: float) -> Verdict:
    standing = record.standing
    return Verdict(
        worker=worker,
        name=record.name,
        instance=path.rpartition("/")[2],
        group=record.group,
        weights=record.weights,
        status=Status(standing.status).name,
        weight=record.weight,
        spare=record.spare,
        quarantined=standing.quarantined,
        last_resort=record.last_resort,
        reason=standing.reason + _remedy(record, unix_s),
        since_unix_s=standing.since_s,
        causes=dict(standing.causes),
        fall=standing.fall,
        fell_unix_s=standing.fell_s,
        fell_for=dict(standing.fell_for),
        written_unix_s=record.at_unix_s,
        breaker=breaker.State(record.breaker.state).name.lower(),
        breaker_reason=record.breaker.reason,
        canary_unix_s=standing.heard_s,
        canary_passed_unix_s=standing.good_s,
        errors=list(record.errors),
    )


def _remedy(record: HealthRecord, unix_s: float) -> str:
    """Return what is done about wrong answers, and what a person may do."""
    if not record.standing.quarantined or record.standing.status == Status.DEAD:
        return ""
    if record.verified:
        why = "its weights are as they were written, so its process or its device computes wrongly"
        return f"; {why}: restart it, and if the next process is wrong too, replace the device"
    if record.reloads < 2:  # the first follows from the verdict
        return "; its weights are being verified"
    left_s = max(0.0, record.reload_next_s - unix_s)
    soon = f"{left_s:.0f} s" if left_s < 120.0 else f"{left_s / 60.0:.0f} min"
    return f"; asked to verify its weights {record.reloads} times, next in {soon}"


def _level(record: LevelRecord | None) -> Level | None:
    return None if record is None else Level(level=record.level, reason=record.reason, vacant=record.vacant)


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
