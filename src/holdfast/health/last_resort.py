"""Decides which workers of a set keep serving although checks failed, because too few others are left. Pure.

Checks exist to keep answers coming, so no check may remove the last worker of a set, or most of them at once: when most
fail together, the check is as likely to be wrong as they are. The rule applies while less than half of the workers that
answer have weight above 0:
- If some have weight, the workers of the lowest `UNFITNESS` that still have streams keep serving, at reduced weight.
- If none has weight, workers that had already lost their streams may serve too.
- A worker that was convicted of wrong answers, which takes other sets' answers (`expectations`), serves only if no
  other can. Its answers are flagged.

The rule is applied twice. Control applies `last_resorts` before it writes a verdict (`control/health_controller.py`,
`last_resorts_in`). A frontend applies it to the verdicts it last read, if these leave it without a worker
(`streams/roster.py`, `TrafficWeights._choose_last_resorts`).

Always true: a worker that does not answer is never a last resort; while half of those that answer have weight, none is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.health.standing import HealthCause

Name = TypeVar("Name", bound=Hashable)

NONE = 0  # the worker must only pass more canaries, or its causes take at most half of its traffic
SPARE_UNFITNESS = -1  # there is no cause against it

# How unfit each cause makes a worker to serve as a last resort: those with the lowest number serve. None: it cannot.
UNFITNESS: dict[HealthCause, int | None] = {
    HealthCause.CANARY_FAILED: NONE,
    HealthCause.CANARY_SLOW: NONE,
    HealthCause.DISPUTED: NONE,
    HealthCause.PROBATION: NONE,
    HealthCause.SLOW: NONE,
    HealthCause.CRAWLING: 1,
    HealthCause.DEVICE_SICK: 2,
    HealthCause.BREAKER: 3,
    HealthCause.CANARY_FAILING: 4,
    HealthCause.UNCHECKED: 5,  # its first check failed; before that check it does not serve (`unfitness_of`)
    HealthCause.DEVICE_LOST: 6,
    HealthCause.LOST: 7,  # control cannot reach it; a frontend may
    HealthCause.WRONG: 8,
    HealthCause.ENGINE: None,
    HealthCause.GONE: None,
}
WRONG = UNFITNESS[HealthCause.WRONG]


def unfitness_of(causes: Mapping[str, str], heard_s: float) -> int | None:
    """Return the highest unfitness of a worker's causes; None: it cannot serve. `heard_s`: when its last canary was
    sent; 0 before the first canary of its load."""
    if HealthCause.UNCHECKED in causes and not heard_s:
        return None
    # A cause of a newer version may be as bad as a wrong answer.
    each = [UNFITNESS[HealthCause(cause)] if cause in UNFITNESS else WRONG for cause in causes]
    return None if None in each else max((one for one in each if one is not None), default=NONE)


@dataclass(frozen=True, slots=True)
class ResortCandidate(Generic[Name]):
    """A worker of the set that is connected, active and makes progress."""

    name: Name
    weight: float  # by its verdict, without this rule
    unfitness: int | None  # as in `UNFITNESS`
    out: bool = False  # it lost its streams, or never had any


def last_resorts(members: Iterable[ResortCandidate[Name]], *, coming: bool = False) -> set[Name]:
    """Return the workers that keep serving although their verdicts give them no weight. `coming`: a standby of the set
    is about to take over, so workers with wrong answers need not serve meanwhile."""
    able = [member for member in members if member.unfitness is not None]
    serving = sum(1 for member in able if member.weight)
    if 2 * serving >= len(able):
        return set()
    left = [m for m in able if not m.weight and not (serving and m.out)]
    lowest = min((m.unfitness for m in left if m.unfitness is not None), default=NONE)
    if lowest == WRONG and (serving or coming):
        return set()
    return {m.name for m in left if m.unfitness == lowest}
