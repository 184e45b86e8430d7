"""The faults of `python -m bench.health`, what must follow from each, and which can be judged together. Data only.

Always true: what is expected is said in the words of `health.standing` and `health.breaker`, so that a verdict in the
store either is it or is not; a fault that must have no consequence says so, and then any verdict at all is a false one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from holdfast.health.standing import HealthStatus


class Then(StrEnum):
    """What must become of the worker."""

    DEAD = "DEAD"
    LOST = "UNHEALTHY, streams moved once"
    HALF = "weight 0.5, nothing moved"
    DRAINED = "drained by plan"
    QUARANTINED = "quarantined"
    BREAKER = "breaker open"
    NOTHING = "nothing"


# The most urgent status that a worker with the fault may have, on the way there too. What is broken for good may be
# called anything: a worker whose every answer is empty fails its canaries as well as its customers.
WORST: dict[Then, HealthStatus] = {
    Then.DEAD: HealthStatus.DEAD,
    Then.LOST: HealthStatus.UNHEALTHY,
    Then.HALF: HealthStatus.SUSPICIOUS,
    Then.DRAINED: HealthStatus.DRAINING,
    Then.QUARANTINED: HealthStatus.UNHEALTHY,
    Then.BREAKER: HealthStatus.UNHEALTHY,
    Then.NOTHING: HealthStatus.HEALTHY,
}


class On(StrEnum):
    """Names what is hit."""

    ONE = "one worker"
    ALL = "all workers"
    MACHINE = "the machine"
    FRONTEND = "the frontend"


class Undo(StrEnum):
    """How it is taken back."""

    START = "another process is started in its place"
    CONTINUE = "SIGCONT"
    CLEAR = "the fault is cleared"
    RELOAD = "the fault is cleared, and the worker told to load again"  # a breaker would rest for a minute
    END = "it ends by itself"


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break something."""

    name: str
    then: Then
    sim: Mapping[str, Any] = field(default_factory=dict)  # the sim engine's command, where it is one of those
    on: On = On.ONE
    undo: Undo = Undo.CLEAR
    # By when the verdict must be there: bounds on waiting, far from what is measured, for a machine that is busy.
    within_s: float = 20.0
    # How long the fault stays once the verdict is there, so that what must not follow has the time to; of one without a
    # verdict, how long it stays at all.
    hold_s: float = 1.0
    wrong: bool = False  # answers are wrong until it is found


# Longer than it takes to be found slow (5 s) or crawling (10 s), with the time to hear of it.
SLOW_HOLD_S = 13.0
CANARY_WITHIN_S = 60.0  # two intervals of the default, for a bench that was told to keep that

FAULTS: tuple[Fault, ...] = (
    Fault("crash", Then.DEAD, {"fault": "crash"}, undo=Undo.START),
    Fault("stopped", Then.LOST, {"fault": "stop"}, undo=Undo.CONTINUE, hold_s=2.0),
    Fault("wedged", Then.LOST, {"fault": "wedge"}, hold_s=2.0),
    Fault("slow x3", Then.HALF, {"fault": "slow", "factor": 3.0}, within_s=30.0, hold_s=8.0),
    Fault("slow x20", Then.DRAINED, {"fault": "slow", "factor": 20.0}, within_s=45.0, hold_s=3.0),
    Fault("all slow x20", Then.NOTHING, {"fault": "slow", "factor": 20.0}, On.ALL, hold_s=SLOW_HOLD_S),
    Fault("wrong tokens", Then.QUARANTINED, {"fault": "wrong_tokens"}, within_s=CANARY_WITHIN_S, wrong=True),
    Fault(
        "drifted logprobs",
        Then.QUARANTINED,
        {"fault": "drift_logprobs", "by": 0.5},
        within_s=CANARY_WITHIN_S,
        wrong=True,
    ),
    Fault("errors on 1 of 5", Then.BREAKER, {"fault": "error_every", "every": 5}, undo=Undo.RELOAD, within_s=45.0),
    Fault("zero-token answers", Then.BREAKER, {"fault": "zero_tokens"}, undo=Undo.RELOAD, within_s=60.0),
    Fault("truncated streams", Then.BREAKER, {"fault": "truncate", "tokens": 5}, undo=Undo.RELOAD, within_s=60.0),
    Fault("client 400s", Then.NOTHING, on=On.FRONTEND, undo=Undo.END, hold_s=8.0),
    Fault("late probes", Then.NOTHING, {"fault": "late_pongs", "ms": 3000}, On.ALL, hold_s=8.0),
    Fault("late beats", Then.NOTHING, {"fault": "late_beats", "ms": 3000}, hold_s=8.0),
    Fault("CPU saturation", Then.NOTHING, on=On.MACHINE, undo=Undo.END, hold_s=10.0),
)
BY_NAME = {fault.name: fault for fault in FAULTS}

# Two that cannot be judged together, and why; either order.
UNFIT: dict[frozenset[str], str] = {
    frozenset({"slow x3", "all slow x20"}): "one switch of one engine",
    frozenset({"slow x20", "all slow x20"}): "one switch of one engine",
}
# Of a pair: what need not be found while the other lasts, and why. That nothing else follows holds all the same.
MAY_MISS: dict[tuple[str, str], str] = {
    ("slow x3", "CPU saturation"): "on taken cores every worker's pace is as late as its",
    ("slow x20", "CPU saturation"): "on taken cores every worker's pace is late",
    ("errors on 1 of 5", "all slow x20"): "too few answers end for a rate",
    ("zero-token answers", "all slow x20"): "slow answers that end well between them, and too few for a rate",
    ("wrong tokens", "all slow x20"): "three tries and a jury take 20 times as long",
    ("drifted logprobs", "all slow x20"): "three tries and a jury take 20 times as long",
}


def pairs(faults: tuple[Fault, ...]) -> Iterator[tuple[Fault, Fault]]:
    """All that can be judged together."""
    return (
        (one, other)
        for one, other in itertools.combinations(faults, 2)
        if frozenset({one.name, other.name}) not in UNFIT
    )
