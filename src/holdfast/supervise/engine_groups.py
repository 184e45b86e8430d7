"""Groups of engines that stand in for each other, as people see them: which leads, which stand by, the last failover.

Pure: made from the statuses of one look. Always true: a step of the timeline that has not happened is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from holdfast.supervise.status import Status

# In the order they happen; names as people say them. Milliseconds since the dead engine's last sign of life.
TIMELINE = (
    ("died_ms", "died"),
    ("eof_ms", "EOF"),
    ("lock_ms", "lock"),
    ("fence_ms", "CPU fence"),
    ("adopted_ms", "adopted"),
    ("announced_ms", "announced"),
    ("first_token_ms", "first token"),
    ("gpu_fence_ms", "GPU fence"),
    ("new_standby_ms", "new standby"),
)


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """An active, its standbys, and how it came to be the active."""

    name: str
    active: Status | None
    members: tuple[Status, ...]

    @property
    def failover(self) -> dict[str, Any] | None:
        """How the active took over; None if it was the first of its group."""
        found = self.active.failover if self.active is not None else None
        return found if found and found.get("from_epoch", 1) else None

    def __str__(self) -> str:
        if self.members and all(member.state == "asleep" for member in self.members):
            return f"{self.name}: asleep (WARM, or by `/engine/sleep`): {_and([one.name for one in self.members])}"
        if self.active is None:
            return f"{self.name}: no engine is active; {self._others()}"
        epoch = f" (epoch {self.active.epoch})" if self.active.epoch is not None else ""
        return f"{self.name}: {self.active.name} is active{epoch}; {self._others()}"

    def _others(self) -> str:
        others = [member for member in self.members if member is not self.active]
        ready = [member.name for member in others if member.state == "standby" and not member.note]
        late = [f"{member.name} is {member.state}" for member in others if member.name not in ready]
        stand = f"{_and(ready)} {'stand' if len(ready) > 1 else 'stands'} by" if ready else "no standby is ready"
        return ", ".join([stand, *late])


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)


def groups_of(statuses: Sequence[Status]) -> list[EngineGroup]:
    """Return every group, in the order of its first member."""
    names = dict.fromkeys(status.group for status in statuses if status.group)
    return [_group(name, tuple(status for status in statuses if status.group == name)) for name in names]


def _group(name: str, members: tuple[Status, ...]) -> EngineGroup:
    active = [member for member in members if member.lifecycle == "active"]
    # Two would be a bug of the election; the newer epoch is the one that the vault admits.
    leader = max(active, key=lambda member: member.epoch or 0, default=None)
    return EngineGroup(name, leader, members)


def with_groups(statuses: Sequence[Status], grouped: dict[str, str]) -> list[Status]:
    """Every engine with its group (a dead one does not tell; `grouped` is what it was started with), and the active's
    timeline with its end: when a new standby stood ready."""
    known = [structs.replace(s, group=s.group or grouped.get(s.name, "")) for s in statuses]
    leaders = {group.active.name: group for group in groups_of(known) if group.active is not None}
    return [_complete(status, leaders[status.name]) if status.name in leaders else status for status in known]


def _complete(active: Status, group: EngineGroup) -> Status:
    if not active.failover:
        return active
    return structs.replace(active, failover=with_new_standby(active.failover, group.members))


def with_new_standby(failover: dict[str, Any], members: Sequence[Status]) -> dict[str, Any]:
    """A timeline with the moment a standby stood ready, if one of these has become one since its zero."""
    if not isinstance(failover.get("unix_s"), int | float):
        return failover
    # The wall clock was read when the lock was won; zero is earlier.
    began_s = float(failover["unix_s"]) - float(failover.get("lock_ms", 0.0)) / 1000.0
    stood = [m.entered_unix_s for m in members if m.state == "standby" and m.entered_unix_s is not None]
    # One that stood by all along is no news.
    since = [entered_s for entered_s in stood if entered_s >= began_s]
    return failover | {"new_standby_ms": (min(since) - began_s) * 1000.0} if since else failover


def timeline(failover: dict[str, Any]) -> list[tuple[str, float]]:
    """Return what happened, in milliseconds, in order of time."""
    told = [(words, float(failover[key])) for key, words in TIMELINE if isinstance(failover.get(key), int | float)]
    return sorted(told, key=lambda step: step[1])
