"""Degradation: from the share of its SLO that a deployment can carry to what it does about it. Pure; `now_s` comes in.

Theory. A level is how many of four bounds (1, 0.75, 0.5, 0.25 of the undegraded SLO) the capacity is below. What is
done at a level is a row of `RULES`, looked up, never an edit of what was done before: so going back undoes all of it
(facts 15). A bound is crossed when the ratio stayed beyond it for a while, without a break: a short while downwards
when it is clear, by `band` or more; longer when it is near, or upwards. What swings around a bound therefore moves
nothing; what falls again soon after a return doubles how long the next return takes.

No worker at all is not a ratio: streams are held for a worker that may come back, and the level stays as it is until
the hold has run out. Only then it is 4, and *vacant*: it ends with the first worker that is there.

Always true: the level depends on ratios, time and the record alone, never on what was done about it; it gets worse only
after `fall_s`, or after `hold_s` without a worker, and better only after `return_s`, unless it was vacant; without a
worker it never gets better; premium is refused at level 4 only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from holdfast.core.tiers import Tier
from holdfast.spec.levels import DegradationSettings

LEVEL_MAX = 4
# The level is at least k when the capacity is below BOUNDS[k - 1] of the SLO.
BOUNDS = (1.0, 0.75, 0.5, 0.25)
# Ratios come in thousandths: 0.7 is as far from 0.75 as 0.05 says, whatever binary fractions make of it.
ROUNDING = 0.0001
# When to tell those who are shed to come back: about as long as a return near a bound takes.
RETRY_AFTER_S = 30.0
# Returns that follow each other wait at most so many times as long: eight minutes near a bound.
PATIENCE_MAX = 16
PLANNED_MAX = 100_000  # workers: more than any deployment has


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds at one level."""

    batch_multiplier: float  # of each worker's places, for all tiers but premium
    shed: frozenset[Tier]  # refused when they come; what waits or runs is served
    latency_factor: float  # of the latency targets
    accepts_new: bool

    def places(self, places: int, tier: Tier) -> int:
        """How many streams a worker may run for one of this tier to begin there, of as many places as it has.

        Premium may have them all: a quarter of the workers at half their places would not carry the fifth of full
        capacity that premium is served until level 4.
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
    """A new request is refused for want of capacity, though it may have done nothing wrong."""

    reason: str  # a word for a header, a metric and a program
    message: str
    retry_after_s: float


def refusal(level: int, tier: Tier, retry_after_s: float = RETRY_AFTER_S) -> Shed | None:
    """Why a new request of this tier is refused at this level; None: it is not."""
    rules = RULES[level]
    if not rules.accepts_new:
        why = f"capacity is too low for new requests (degradation level {level})"
        return Shed("no_capacity", why, retry_after_s)
    if tier in rules.shed:
        why = f"capacity is low, and {tier.word} requests are not taken (degradation level {level})"
        return Shed("tier_shed", why, retry_after_s)
    return None


def pushed_out(tier: Tier, retry_after_s: float = RETRY_AFTER_S) -> Shed:
    """Why one that waited does not any more: a line was full, and those before it stay."""
    return Shed("pushed_out", f"too many requests wait, and this one ({tier.word}) stands last", retry_after_s)


@dataclass(frozen=True, slots=True)
class LevelRecord:
    """What is written down when the level changes, for frontends and for whoever decides next."""

    level: int
    reason: str
    patience: int = 1  # how many times as long the next return takes
    vacant: bool = False  # there is no worker at all, and the hold has run out
    planned: int = 0  # workers that keep the promise, as far as whoever wrote it knew; 0: none was there yet
    since_unix_s: float = 0.0  # when it was written

    def level_for(self, *, has_worker: bool, stale: bool = False) -> int:
        """The level for one who sees the workers itself. One that is there disproves that there is none, also while
        nobody is there to write so; and where nobody has been there to decide for long (`stale`), nobody is refused
        whom it could serve."""
        return min(self.level, LEVEL_MAX - 1) if has_worker and (self.vacant or stale) else self.level


@dataclass(frozen=True, slots=True)
class Sampled:
    """Capacity was measured: `capacity.Capacity`'s ratio and its number of carriers."""

    ratio: float
    carriers: int
    why: str = ""  # the figures behind it, for the reason


@dataclass(frozen=True, slots=True)
class LevelChanged:
    """The level is another one: write the record, apply its rules."""

    before: int
    record: LevelRecord


class DegradationError(Exception):
    """An event or a record that cannot be. Nothing was changed."""


class _Side(Enum):
    """Where a ratio is, seen from a bound. What is far is on its side of it too."""

    FAR_BELOW = "far below"
    BELOW = "below"
    ABOVE = "above"
    FAR_ABOVE = "far above"


def level_at(ratio: float) -> int:
    """The level of a ratio that is there to stay."""
    return sum(1 for bound in BOUNDS if ratio < bound)


class Degradation:
    """One deployment's level."""

    __slots__ = ("_begun", "_none_since_s", "_record", "_returned_s", "_settings", "_since_s")

    def __init__(self, settings: DegradationSettings, record: LevelRecord | None = None, now_s: float = 0.0) -> None:
        """Begin whole, or as it was written down: the level stays until enough is seen anew."""
        if record is not None and not (
            0 <= record.level <= LEVEL_MAX
            and 1 <= record.patience <= PATIENCE_MAX
            and 0 <= record.planned <= PLANNED_MAX
        ):
            raise DegradationError(f"this record cannot be: {record}")
        self._settings = settings
        self._record = record if record is not None else LevelRecord(0, "nothing measured yet")
        self._since_s: dict[tuple[int, _Side], float] = {}  # by level and side of its bound, where the ratio is now
        self._none_since_s: float | None = None
        self._begun = record is not None  # there was a worker once
        # When it last got better, if it has not got worse since.
        self._returned_s: float | None = now_s if self._record.patience > 1 and self.level == 0 else None

    def __repr__(self) -> str:
        return f"level {self.level} ({self._record.reason})"

    @property
    def level(self) -> int:
        return self._record.level

    @property
    def record(self) -> LevelRecord:
        return self._record

    @property
    def rules(self) -> Rules:
        return RULES[self.level]

    def step(self, event: Sampled, now_s: float) -> tuple[LevelChanged, ...]:
        """Take what was measured; what became of it."""
        if not (event.ratio >= 0.0 and event.carriers >= 0):
            raise DegradationError(f"{event} cannot be")
        self._look(event, now_s)
        if event.carriers == 0:
            return self._hold(now_s)
        figures = f"{event.ratio:.0%} of the SLO" + (f": {event.why}" if event.why else "")
        if self._record.vacant:
            return self._become(level_at(event.ratio), now_s, f"a worker is there again, {figures}")
        return self._weigh(now_s, figures)

    def next_deadline_s(self) -> float | None:
        """When to measure again at the latest: the level changes then, if nothing else has; None: it stays."""
        if self._none_since_s is not None:
            return None if self._record.vacant else self._none_since_s + self._settings.hold_s
        falls = [
            since_s + self._wait_s(side)
            for (level, side), since_s in self._since_s.items()
            if level > self.level and side in (_Side.FAR_BELOW, _Side.BELOW)
        ]
        rises = [
            since_s + self._wait_s(side)
            for (level, side), since_s in self._since_s.items()
            if level == self.level and side in (_Side.ABOVE, _Side.FAR_ABOVE)
        ]
        return min(falls + rises, default=None)

    def _look(self, sample: Sampled, now_s: float) -> None:
        """Begin or end the while for which the ratio has been on each side of each bound."""
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

    def _hold(self, now_s: float) -> tuple[LevelChanged, ...]:
        assert self._none_since_s is not None
        if self._record.vacant or now_s < self._none_since_s + self._settings.hold_s:
            return ()
        why = f"no worker for {self._settings.hold_s:g} s" if self._begun else "no worker yet: the first may be loading"
        return self._become(LEVEL_MAX, now_s, why, vacant=True)

    def _weigh(self, now_s: float, why: str) -> tuple[LevelChanged, ...]:
        level = LEVEL_MAX
        while level > self.level and not self._lasted(level, _Side.FAR_BELOW, _Side.BELOW, now_s):
            level -= 1
        if level == self.level:
            while level and self._lasted(level, _Side.FAR_ABOVE, _Side.ABOVE, now_s):
                level -= 1
        return self._become(level, now_s, why)

    def _lasted(self, level: int, far: _Side, near: _Side, now_s: float) -> bool:
        """Whether the ratio has been on that side of a level's bound for long enough."""
        return any(
            (level, side) in self._since_s and now_s >= self._since_s[level, side] + self._wait_s(side)
            for side in (far, near)
        )

    def _wait_s(self, side: _Side) -> float:
        settings = self._settings
        patience = self._record.patience
        return {
            _Side.FAR_BELOW: settings.fall_s,
            _Side.BELOW: max(settings.fall_s, settings.fall_near_s),
            _Side.ABOVE: max(settings.return_s, settings.return_near_s) * patience,
            _Side.FAR_ABOVE: settings.return_s * patience,
        }[side]

    def _become(self, level: int, now_s: float, why: str, *, vacant: bool = False) -> tuple[LevelChanged, ...]:
        before = self._record
        if level == before.level and vacant == before.vacant:
            return ()
        patience = before.patience
        if level < before.level:
            self._returned_s = now_s
        elif self._returned_s is not None:
            flaps = now_s - self._returned_s <= self._settings.flap_s
            patience = min(2 * patience, PATIENCE_MAX) if flaps else 1
            self._returned_s = None  # falls that follow are the same one
        self._record = LevelRecord(level, why, patience, vacant)
        return (LevelChanged(before.level, self._record),)
