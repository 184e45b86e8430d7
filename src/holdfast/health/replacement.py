"""Decides for which workers control asks for another engine in their place (`HealthRecord.replace`). Pure.

This is the only definition of "unfit": a fleet (`fleet/counts.py`) replaces a replica for its health if, and only if,
control asks for it. Control asks in the same record in which it keeps the last worker of a set serving
(`last_resort.py`), so asking takes no traffic from any worker.

A worker is asked for when one of its causes has lasted for its time in `REPLACE_AFTER_S`, and until it has weight by
its own merit again. A cause without a time never asks: the worker still serves (slow, a first failed canary), is judged
soon (not checked yet, its peers disagree), or its supervisor acts (its process ended). A spare is sound.

When more than half of a set is unfit at once, the check is as likely to be wrong as they are: control asks for one of
them at a time, so that the set is never emptied, and the replacement shows whether the check is right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.health.standing import HealthCause

DOUBT_S = 20.0  # a breaker may close again, a connection or an engine come back within seconds; streams are held for 60
CRAWLING_S = 60.0  # its pace is measured again every 10 s, by canaries too

# How long each cause lasts before control asks for a replacement; None: it never does.
REPLACE_AFTER_S: dict[HealthCause, float | None] = {
    HealthCause.WRONG: 0.0,
    HealthCause.DEVICE_LOST: 0.0,
    HealthCause.DEVICE_SICK: 0.0,
    HealthCause.CANARY_FAILING: 0.0,  # three in a row, each with its own retries
    HealthCause.ENGINE: DOUBT_S,  # such an engine exits, and its supervisor starts it again: this one did not
    HealthCause.BREAKER: DOUBT_S,
    HealthCause.LOST: DOUBT_S,
    HealthCause.CRAWLING: CRAWLING_S,
    HealthCause.UNCHECKED: None,
    HealthCause.CANARY_FAILED: None,
    HealthCause.CANARY_SLOW: None,
    HealthCause.DISPUTED: None,
    HealthCause.PROBATION: None,
    HealthCause.SLOW: None,
    HealthCause.GONE: None,
}


def replace_due_s(causes: Mapping[str, str], since_s: float) -> float | None:
    """Return when these causes, which began at `since_s`, ask for a replacement; None: they never do."""
    after = [limit_s for cause in causes if (limit_s := REPLACE_AFTER_S[HealthCause(cause)]) is not None]
    return since_s + min(after) if after else None


def replace_reason(causes: Mapping[str, str], since_s: float, now_s: float) -> str:
    """Return why another engine is needed in its place; "": it is not, or not yet."""
    for cause, after_s in REPLACE_AFTER_S.items():
        if after_s is not None and cause in causes and now_s >= since_s + after_s:
            return causes[cause]
    return ""


@dataclass(frozen=True, slots=True)
class UnfitWorker:
    """A worker for which a replacement is due."""

    name: str
    reason: str
    since_s: float  # since when it is unfit
    asked: bool = False  # a replacement was asked for already


def asked_for(unfit: Collection[UnfitWorker], members: int) -> dict[str, str]:
    """Return for which workers of a set of so many a replacement is asked for, with the reason: for all, or for one if
    more than half are unfit."""
    order = sorted(unfit, key=lambda one: (not one.asked, one.since_s, one.name))
    few = len(order) if 2 * len(order) <= members else 1
    return {one.name: one.reason for one in order[:few]}
