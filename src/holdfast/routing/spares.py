"""The reserve: sound workers of one set that are kept without traffic, until capacity is lost. Pure; `now_s` comes in.

Theory. A spare is loaded, canaried and judged like any other worker; only its traffic is missing. So giving it some is
one record that frontends read, and takes no time worth speaking of. It is given at once when fewer serve than should
(one fell, or is doubted), or when capacity falls short of the promise: to serve with one too many costs nothing. To
take traffic away again may cost something, so that waits until all has been well for a while, and for twice as long
where a spare was needed soon after it had been put by.

How many should serve follows from the *size* of the set: as many as were planned, or the most that were there at once.
A share of it is rounded down, so a small set keeps none.

Always true: a worker is put by only if it is sound, if as many serve without it as should, if these keep the promise,
and at level 0; nobody is put by before the deployment was whole; the last that serves is never put by; nothing is
stored of who is a spare, which its record says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.routing.capacity import Capacity
from holdfast.spec.levels import SpareSettings

# Capacity that is short of the promise by this much is acted on at once; by less it may be noise.
SHORT_BAND = 0.05
# Then it must last: longer than noise does, and less than a level needs to follow (`fall_near_s`).
SHORT_NEAR_S = 10.0
# A spare that is needed so soon after it was put by doubles how long the next is waited for, up to so many times.
FLAP_S = 600.0
PATIENCE_MAX = 16


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of the set, or a group of it whose standby is waking."""

    name: str
    weight: float  # by its standing alone; a waking group has 1
    sound: bool  # awake, and nothing is held against it: it may be a spare
    spare: bool = False
    running: int = 0  # streams


@dataclass(frozen=True, slots=True)
class Looked:
    """The set as it is now. `capacity` is the deployment's, without its spares."""

    members: Sequence[Member]
    capacity: Capacity
    level: int = 0
    whole: bool = True  # it has begun: not all the others are still to come


@dataclass(frozen=True, slots=True)
class Spared:
    """From now on it is a spare, or is none any more."""

    name: str
    spare: bool
    reason: str


class Reserve:
    """The spares of one set."""

    __slots__ = ("_calm_since_s", "_patience", "_put_by_s", "_ready", "_settings", "_short_since_s", "size")

    def __init__(self, settings: SpareSettings, size: int = 0, *, begun: bool = False) -> None:
        """`size`: workers that were planned, 0 if nobody said. `begun`: others decided on this set before."""
        self.size = size
        self._settings = settings
        self._ready = begun  # once it has what it wants, every change waits
        self._patience = 1
        self._put_by_s: float | None = None  # when the last was
        self._short_since_s: float | None = None
        self._calm_since_s: float | None = None

    def __repr__(self) -> str:
        return f"<Reserve of {self.wanted} in {self.size}>"

    @property
    def wanted(self) -> int:
        return self._settings.of(self.size)

    @property
    def serving(self) -> int:
        """Workers that should have traffic."""
        return self.size - self.wanted

    def step(self, event: Looked, now_s: float) -> tuple[Spared, ...]:
        """Who becomes a spare, and who is none any more."""
        self.size = max(self.size, sum(1 for member in event.members if member.weight > 0.0))
        # One that fell is brought by nobody, and is a spare again when it returns; one that is doubted comes last.
        spares = [member for member in event.members if member.spare and member.weight > 0.0]
        self._ready = self._ready or len(spares) >= self.wanted > 0
        needed, why = self._needed(event, len(spares), now_s)
        if needed:
            self._bring(now_s)
            spares.sort(key=lambda one: (not one.sound, one.name))
            return tuple(Spared(one.name, False, why) for one in spares[:needed])
        return self._put_by(event, len(spares), now_s)

    def next_deadline_s(self) -> float | None:
        """When to look again at the latest; None: when something happens."""
        due = [] if self._short_since_s is None else [self._short_since_s + SHORT_NEAR_S]
        due += [] if self._calm_since_s is None else [self._calm_since_s + self._wait_s()]
        return min(due, default=None)

    def _needed(self, event: Looked, spares: int, now_s: float) -> tuple[int, str]:
        """How many of the spares must serve now, and why."""
        surplus = spares - self.wanted  # the set was made smaller, or the setting was
        if surplus > 0:
            return surplus, f"{self.wanted} are kept in reserve"
        have = sum(member.weight for member in event.members if not member.spare)
        if spares and have < self.serving:
            return min(spares, math.ceil(self.serving - have)), f"{have:g} of {self.serving} workers serve"
        ratio = event.capacity.ratio
        if ratio >= 1.0 and event.level == 0:
            self._short_since_s = None
            return 0, ""
        if not spares:
            return 0, ""
        if self._short_since_s is None:
            self._short_since_s = now_s
        far = event.level > 0 or ratio <= 1.0 - SHORT_BAND
        if not far and now_s < self._short_since_s + SHORT_NEAR_S:
            return 0, ""
        self._short_since_s = None
        return 1, f"capacity is {ratio:.0%} of the promise"

    def _bring(self, now_s: float) -> None:
        """A spare was needed."""
        self._calm_since_s = None
        if self._put_by_s is not None:
            soon = now_s - self._put_by_s <= FLAP_S
            self._patience = min(2 * self._patience, PATIENCE_MAX) if soon else 1
            self._put_by_s = None

    def _put_by(self, event: Looked, spares: int, now_s: float) -> tuple[Spared, ...]:
        """Take its traffic from whoever has the least, if all has been well for long enough."""
        one = self._candidate(event, spares)
        if one is None:
            self._calm_since_s = None
            return ()
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s < self._calm_since_s + self._wait_s():
            return ()
        self._calm_since_s = None
        self._put_by_s = now_s if self._ready else None  # at the start no wait was too short
        return (Spared(one.name, True, f"{self.serving} of {self.size} workers serve, which is enough"),)

    def _candidate(self, event: Looked, spares: int) -> Member | None:
        serving = [member for member in event.members if not member.spare]
        enough = sum(member.weight for member in serving) >= self.serving + 1
        if spares >= self.wanted or not (enough and event.whole and event.level == 0):
            return None
        fit = [one for one in serving if one.sound and event.capacity.without(one.name) >= 1.0]
        return min(sorted(fit, key=lambda one: one.name, reverse=True), key=lambda one: one.running, default=None)

    def _wait_s(self) -> float:
        return self._settings.settle_s * self._patience if self._ready else 0.0
