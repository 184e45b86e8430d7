"""What is seen of a deployment while it changes: how much of it serves, and how many there are of each service.

Always true: a worker serves as far as every frontend that takes requests would send it some, by those frontends' own
pages; one that has just begun is asked once it knows whom the others know. A frontend serves if it says so.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.rollouts.shapes import FRONTEND, NAME
from bench.rollouts.site import Site
from holdfast.health.records import ReportRecord
from holdfast.supervise.replicas import replica_id_of

LOOK_S = 0.1
# One that has just begun knows of no worker yet: those that are ready are believed first.
TAKING = ("ready", "no_worker")
_PARTS = re.compile(r"-engine-\d+$")


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float
    serving: dict[str, int]  # by service
    there: dict[str, int]  # replicas with a process, by service


def _active(page: dict[str, Any]) -> set[str]:
    """Replicas that a frontend would send requests to."""
    return {_PARTS.sub("", one["name"]) for one in page["workers"] if one["active"]}


@dataclass(slots=True)
class Looks:
    """All looks of one change."""

    site: Site
    services: tuple[str, ...]
    looks: list[Look] = field(default_factory=list)
    pids: dict[str, set[int]] = field(default_factory=dict)  # of each process, by name
    models: set[str] = field(default_factory=set)  # that were served at one time, where that were most
    _whole: set[str] = field(default_factory=set)  # frontends that once knew all workers that others knew
    _names: dict[str, str] = field(default_factory=dict)  # of workers, by instance
    _tried: dict[tuple[str, str], int] = field(default_factory=dict)  # attempts, by frontend and instance

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            began_s = time.monotonic()
            pages = await self.site.frontends()
            serving = self._serving(pages)
            self._note(pages)
            if serving is not None:
                self.looks.append(Look(began_s, serving, self._there()))
            await asyncio.sleep(max(0.0, began_s + LOOK_S - time.monotonic()))

    def _serving(self, pages: dict[str, dict[str, Any]]) -> dict[str, int] | None:
        by_status = {status: {name for name, page in pages.items() if page["status"] == status} for status in TAKING}
        taking = next(filter(None, by_status.values()), None)
        if not taking:
            return None
        seen = {name: _active(pages[name]) for name in taking}
        known = set[str]().union(*(seen[name] for name in taking & self._whole))
        self._whole |= {name for name in taking if seen[name] >= known}
        pods = set.intersection(*(seen[name] for name in taking & self._whole))
        found = [replica_id_of(pod, NAME, self.services) for pod in pods]
        counted = Counter(one.service for one in found if one is not None)
        return {service: counted[service] for service in self.services} | {FRONTEND: len(taking)}

    def _note(self, pages: dict[str, dict[str, Any]]) -> None:
        for page in pages.values():
            self._names |= {one["instance"]: one["name"] for one in page["workers"]}
            if len(page["models"]) > len(self.models):
                self.models = set(page["models"])
        for value in self.site.reports.values.values():
            report = msgspec.json.decode(value, type=ReportRecord)
            for instance, seen in report.workers.items():
                tried = seen.succeeded + sum(seen.failed.values()) + seen.open
                key = (report.name, instance)
                self._tried[key] = max(tried, self._tried.get(key, 0))

    def attempts(self, sets: Collection[str]) -> int:
        """Of customers, on workers of these sets."""
        named = ((self._names.get(instance, ""), count) for (_, instance), count in self._tried.items())
        found = ((replica_id_of(_PARTS.sub("", name), NAME, self.services), count) for name, count in named)
        return sum(count for one, count in found if one is not None and one.set_id in sets)

    def _there(self) -> dict[str, int]:
        found = set()
        for role in ("worker", "frontend"):
            for record in self.site.records_alive(role):
                self.pids.setdefault(record.name, set()).add(record.pid)
                one = replica_id_of(record.name, NAME, (*self.services, FRONTEND))
                if one is not None:
                    found.add((one.service, one.name))
        counted = Counter(service for service, _ in found)
        return {service: counted[service] for service in (*self.services, FRONTEND)}

    def leave_out(self, cuts: Collection[tuple[float, float]]) -> None:
        """What was seen from the kill of a frontend until one is back: one that has just begun knows of no worker."""
        self.looks = [look for look in self.looks if not any(from_s <= look.at_s <= to_s for from_s, to_s in cuts)]

    def least(self, service: str) -> int:
        return min((look.serving[service] for look in self.looks), default=0)

    def nobody_s(self, service: str) -> float:
        """The longest from a look at which none of it served to one at which some did."""
        since_s, longest_s = None, 0.0
        for look in self.looks:
            longest_s = max(longest_s, look.at_s - since_s) if since_s is not None else longest_s
            if look.serving[service]:
                since_s = None
            elif since_s is None:
                since_s = look.at_s
        return longest_s

    def most(self, service: str) -> int:
        return max((look.there[service] for look in self.looks), default=0)
