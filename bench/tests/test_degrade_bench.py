"""`python -m bench.degrade`: what it calls missed, and a small one with real processes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from bench.degrade.judging import missed
from bench.degrade.run import DegradeBench, run
from bench.degrade.story import Asked, Change, Look, Step, Story
from bench.degrade.telling import TIMELINE, result_of, table
from holdfast.core.tiers import Tier
from holdfast.routing.degradation import LevelRecord
from holdfast.spec.health import DegradationSettings

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "1")) % 1_000_000
PLACES, PREMIUM = 4, 2
TIMES = DegradationSettings(fall_s=1.0, return_s=2.0)


def change(at_s: float, level: int, *, patience: int = 1, vacant: bool = False) -> Change:
    return Change(at_s, LevelRecord(level, "why", patience, vacant, since_unix_s=at_s))


def ask(at_s: float, tier: Tier = Tier.STANDARD, status: int = 200, reason: str = "", **more: Any) -> Asked:
    """One that ended a second after it was sent."""
    return Asked(tier, at_s, at_s + 0.1, at_s + 1.0, status, reason, **more)


def shed(at_s: float, tier: Tier, reason: str = "tier_shed", **more: Any) -> Asked:
    return ask(at_s, tier, 503 if reason == "no_capacity" else 429, reason, **more)


def good() -> Story:
    """All workers (level 0), half of them (level 2), and all again, each for twenty seconds, all as it must be."""
    story = Story(PLACES, PREMIUM, TIMES)
    story.steps = [Step(1.0, 4, 0, 0.0, 0.0, 20.0), Step(0.5, 2, 2, 20.0, 22.0, 40.0)]
    story.steps.append(Step(1.0, 4, 0, 40.0, 45.0, 60.0))
    story.changes = [change(22.0, 2), change(44.0, 1), change(45.0, 0)]
    story.looks = [Look(at_s + 0.5, 0, (4, 4, 4, 4), 1) for at_s in (*range(20), *range(48, 60))]
    story.looks += [Look(at_s + 0.5, 2, (4, 3), 1) for at_s in range(26, 40)]  # one premium beyond the bound of 3
    story.looks.sort(key=lambda look: look.at_s)
    for at_s in range(60):
        story.asked += [ask(at_s, Tier.PREMIUM), ask(at_s)]
        story.asked.append(shed(at_s, Tier.BEST_EFFORT) if 22 <= at_s < 44 else ask(at_s, Tier.BEST_EFFORT))
    return story


def test_what_is_as_it_must_be_is_not_missed() -> None:
    """Levels that follow, a tier shed and served again, batches within their bound and full again: nothing is missed,
    and every second has its row."""
    story = good()
    result = result_of(story)
    assert result["missed"] == []
    assert [row["level"] for row in result["steps"]] == [0, 2, 0]
    assert result["refused"]["best_effort"] == {"2": {"tier_shed": 22}}
    assert len(result["timeline"]) == 60
    assert all(len(row) == len(TIMELINE) for row in result["timeline"])
    assert "MISSED" not in table(result)


@pytest.mark.parametrize(
    ("why", "spoilt"),
    [
        ("at 50%: level 1, not 2", {"changes": [change(22.0, 1), change(45.0, 0)]}),
        (
            "at 50%: levels went [0, 3, 2], not straight to 2",
            {"changes": [change(21.0, 3), change(22.0, 2), change(44.0, 1), change(45.0, 0)]},
        ),
        ("1 premium requests were refused before level 4", {"asked": shed(30, Tier.PREMIUM, "no_place")}),
        ("1 requests were refused for a level that does not", {"asked": shed(30, Tier.STANDARD)}),
        ("1 requests were refused for a level that does not", {"asked": shed(10, Tier.BEST_EFFORT)}),
        ("1 requests were taken that their level refuses", {"asked": ask(30, Tier.BEST_EFFORT)}),
        ("1 refusals did not say when to come back", {"asked": shed(30, Tier.BEST_EFFORT, retry_after=False)}),
        ("at 50%: 1 answers were broken off", {"asked": ask(30, whole=False)}),
        ("1 were refused after all was back", {"asked": shed(50, Tier.STANDARD, "no_place")}),
        ("at 50%: batches (4, 4, 4) are more than level 2 and premium allow", {"look": Look(39.9, 2, (4, 4, 4), 0)}),
        ("at 50%: the frontend was at level 1, not 2", {"look": Look(39.9, 1, (3, 3), 0)}),
    ],
)
def test_each_expectation_can_be_missed(why: str, spoilt: dict[str, Any]) -> None:
    """One thing that is not as it must be is told as what it is."""
    story = good()
    if "asked" in spoilt:
        story.asked.append(spoilt["asked"])
    if "look" in spoilt:
        story.looks.append(spoilt["look"])
    story.changes = spoilt.get("changes", story.changes)
    assert why in missed(story)


def test_what_does_not_return_is_missed() -> None:
    """Batches that stay small, and answers that stay few, though the level is 0 again."""
    story = good()
    story.looks = [dataclasses.replace(look, streams=(3, 3, 3, 3)) if look.at_s > 45 else look for look in story.looks]
    assert missed(story) == ["batch did not return: 4.0 before, 3.0 after"]
    story = good()
    story.asked = [one for one in story.asked if one.sent_s < 45 or one.sent_s % 2]
    assert [text.partition(":")[0] for text in missed(story)] == ["finished_per_s did not return"]


def test_a_refusal_at_the_edge_of_a_level_is_nobodys_fault() -> None:
    """A frontend hears of a level a moment after the store has it, and of its end too."""
    story = good()
    story.asked += [ask(22.5, Tier.BEST_EFFORT), shed(44.5, Tier.BEST_EFFORT)]
    assert missed(story) == []


def test_a_batch_is_judged_when_all_that_ran_before_has_ended() -> None:
    """Streams that came when more were let in may fill a worker as long as they run."""
    story = good()
    story.looks.append(Look(25.0, 2, (4, 4, 4), 0))
    assert missed(story) != []
    story.asked.append(Asked(Tier.STANDARD, 19.0, 19.5, 26.0, 200))
    assert missed(story) == []


@pytest.mark.parametrize(
    ("changes", "is_missed"),
    [
        ([change(61.0, 2), change(65.5, 1), change(67.0, 2)], False),
        ([change(61.0, 2), change(62.0, 1)], True),
        ([change(61.0, 2, patience=4), change(65.0, 1)], True),
        ([change(61.0, 1), change(61.2, 2)], True),
    ],
)
def test_on_a_noisy_bound_each_change_waits_for_its_while(changes: list[Change], is_missed: bool) -> None:
    """A return comes no sooner than `return_s`, times the patience that flapping has earned, and a fall no sooner than
    `fall_s` after the change before it."""
    story = good()
    story.noise = (60.0, 80.0)
    story.changes += changes
    assert bool(missed(story)) is is_missed


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.processes
@pytest.mark.timeout(420)
def test_levels_follow_what_is_there_and_return() -> None:
    """Five workers, three, one, and five again, real processes under load of every tier: levels, refusals and batches
    follow, premium is refused at level 4 only, and all of it returns."""
    # Three of five are far below a bound with more room too, which is what a busy machine may take.
    bench = DegradeBench(5, shares=(0.6, 0.2), room=1.12, tokens=15, stay_s=8.0, noise_s=0.0, seed=SEED)
    result = run(bench, print)
    assert result["missed"] == [], result
    assert [row["level"] for row in result["steps"]] == [0, 2, 4, 0]
    assert result["refused"]["best_effort"]["2"]["tier_shed"]
