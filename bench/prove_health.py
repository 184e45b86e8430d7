"""`make prove-health`: every fault alone, every two at once, and ten minutes of nothing but work.

A bound is missed if a fault was not found, was found to be another or cost a stream, if anybody was accused of what was
not there, or if somebody did not come back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.prove import Row, Rows, tell
from holdfast.bench.health.run import HealthBench, run
from holdfast.bench.health.soak import soak

FIGURES = ("false_positives", "streams_lost", "answers", "completed", "refused_429", "seconds")
BOUND = "all found as expected, nothing lost, nothing found that was not there, everybody back"
SOAK_S = 600.0


def _judged(result: dict[str, Any], bound: str) -> Row:
    return result | {"bound": bound, "met": not result["missed"]}


def _faults(bench: HealthBench) -> Row:
    return _judged(run(bench, tell), BOUND)


def _soak() -> Row:
    return _judged(soak(HealthBench(), SOAK_S, tell), "nobody accused, nothing lost, wrong or moved")


ROWS: Rows = {
    "faults": partial(_faults, HealthBench()),
    "pairs": partial(_faults, HealthBench(in_pairs=True)),
    "soak": _soak,
}
