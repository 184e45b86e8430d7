"""A row of the proof: one scenario, played to and fro, and all that was found summed up."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from bench.rollouts.hits import Hit, Victim
from bench.rollouts.play import Play
from bench.rollouts.scenario import Change, Scenario
from bench.rollouts.table import SCENARIOS

HITS_MAX = 40  # more than any of these rollouts has steps
WRITES_MAX = 200  # by one supervisor, of one rollout
BOUND = "nothing lost, wrong, inexact or twice; never fewer than promised, nor more than one beyond"
UNDONE = "undone for its own reason, in time, without a customer on it; nothing lost or wrong"

Tell = Callable[[str], None]


def run(
    scenario: Scenario, tell: Tell, *, seed: int = 1, hits_max: int = HITS_MAX, steps: Collection[int] | None = None
) -> dict[str, Any]:
    """`steps`: those that are hit, and nothing else is done; none: all of them, after an undisturbed change."""
    return asyncio.run(_run(scenario, tell, seed, hits_max, steps))


async def _run(
    scenario: Scenario, tell: Tell, seed: int, hits_max: int, steps: Collection[int] | None
) -> dict[str, Any]:
    async with Play.begun(scenario, seed) as play:
        changes: list[Change] = []
        if steps is None or scenario.why:
            tell(f"{scenario.name}: nothing is done to it")
            changes.append(await play.change())
        count = changes[0].steps if changes else max(steps or (0,))
        for hit in [] if scenario.why else hits_of(scenario, count, seed, hits_max, steps):
            tell(f"{scenario.name}: {hit}")
            changes.append(await play.change(hit))
        return summed_up(changes, [play.missed(change) for change in changes], bad=bool(scenario.why))


def play(scenario: Scenario, tell: Tell, hits: Sequence[Hit | None], *, seed: int = 1) -> dict[str, Any]:
    """A change for each of these hits, one after the other; None: nothing is done to it."""
    return asyncio.run(_play(scenario, tell, hits, seed))


async def _play(scenario: Scenario, tell: Tell, hits: Sequence[Hit | None], seed: int) -> dict[str, Any]:
    began_s = time.monotonic()
    async with Play.begun(scenario, seed) as play:
        start_s, changes = time.monotonic() - began_s, []
        for hit in hits:
            tell(f"{scenario.name}: {hit or 'nothing is done to it'}")
            changes.append(await play.change(hit))
        row = summed_up(changes, [play.missed(change) for change in changes], bad=bool(scenario.why))
        return row | {"start_s": round(start_s, 1), "calm_pause_s": round(play.calm_pause_s(), 3)}


def hits_of(
    scenario: Scenario, count: int, seed: int, hits_max: int, steps: Collection[int] | None = None
) -> list[Hit]:
    """Return one for each step, with victims in turn from a random beginning."""
    rng = random.Random(f"{seed} {scenario.name}")
    victims = list(Victim)
    rng.shuffle(victims)
    hits = [Hit(victims[step % len(victims)], step) for step in range(1, count + 1) if steps is None or step in steps]
    return sorted(rng.sample(hits, min(hits_max, len(hits))), key=lambda hit: hit.step)


def supervisor_dies(tell: Tell, *, seed: int = 1, places: Collection[int] | None = None) -> dict[str, Any]:
    """At every memory that it writes of a rollout, until one lives through it; `places`: only these."""
    return asyncio.run(_supervisor_dies(tell, seed, places))


async def _supervisor_dies(tell: Tell, seed: int, places: Collection[int] | None) -> dict[str, Any]:
    scenario = SCENARIOS["worker-version"]
    async with Play.begun(scenario, seed) as play:
        changes: list[Change] = []
        for place in sorted(places) if places is not None else range(1, WRITES_MAX):
            tell(f"supervisor-dies: at its memory {place}")
            change = await play.change(dies_at=place)
            change.hit = f"supervisor, after memory {place}" if change.dead else ""
            changes.append(change)
            if not change.dead:
                break
        return summed_up(changes, [play.missed(change) for change in changes])


def summed_up(changes: list[Change], missed: list[list[str]], *, bad: bool = False) -> dict[str, Any]:
    found = [change.found for change in changes]
    took_s = sorted(change.took_s for change in changes)
    return {
        "changes": len(changes),
        "hits": sum(bool(change.victim) or change.dead > 0 for change in changes),
        "answers": sum(one.answers for one in found),
        "lost": sum(len(one.lost) for one in found),
        "wrong": sum(len(one.wrong) for one in found),
        "inexact": sum(one.inexact for one in found),
        "cut": sum(one.cut for one in found),
        "resumed": sum(one.resumed for one in found),
        "calm_s": round(changes[0].took_s, 1),
        "longest_s": round(took_s[-1], 1),
        "nobody_s": round(max(max(change.nobody_s.values(), default=0.0) for change in changes), 2),
        "pause_s": round(max(one.pause_s for one in found), 3),
        "wait_s": round(max(one.wait_s for one in found), 2),
        "surge_max": max(max(change.surge.values()) for change in changes),
        **({"undone": changes[0].undone} if bad else {}),
        "bound": UNDONE if bad else BOUND,
        "met": not any(missed),
        "each": [change.as_dict(lacks) for change, lacks in zip(changes, missed, strict=True)],
    }
