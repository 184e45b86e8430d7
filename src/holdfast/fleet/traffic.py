"""What is asked of each model, and how full those are that serve it, by the name that clients know it by. Pure.

Always true: of several frontends' waiting requests the sum counts, and the first of them all; a frontend that is gone
says nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from holdfast.health.records import Demand

FRONTENDS_MAX = 1024  # whose words are kept; of more the first ones are


class Load(Struct, frozen=True):
    """Of all engines that serve a model, by their own beats."""

    running: int = 0
    kv_used: float = 0.0  # as a share of all they have


class Traffic:
    """Of a whole deployment."""

    def __init__(self) -> None:
        self._reports: dict[str, Mapping[str, Demand]] = {}
        self._loads: Mapping[str, Load] = {}

    def report(self, frontend: str, demand: Mapping[str, Demand] | None) -> set[str]:
        """Who waits at one frontend, whole; None: it is gone. The names of which it says something else now."""
        before = self._reports.pop(frontend, {})
        after = demand or {}
        if after and len(self._reports) < FRONTENDS_MAX:
            self._reports[frontend] = after
        return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

    def carry(self, loads: Mapping[str, Load]) -> None:
        """What those carry that serve, all of them."""
        self._loads = loads

    def demand(self, name: str) -> Demand | None:
        """None: nobody waits."""
        found = [report[name] for report in self._reports.values() if name in report]
        waiting = sum(one.waiting for one in found)
        since_s = min((one.since_unix_s for one in found if one.waiting), default=0.0)
        return Demand(waiting, since_s) if waiting else None

    def load(self, name: str) -> Load:
        return self._loads.get(name, Load())
