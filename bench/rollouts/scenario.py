"""One change of a deployment under load: what is asked for, what was found of it, and which promises were not kept.

Pure, and the same for every scenario.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.rollouts.clients import Found
from bench.rollouts.hits import Victim
from bench.rollouts.shapes import FRONTEND, PLAIN, Shape

STREAMS = 64
UNDO_S = 60.0  # beyond its deadline: to see it, to go back, and to watch what is there then


@dataclass(frozen=True, slots=True)
class Scenario:
    """Goes from one shape to another, and back."""

    name: str
    after: Shape
    before: Shape = PLAIN
    why: str = ""  # a bad update: what the line says that tells of its undoing
    tried: bool = False  # and its fault shows only in what customers asked
    streams: int = STREAMS
    tokens: int = 250  # of most answers: 5 s, which is longer than a step of a rollout takes
    long_tokens: int = 500  # of the others
    exact: bool = True  # its engines compute alike in every batch
    in_place: bool = False  # there is memory for one only: no set serves meanwhile, and streams that wait change sets
    gpus: tuple[tuple[str, int], ...] = ()  # devices, and bytes of each


@dataclass(slots=True, kw_only=True)
class Change:
    """What was found of one change."""

    hit: str = ""  # at which step, and what was killed
    victim: Victim | None = None  # if one was
    killed: str = ""  # by name
    found: Found
    took_s: float
    steps: int
    floor: dict[str, int]  # that was promised, by service
    least: dict[str, int]  # that was seen
    surge: dict[str, int]  # beyond those wanted
    said: list[str]
    undone: str = ""  # why, if it was
    twice: list[str] = field(default_factory=list)  # processes that were started twice
    across: list[str] = field(default_factory=list)  # pairs of sets that no revision has
    attempts: int = 0  # of customers, on the new set
    both_names: bool = True  # were served at one time, where there were two
    dead: int = 0  # supervisors that died meanwhile
    nobody_s: dict[str, float] = field(default_factory=dict)  # the longest in which none served, by service
    held_s: dict[str, float] = field(default_factory=dict)  # the same, as the rollout tells it

    def as_dict(self, missed: list[str]) -> dict[str, Any]:
        shown: dict[str, Any] = {"hit": self.hit} if self.hit else {}
        shown |= self.found.as_dict() | {"took_s": round(self.took_s, 1), "steps": self.steps}
        shown |= {"floor": self.floor, "least": self.least, "surge": self.surge}
        told = {"nobody_s": self.nobody_s, "held_s": self.held_s}
        shown |= {key: {name: round(s, 2) for name, s in one.items() if s} for key, one in told.items()}
        shown |= {"undone": self.undone, "attempts": self.attempts} if self.undone else {}
        return shown | ({"missed": missed, "said": self.said} if missed else {})


def missed_by(change: Change, scenario: Scenario, deadline_s: float) -> list[str]:
    """Which promises were not kept."""
    missed = [*_missed_by_answers(change, scenario), *_missed_by_numbers(change, scenario)]
    twice = [name for name in change.twice if not (change.killed and name.startswith(f"{change.killed}:"))]
    missed += [f"started twice: {name}" for name in twice if not scenario.why]  # one that crashes is
    missed += [f"a pair across sets: {pair}" for pair in change.across]
    if not change.both_names:
        missed.append("the old name and the new one were never served at one time")
    if bool(scenario.why) != bool(change.undone):
        missed.append(f"undone: {change.undone!r}")
    if scenario.why:
        if scenario.why not in change.undone:
            missed.append(f"undone for another reason: {change.undone!r}")
        if change.attempts and not scenario.tried:
            missed.append(f"{change.attempts} customers' requests on a bad set")
        if change.took_s > deadline_s + UNDO_S:
            missed.append(f"undone after {change.took_s:.0f} s")
    return missed


def _missed_by_answers(change: Change, scenario: Scenario) -> list[str]:
    found = change.found
    counts = {"lost": len(found.lost), "wrong": len(found.wrong)}
    counts |= {"inexact": found.inexact} if not scenario.in_place else {}
    missed = [f"{count} {what}" for what, count in counts.items() if count]
    return missed + ([f"{found.cut} cut"] if found.cut and change.victim is not Victim.FRONTEND else [])


def _missed_by_numbers(change: Change, scenario: Scenario) -> list[str]:
    """One that is killed is missing, until it is back, or swapped in place: the rollout answers for the others."""
    missed = []
    for service, floor in change.floor.items():
        workers = change.victim in (Victim.OLD, Victim.NEW)
        killed = change.victim is Victim.FRONTEND if service == FRONTEND else workers or scenario.in_place
        if change.least[service] < floor - killed:
            missed.append(f"{service}: {change.least[service]} of {floor} served")
        if change.surge[service] > 1:
            missed.append(f"{service}: {change.surge[service]} more than wanted")
    return missed
