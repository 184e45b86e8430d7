"""The reserve keeps healthy workers of one set without traffic until capacity is lost. Pure; `now_s` is passed in.

Theory. A spare is loaded and checked like any other worker, but gets no traffic. Control activates it by writing one
record that frontends read, which takes almost no time. A spare is activated at once when fewer workers serve than
should (one lost its weight or half of it), or when capacity falls short of the promise: one serving worker too many
costs nothing. Making a worker a spare may cost capacity. So that waits until all has been well for a while, and twice
as long if a spare was needed soon after it became one.

How many should serve follows from the *size* of the set: the planned number, or the most workers that were there at
once. The number of spares is a share of the size, rounded down, so a small set keeps none.

Always true:
- A worker becomes a spare only if it is sound, enough others serve and keep the promise, the level is 0, and the
  deployment was whole once.
- The last serving worker never becomes a spare.
- Which workers are spares is stored in their records, not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.routing.capacity import Capacity
from holdfast.spec.health import SpareSettings

# If capacity is short of the promise by this much, a spare is activated at once; a smaller shortage may be noise.
SHORT_BAND = 0.05
# How long a smaller shortage must last: longer than noise, and shorter than a level takes to follow (`fall_near_s`).
SHORT_NEAR_S = 10.0
# A spare that is needed within FLAP_S after it became one doubles the wait before the next, up to PATIENCE_MAX times.
FLAP_S = 600.0
PATIENCE_MAX = 16


@dataclass(frozen=True, slots=True)
class SpareCandidate:
    """A worker of the set, or a group of engines with a waking standby."""

    name: str
    weight: float  # by its standing alone; a waking group has 1
    sound: bool  # awake and without any cause against it: it may become a spare
    spare: bool = False
    running: int = 0  # streams


@dataclass(frozen=True, slots=True)
class SparesSampled:
    """The current state of the set. `capacity` is the deployment's, without its spares."""

    members: Sequence[SpareCandidate]
    capacity: Capacity
    level: int = 0
    whole: bool = True  # False: the deployment is starting, and more workers will come


@dataclass(frozen=True, slots=True)
class SpareChanged:
    """The worker becomes a spare, or stops being one."""

    name: str
    spare: bool
    reason: str


class Reserve:
    """Decides which workers of one set are spares."""

    def __init__(self, settings: SpareSettings, size: int = 0, *, begun: bool = False) -> None:
        """Create a reserve. `size`: the planned number of workers, 0 if unknown; `begun`: another control decided
        before."""
        self.size = size
        self._settings = settings
        self._ready = begun  # once the reserve was complete, every change waits
        self._patience = 1
        self._last_spare_at_s: float | None = None  # when the last worker became a spare
        self._short_since_s: float | None = None
        self._calm_since_s: float | None = None

    @property
    def wanted(self) -> int:
        return self._settings.of(self.size)

    @property
    def serving(self) -> int:
        """Return how many workers should have traffic."""
        return self.size - self.wanted

    def step(self, event: SparesSampled, now_s: float) -> tuple[SpareChanged, ...]:
        self.size = max(self.size, sum(1 for member in event.members if member.weight > 0.0))
        # A spare without weight is not activated, and is a spare again when it returns; one of reduced weight comes
        # last.
        spares = [member for member in event.members if member.spare and member.weight > 0.0]
        self._ready = self._ready or len(spares) >= self.wanted > 0
        needed, why = self._needed(event, len(spares), now_s)
        if needed:
            self._note_spare_needed(now_s)
            spares.sort(key=lambda one: (not one.sound, one.name))
            return tuple(SpareChanged(one.name, False, why) for one in spares[:needed])
        return self._make_spare(event, len(spares), now_s)

    def next_deadline_s(self) -> float | None:
        """Return when to step again at the latest; None: at the next change."""
        due = [] if self._short_since_s is None else [self._short_since_s + SHORT_NEAR_S]
        due += [] if self._calm_since_s is None else [self._calm_since_s + self._wait_s()]
        return min(due, default=None)

    def _needed(self, event: SparesSampled, spares: int, now_s: float) -> tuple[int, str]:
        """Return how many of the spares must serve now, and why."""
        short_since_s, self._short_since_s = self._short_since_s, None
        surplus = spares - self.wanted  # the set was made smaller, or the setting was
        if surplus > 0:
            return surplus, f"{self.wanted} are kept in reserve"
        have = sum(member.weight for member in event.members if not member.spare)
        if spares and have < self.serving:
            return min(spares, math.ceil(self.serving - have)), f"{have:g} of {self.serving} workers serve"
        ratio = event.capacity.ratio
        if not spares or (ratio >= 1.0 and event.level == 0):
            return 0, ""
        if short_since_s is None:
            short_since_s = now_s
        far = event.level > 0 or ratio <= 1.0 - SHORT_BAND
        if not far and now_s < short_since_s + SHORT_NEAR_S:
            self._short_since_s = short_since_s
            return 0, ""
        return 1, f"capacity is {ratio:.0%} of the promise"

    def _note_spare_needed(self, now_s: float) -> None:
        """Note that a spare was needed; if soon after a worker became one, wait longer before the next does."""
        self._calm_since_s = None
        if self._last_spare_at_s is not None:
            soon = now_s - self._last_spare_at_s <= FLAP_S
            self._patience = min(2 * self._patience, PATIENCE_MAX) if soon else 1
            self._last_spare_at_s = None

    def _make_spare(self, event: SparesSampled, spares: int, now_s: float) -> tuple[SpareChanged, ...]:
        """Make the worker with the fewest streams a spare, if all has been well for long enough."""
        one = self._candidate(event, spares)
        if one is None:
            self._calm_since_s = None
            return ()
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s < self._calm_since_s + self._wait_s():
            return ()
        self._calm_since_s = None
        self._last_spare_at_s = now_s if self._ready else None  # spares of the start do not count as made too soon
        return (SpareChanged(one.name, True, f"{self.serving} of {self.size} workers serve, which is enough"),)

    def _candidate(self, event: SparesSampled, spares: int) -> SpareCandidate | None:
        serving = [member for member in event.members if not member.spare]
        enough = sum(member.weight for member in serving) >= self.serving + 1
        if spares >= self.wanted or not (enough and event.whole and event.level == 0):
            return None
        fit = [one for one in serving if one.sound and event.capacity.without(one.name) >= 1.0]
        return min(sorted(fit, key=lambda one: one.name, reverse=True), key=lambda one: one.running, default=None)

    def _wait_s(self) -> float:
        return self._settings.settle_s * self._patience if self._ready else 0.0
