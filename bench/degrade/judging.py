"""Whether levels, refusals, acceptance and batches followed the capacity there was, and returned. Pure.

Always true: everything is judged at the time at which it happened, not at the end of a step: a refusal by the levels
that its request may have met, an acceptance by those that it must have met, a batch by what may have begun.
"""

from __future__ import annotations

from collections import Counter

from bench.degrade.story import LAG_S, Step, Story, beyond, step_row
from holdfast.core.tiers import Tier
from holdfast.routing.degradation import LEVEL_MAX, refusal

SHED = ("tier_shed", "no_capacity")  # the reasons that a level gives; others are a full line's, or a hold's
RETURNED_SHARE = 0.8  # of what was finished, and of the batches, at the beginning: counts of seconds differ by chance
TICK_S = 0.6  # control looks at capacity twice a second, and writes what it decides


def missed(story: Story) -> list[str]:
    """All that is not as it must be."""
    found = [text for number, step in enumerate(story.steps) for text in _step_missed(story, number, step)]
    return found + _refusals_missed(story) + _return_missed(story) + noise_missed(story)


def _step_missed(story: Story, number: int, step: Step) -> list[str]:
    found, name = [], f"at {step.share:.0%}"
    last = story.level_at(step.ended_s)
    if step.followed_s is None or last != step.wanted:
        found.append(f"{name}: level {last}, not {step.wanted}")
    path = story.levels(step.began_s, step.ended_s)
    if path != sorted(path, reverse=path[0] > step.wanted):
        found.append(f"{name}: levels went {path}, not straight to {step.wanted}")
    looks = story.settled(step)
    if looks and looks[-1].level != last:
        found.append(f"{name}: the frontend was at level {looks[-1].level}, not {last}")
    if step.workers and not looks:
        found.append(f"{name}: it was not looked for long enough to see the batches of that level")
    if wrong := [look for look in looks if beyond(story, step, look) > story.premium]:
        found.append(f"{name}: batches {wrong[0].streams} are more than level {step.wanted} and premium allow")
    until_s = step.ended_s
    lost = [one for one in story.asked if step.began_s <= one.ended_s < until_s and one.status == 200 and not one.whole]
    if lost and step.workers and number + 1 < len(story.steps):
        found.append(f"{name}: {len(lost)} answers were broken off")
    return found


def _refusals_missed(story: Story) -> list[str]:
    found: Counter[str] = Counter()
    for one in story.asked:
        worst = story.worst(one)
        if one.status == 200:
            found["requests were taken that their level refuses"] += story.must_be_shed(one)
            continue
        found[f"premium requests were refused before level {LEVEL_MAX}"] += (
            one.tier is Tier.PREMIUM and worst < LEVEL_MAX
        )
        may = [refusal(level, one.tier) for level in range(worst + 1)]
        words = {shed.reason for shed in may if shed is not None}
        found["requests were refused for a level that does not"] += one.reason in SHED and one.reason not in words
        found["refusals did not say when to come back"] += one.reason in SHED and not one.retry_after
    return [f"{count} {text}" for text, count in found.items() if count]


def _return_missed(story: Story) -> list[str]:
    """The last step is as the first: no request is refused, as much is finished, and batches are as full."""
    first, last = story.steps[0], story.steps[-1]
    if last.followed_s is None or last.share != first.share:
        return []
    found = []
    late = [one for one in story.within(last) if one.status != 200 and one.sent_s > last.followed_s + LAG_S]
    if late:
        found.append(f"{len(late)} were refused after all was back")
    before, after = step_row(story, first), step_row(story, last)
    for name in ("finished_per_s", "batch"):
        if (after[name] or 0.0) < RETURNED_SHARE * (before[name] or 0.0):
            found.append(f"{name} did not return: {before[name]} before, {after[name]} after")
    return found


def noise_missed(story: Story) -> list[str]:
    """While capacity swings around a bound each change of level waits for its whole while."""
    found = []
    for before, after in zip(story.noisy(), story.noisy()[1:], strict=False):
        better = after.level < before.level
        wait_s = story.times.return_s * before.record.patience if better else story.times.fall_s
        gap_s = after.record.since_unix_s - before.record.since_unix_s
        if gap_s < wait_s - TICK_S:
            found.append(f"on a noisy bound level {before.level} became {after.level} after {gap_s:.1f} s")
    return found
