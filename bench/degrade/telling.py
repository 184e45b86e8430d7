"""What is told of a campaign: all of it second by second for a program, a table for people. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bench.degrade.judging import missed
from bench.degrade.story import Story, step_row
from holdfast.core.tiers import Tier

TIMELINE = ("s", "workers", "level", "batch", "waiting", *(f"{t.label}_{w}" for t in Tier for w in ("ok", "refused")))


def timeline(story: Story, every_s: float = 1.0) -> list[list[float | int | None]]:
    """Return a row per second, in the columns of `TIMELINE`."""
    if not story.looks:
        return []
    began_s, rows = story.looks[0].at_s, []
    for place in range(int((story.looks[-1].at_s - began_s) / every_s) + 1):
        from_s, until_s = began_s + place * every_s, began_s + (place + 1) * every_s
        looks = [look for look in story.looks if from_s <= look.at_s < until_s]
        asked = [one for one in story.asked if from_s <= one.ended_s < until_s]
        row: list[float | int | None] = [round(place * every_s, 1)]
        if looks:
            last = looks[-1]
            batch = round(sum(last.streams) / len(last.streams), 2) if last.streams else 0.0
            row += [len(last.streams), last.level, batch, last.waiting]
        else:
            row += [None, None, None, None]
        for tier in Tier:
            mine = [one for one in asked if one.tier is tier]
            row += [sum(one.status == 200 for one in mine), sum(one.status != 200 for one in mine)]
        rows.append(row)
    return rows


def refused_by_level(story: Story, tier: Tier) -> dict[str, dict[str, int]]:
    """Refusals of a tier: by the worst level that each may have met, and by reason."""
    told: dict[str, Counter[str]] = {}
    for one in story.asked:
        if one.tier is tier and one.status != 200:
            told.setdefault(str(story.worst(one)), Counter())[one.reason or f"status {one.status}"] += 1
    return {level: dict(told[level]) for level in sorted(told)}


def result_of(story: Story) -> dict[str, Any]:
    noisy = story.noisy()
    swung_s = story.noise[1] - story.noise[0] if story.noise else 0.0
    return {
        "steps": [step_row(story, step) for step in story.steps],
        "levels": [change.level for change in story.changes],
        "refused": {tier.label: refused_by_level(story, tier) for tier in Tier},
        "finished": sum(one.status == 200 and one.whole for one in story.asked),
        "lost": sum(one.status == 200 and not one.whole for one in story.asked),
        "noise": {"seconds": round(swung_s, 1), "levels": [change.level for change in noisy]},
        "missed": missed(story),
        "timeline_columns": list(TIMELINE),
        "timeline": timeline(story),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'workers':>7} {'level':>5} {'after':>7} {'batch':>5} {'max':>3} {'finished/s':>10}  refused"]
    for row in result["steps"]:
        after = "never" if row["took_s"] is None else f"{row['took_s']:.1f} s"
        batch = "-" if row["batch"] is None else f"{row['batch']:.1f}"
        refused = ", ".join(f"{tier} {count}" for tier, count in row["refused"].items() if count) or "none"
        rate = row["finished_per_s"] if row["finished_per_s"] is not None else "-"
        most = "-" if row["batch_max"] is None else row["batch_max"]
        lines.append(f"{row['workers']:>7} {row['level']:>5} {after:>7} {batch:>5} {most:>3} {rate:>10}  {refused}")
    lines.append(f"on a noisy bound for {result['noise']['seconds']:g} s: levels {result['noise']['levels']}")
    lines += [f"{name:<10} {result[name]}" for name in ("finished", "lost")]
    lines += [f"MISSED: {text}" for text in result["missed"]]
    return "\n".join(lines) + "\n"
