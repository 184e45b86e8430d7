"""A clock that stands where a test puts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ManualClock:
    """`core.ports.Clock`: both clocks show `now_s`, which goes on by `step_s` whenever wall time is asked for."""

    now_s: float
    step_s: float = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        self.now_s += self.step_s
        return self.now_s - self.step_s
