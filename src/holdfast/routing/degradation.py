"""Derives a degradation level from the share of its SLO that a deployment can carry. Pure; `now_s` is passed in.

Theory. The level is the number of bounds (1, 0.75, 0.5, 0.25 of the undegraded SLO) that the capacity is below. Each
level has a row of `RULES`, which replaces the last one, so a better level undoes everything (facts 15). A bound is
crossed when the ratio was beyond it without a break for some time: a short time downwards if the distance is `band` or
more; a longer time if it is less, or upwards. So a ratio that swings around a bound changes nothing. If the level gets
worse again soon after a return, the next return takes twice as long.

Without any worker there is no ratio. Frontends hold streams for a worker that may come back, and the level stays until
`hold_s` is over. Then it is 4 and *vacant*, which ends with the first worker.

Always true:
- The level depends only on ratios, time and the record, never on the measures taken.
- It gets worse only after `fall_s`, or after `hold_s` without a worker.
- It gets better only after `return_s`, unless it was vacant; without a worker it never gets better.
- Premium requests are refused at level 4 only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.core.tiers import Tier
from holdfast.spec.health import DegradationSettings

LEVEL_MAX = 4
# The level is at least k when the capacity is below BOUNDS[k - 1] of the SLO.
BOUNDS = (1.0, 0.75, 0.5, 0.25)
# Tolerance for binary fractions: 0.75 - 0.7 must count as 0.05. Ratios come in thousandths.
ROUNDING = 0.0001
# When clients of refused requests should retry: about as long as a return near a bound takes.
RETRY_AFTER_S = 30.0
# The longest wait before a return, as a multiple of the normal one: eight minutes near a bound.
PATIENCE_MAX = 16
PLANNED_MAX = 100_000  # workers: more than any deployment has


@dataclass(frozen=True, slots=True)
class Rules:
    batch_multiplier: float  # of each worker's places, for all tiers but premium
    shed: frozenset[Tier]  # new requests of these tiers are refused; waiting and running ones are served
    latency_factor: float  # of the latency targets
    accepts_new: bool

    def places(self, places: int, tier: Tier) -> int:
        """Return how many streams a worker with `places` places may run before it refuses a new stream of this tier.

        Premium may use all places: a quarter of the workers at half their places would not carry the fifth of full
        capacity that premium gets until level 4.
        """
        if tier is Tier.PREMIUM or places <= 0:
            return places
        return max(1, int(places * self.batch_multiplier))


_BEST_EFFORT = frozenset({Tier.BEST_EFFORT})

RULES = (
    Rules(batch_multiplier=1.0, shed=frozenset(), latency_factor=1.0, accepts_new=True),
    Rules(batch_multiplier=0.75, shed=frozenset(), latency_factor=1.0, accepts_new=True),
    Rules(batch_multiplier=0.75, shed=_BEST_EFFORT, latency_factor=1.0, accepts_new=True),
    Rules(batch_multiplier=0.5, shed=_BEST_EFFORT, latency_factor=2.0, accepts_new=True),
    Rules(batch_multiplier=0.5, shed=frozenset(Tier), latency_factor=2.0, accepts_new=False),
)


SHED_REASONS = ("no_capacity", "tier_shed", "pushed_out")


@dataclass(frozen=True, slots=True)
class Shed:
    """The refusal of a new request for lack of capacity."""

    reason: str  # one of `SHED_REASONS`, for headers, metrics and programs
    message: str
    retry_after_s: float


def refusal(level: int, tier: Tier, retry_after_s: float = RETRY_AFTER_S) -> Shed | None:
    """Return why a new request of this tier is refused at this level; None: it is accepted."""
    rules = RULES[level]
    if not rules.accepts_new:
        why = f"capacity is too low for new requests (degradation level {level})"
        return Shed("no_capacity", why, retry_after_s)
    if tier in rules.shed:
        why = f"capacity is low, and {tier.label} requests are not taken (degradation level {level})"
        return Shed("tier_shed", why, retry_after_s)
    return None


def pushed_out(tier: Tier, retry_after_s: float = RETRY_AFTER_S) -> Shed:
    """Return the refusal of the last request of a full queue, which requests before it push out."""
    return Shed("pushed_out", f"too many requests wait, and this one ({tier.label}) stands last", retry_after_s)


@dataclass(frozen=True, slots=True)
class LevelRecord:
    """The stored level, written when it changes, for frontends and the next leader."""

    level: int
    reason: str
    patience: int = 1  # how many times as long the next return takes
    vacant: bool = False  # there is no worker, and `hold_s` is over
    planned: int = 0  # workers that keep the promise, as the writer knew it; 0: no worker was there yet
    since_unix_s: float = 0.0  # when it was written

    def level_for(self, *, has_worker: bool, stale: bool = False) -> int:
        """Return the level that a frontend applies. It is at most 3 if the frontend has a worker although the record is
        vacant, or if no control has led for long (`stale`): no request is refused that a worker could serve."""
        return min(self.level, LEVEL_MAX - 1) if has_worker and (self.vacant or stale) else self.level


@dataclass(frozen=True, slots=True)
class Sampled:
    """A measurement of capacity; the ratio and the number of carriers are those of `capacity.Capacity`."""

    ratio: float
    carriers: int
    why: str = ""  # the figures behind it, for the reason


class DegradationError(Exception):
    """An event or a record is impossible. Nothing was changed."""


class _Side(StrEnum):
    """The position of a ratio relative to a bound. Far below implies below, and far above implies above."""

    FAR_BELOW = "far below"
    BELOW = "below"
    ABOVE = "above"
    FAR_ABOVE = "far above"


def level_at(ratio: float) -> int:
    """Return the level of a ratio that lasts."""
    return sum(1 for bound in BOUNDS if ratio < bound)


class Degradation:
    def __init__(self, settings: DegradationSettings, record: LevelRecord | None = None, now_s: float = 0.0) -> None:
        """Begin at level 0, or at the record's level until new samples have lasted long enough."""
        if record is not None and not (
            0 <= record.level <= LEVEL_MAX
            and 1 <= record.patience <= PATIENCE_MAX
            and 0 <= record.planned <= PLANNED_MAX
        ):
            raise DegradationError(f"this record cannot be: {record}")
        self._settings = settings
        self.record = record if record is not None else LevelRecord(0, "nothing measured yet")
        self._since_s: dict[tuple[int, _Side], float] = {}  # by level and side of its bound, where the ratio is now
        self._none_since_s: float | None = None
        self._begun = record is not None  # there was a worker once
        # When it last got better, if it has not got worse since.
        self._returned_at_s: float | None = now_s if self.record.patience > 1 and self.level == 0 else None

    @property
    def level(self) -> int:
        return self.record.level

    def step(self, event: Sampled, now_s: float) -> LevelRecord | None:
        """Apply a measurement; return the record to write if the level changed."""
        if not (event.ratio >= 0.0 and event.carriers >= 0):
            raise DegradationError(f"{event} cannot be")
        self._update_sides(event, now_s)
        if event.carriers == 0:
            return self._hold(now_s)
        figures = f"{event.ratio:.0%} of the SLO" + (f": {event.why}" if event.why else "")
        if self.record.vacant:
            return self._become(level_at(event.ratio), now_s, f"a worker is there again, {figures}")
        return self._update_level(now_s, figures)

    def next_deadline_s(self) -> float | None:
        """Return when to measure again at the latest: the level changes then if the ratio stays; None: never."""
        if self._none_since_s is not None:
            return None if self.record.vacant else self._none_since_s + self._settings.hold_s
        due = [
            since_s + self._wait_s(side)
            for (level, side), since_s in self._since_s.items()
            if (level == self.level if side in (_Side.ABOVE, _Side.FAR_ABOVE) else level > self.level)
        ]
        return min(due, default=None)

    def _update_sides(self, sample: Sampled, now_s: float) -> None:
        """Update since when the ratio has been on each side of each bound."""
        if sample.carriers == 0:
            self._since_s.clear()
            if self._none_since_s is None:
                self._none_since_s = now_s
            return
        self._none_since_s, self._begun = None, True
        far = self._settings.band - ROUNDING
        for level, bound in enumerate(BOUNDS, start=1):
            sides = {
                _Side.FAR_BELOW: sample.ratio <= bound - far,
                _Side.BELOW: sample.ratio < bound,
                _Side.ABOVE: sample.ratio >= bound,
                _Side.FAR_ABOVE: sample.ratio >= bound + far,
            }
            for side, is_there in sides.items():
                if is_there:
                    self._since_s.setdefault((level, side), now_s)
                else:
                    self._since_s.pop((level, side), None)

    def _hold(self, now_s: float) -> LevelRecord | None:
        assert self._none_since_s is not None
        if self.record.vacant or now_s < self._none_since_s + self._settings.hold_s:
            return None
        why = f"no worker for {self._settings.hold_s:g} s" if self._begun else "no worker yet: the first may be loading"
        return self._become(LEVEL_MAX, now_s, why, vacant=True)

    def _update_level(self, now_s: float, why: str) -> LevelRecord | None:
        level = LEVEL_MAX
        while level > self.level and not self._lasted(level, _Side.FAR_BELOW, _Side.BELOW, now_s):
            level -= 1
        if level == self.level:
            while level and self._lasted(level, _Side.FAR_ABOVE, _Side.ABOVE, now_s):
                level -= 1
        return self._become(level, now_s, why)

    def _lasted(self, level: int, far: _Side, near: _Side, now_s: float) -> bool:
        """Return True if the ratio has been on that side of a level's bound for long enough."""
        return any(
            (level, side) in self._since_s and now_s >= self._since_s[level, side] + self._wait_s(side)
            for side in (far, near)
        )

    def _wait_s(self, side: _Side) -> float:
        settings = self._settings
        patience = self.record.patience
        return {
            _Side.FAR_BELOW: settings.fall_s,
            _Side.BELOW: max(settings.fall_s, settings.fall_near_s),
            _Side.ABOVE: max(settings.return_s, settings.return_near_s) * patience,
            _Side.FAR_ABOVE: settings.return_s * patience,
        }[side]

    def _become(self, level: int, now_s: float, why: str, *, vacant: bool = False) -> LevelRecord | None:
        before = self.record
        if level == before.level and vacant == before.vacant:
            return None
        patience = before.patience
        if level < before.level:
            self._returned_at_s = now_s
        elif self._returned_at_s is not None:
            flaps = now_s - self._returned_at_s <= self._settings.flap_s
            patience = min(2 * patience, PATIENCE_MAX) if flaps else 1
            self._returned_at_s = None  # what gets worse from here on belongs to the same drop
        self.record = LevelRecord(level, why, patience, vacant)
        return self.record
