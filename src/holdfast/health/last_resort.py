"""Which workers of a set serve although a check speaks against them, because the checks leave too few others. Pure.

A check exists to keep answers coming. None may take away the last worker of a set, or most of them at once: when most
fail together, the check is as likely to be wrong as they are. So where less than half of the workers that answer keep
some weight, the least doubtful of those that still serve go on at reduced weight, and their streams stay; where none
has any, also those that were out before. Wrong answers are convicted by other sets' word (`expectations`), which is a
trial already: such a worker is kept only where no other serves, and its answers are flagged.

Control applies `kept` before it writes a verdict down. A frontend applies it to what was last written, where that
leaves it with no worker at all.

Always true: a worker that does not answer is never kept; while half of those that answer have weight, none is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.health.standing import Cause

Name = TypeVar("Name", bound=Hashable)

NONE = 0  # it owes canaries only, or has a doubt that takes no more than half of its traffic
SPARE = -1  # nothing speaks against it

# How much each cause says against serving at all, where no other can; None: it cannot serve.
DOUBTS: dict[Cause, int | None] = {
    Cause.CANARY_FAILED: NONE,
    Cause.CANARY_SLOW: NONE,
    Cause.DISPUTED: NONE,
    Cause.PROBATION: NONE,
    Cause.SLOW: NONE,
    Cause.CRAWLING: 1,
    Cause.DEVICE_SICK: 2,
    Cause.BREAKER: 3,
    Cause.CANARY_FAILING: 4,
    Cause.UNCHECKED: 5,  # its first check failed; before that it waits for it
    Cause.DEVICE_LOST: 6,
    Cause.LOST: 7,  # to control; a frontend that hears from it knows better
    Cause.WRONG: 8,
    Cause.ENGINE: None,
    Cause.GONE: None,
}
WRONG = DOUBTS[Cause.WRONG]


def doubt_of(causes: Mapping[str, str], heard_s: float) -> int | None:
    """Return how much the causes that are held say against a worker; None: it cannot serve. `heard_s`: when its last
    canary was sent, 0 before the first of its load."""
    if Cause.UNCHECKED in causes and not heard_s:
        return None
    doubts = [DOUBTS[Cause(cause)] for cause in causes]
    return None if None in doubts else max((doubt for doubt in doubts if doubt is not None), default=NONE)


@dataclass(frozen=True, slots=True)
class Member(Generic[Name]):
    """One worker of a set that is connected, active and makes progress, by what is held against it."""

    name: Name
    weight: float  # that its verdict leaves it, without this rule
    doubt: int | None
    out: bool = False  # it has no streams any more, or never had


def kept(members: Iterable[Member[Name]], *, coming: bool = False) -> set[Name]:
    """Return the workers that serve on although their verdicts leave them no weight. `coming`: a standby of the set is
    about to take over, so no wrong answer is needed meanwhile."""
    able = [member for member in members if member.doubt is not None]
    serving = sum(1 for member in able if member.weight)
    if 2 * serving >= len(able):
        return set()
    doubted = [(m.doubt, m.name) for m in able if m.doubt is not None and not m.weight and not (serving and m.out)]
    least = min((doubt for doubt, _ in doubted), default=NONE)
    if least == WRONG and (serving or coming):
        return set()
    return {name for doubt, name in doubted if doubt == least}
