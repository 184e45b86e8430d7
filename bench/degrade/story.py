"""What was seen while capacity fell and came back: levels as they were written, requests, and how full workers were.

Always true: everything has its own time, and is asked for by time: the level at a moment, the levels that a request may
have met, the looks at batches when every stream that ran before the level came has ended. A frontend may hear of a
level `LAG_S` later than a process that watches the store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.core.tiers import Tier
from holdfast.routing.degradation import RULES, LevelRecord, refusal
from holdfast.spec.health import DegradationSettings

LAG_S = 2.0


@dataclass(frozen=True, slots=True)
class Change:
    """A level as it was written, and when that was heard."""

    at_s: float
    record: LevelRecord

    @property
    def level(self) -> int:
        return self.record.level


@dataclass(frozen=True, slots=True)
class Asked:
    """Records one request, and what became of it."""

    tier: Tier
    sent_s: float
    first_s: float  # its first byte
    ended_s: float
    status: int
    reason: str = ""  # of a refusal
    whole: bool = True
    retry_after: bool = True  # a refusal says when to come back


@dataclass(frozen=True, slots=True)
class Look:
    """How full the workers that run were."""

    at_s: float
    level: int  # as the frontend has it
    streams: tuple[int, ...]  # of each
    waiting: int


@dataclass(slots=True)
class Step:
    """A share of the workers runs for a while."""

    share: float
    workers: int  # that run
    wanted: int
    began_s: float
    followed_s: float | None = None  # when the level was the wanted one
    ended_s: float = 0.0


@dataclass(slots=True)
class Story:
    """All that was seen."""

    places: int  # of each worker
    premium: int  # clients
    times: DegradationSettings
    changes: list[Change] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    noise: tuple[float, float] | None = None  # from when to when capacity swung around a bound

    # -- levels in time

    def met(self, from_s: float, until_s: float) -> list[LevelRecord]:
        """Every record that stood in that time; none before the first."""
        before = [change.record for change in self.changes if change.at_s <= from_s]
        during = [change.record for change in self.changes if from_s < change.at_s <= until_s]
        return [before[-1] if before else LevelRecord(0, ""), *during]

    def levels(self, from_s: float, until_s: float) -> list[int]:
        return [record.level for record in self.met(from_s, until_s)]

    def level_at(self, at_s: float) -> int:
        return self.levels(at_s, at_s)[-1]

    def worst(self, asked: Asked) -> int:
        """The worst level that it may have met."""
        return max(self.levels(asked.sent_s - LAG_S, asked.ended_s + LAG_S))

    def must_be_shed(self, asked: Asked) -> bool:
        """Whether every level that it may have met when it came refuses it."""
        records = self.met(asked.sent_s - LAG_S, asked.sent_s + LAG_S)
        return all(refusal(record.level_for(has_worker=True), asked.tier) is not None for record in records)

    def noisy(self) -> list[Change]:
        """The changes of level while capacity swung around a bound."""
        from_s, until_s = self.noise or (0.0, 0.0)
        return [change for change in self.changes if from_s <= change.at_s < until_s]

    # -- one step

    def within(self, step: Step) -> list[Asked]:
        """What ended while the level was the wanted one."""
        since_s = step.followed_s if step.followed_s is not None else step.ended_s
        return [asked for asked in self.asked if since_s <= asked.ended_s < step.ended_s]

    def settled(self, step: Step) -> list[Look]:
        """The looks at a time when all that ran was admitted at the step's level."""
        if step.followed_s is None:
            return []
        heard_s = step.followed_s + LAG_S
        before = [asked.ended_s for asked in self.asked if asked.first_s <= heard_s and asked.ended_s > heard_s]
        since_s = max(before, default=heard_s)
        return [look for look in self.looks if since_s <= look.at_s < step.ended_s]


def step_row(story: Story, step: Step) -> dict[str, Any]:
    """What a step was like, once its level was there."""
    asked, looks = story.within(step), story.settled(step)
    batches = [streams for look in looks for streams in look.streams]
    lasted_s = step.ended_s - (step.followed_s if step.followed_s is not None else step.ended_s)
    finished = {tier.label: sum(one.status == 200 and one.tier is tier for one in asked) for tier in Tier}
    refused = {tier.label: sum(one.status != 200 and one.tier is tier for one in asked) for tier in Tier}
    return {
        "share": step.share,
        "workers": step.workers,
        "wanted": step.wanted,
        "level": story.level_at(step.ended_s),
        "took_s": None if step.followed_s is None else round(step.followed_s - step.began_s, 1),
        "path": story.levels(step.began_s, step.ended_s),
        "bound": RULES[step.wanted].places(story.places, Tier.STANDARD),
        "batch": round(sum(batches) / len(batches), 2) if batches else None,
        "batch_max": max(batches, default=None),
        "beyond_bound_max": max((beyond(story, step, look) for look in looks), default=0),
        "waiting_max": max((look.waiting for look in looks), default=0),
        "finished": finished,
        "finished_per_s": round(sum(finished.values()) / lasted_s, 2) if lasted_s else None,
        "refused": refused,
    }


def beyond(story: Story, step: Step, look: Look) -> int:
    """Streams beyond what the level lets anybody but premium begin."""
    bound = RULES[step.wanted].places(story.places, Tier.STANDARD)
    return sum(max(0, streams - bound) for streams in look.streams)
