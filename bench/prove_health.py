"""`make prove-health`: every fault alone, every two at once, ten minutes of nothing but work, and every level there is.

A bound is missed if a fault was not found, was found to be another or cost a stream, if anybody was accused of what was
not there, or if a worker did not come back; or if levels, refusals or batches did not follow the capacity there was.

The pairs are many. `--side-by-side N` gives them to N deployments at once, each with cores, a state directory and ports
of its own, so that what one of them does to its cores is nothing to the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench import ROOT
from bench.degrade.run import DegradeBench
from bench.degrade.run import run as degrade
from bench.health.faults import BY_NAME, pairs
from bench.health.run import HealthBench, run
from bench.health.soak import soak
from bench.prove import Row, Rows, cores, tell

FIGURES = (
    "cases", "false_positives", "streams_lost", "answers", "completed", "refused_429", "levels", "finished", "lost",
    "seconds", "missed",
)  # fmt: skip
BOUND = "all found as expected, nothing lost, nothing found that was not there, everybody back"
LEVELS = "levels, shedding and batches follow capacity and return; premium is refused at level 4 only; no flapping"
SOAK_S = 600.0
END_S = 30.0  # for a part to take down what it started
SUMS = ("false_positives", "streams_lost", "answers", "cases", "cases_meant")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="pairs: so many deployments at once")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="pairs: only this one of N equal parts")
    parser.add_argument("--limit-s", type=float, default=0.0, help="pairs: none is begun after that; 0: no limit")


def rows(chosen: argparse.Namespace) -> Rows:
    return {
        "faults": lambda: _judged(run(HealthBench(), tell), BOUND),
        "pairs": partial(_pairs, chosen),
        "soak": lambda: _judged(soak(HealthBench(), SOAK_S, tell), "no worker accused, nothing lost, wrong or moved"),
        "degrade": _degrade,
    }


def _judged(result: dict[str, Any], bound: str) -> Row:
    return result | {"bound": bound, "met": not result["missed"]}


def _degrade() -> Row:
    result = degrade(DegradeBench(), tell)
    # A line of the file for each second.
    result["timeline"] = [" ".join("-" if one is None else str(one) for one in second) for second in result["timeline"]]
    return _judged(result, LEVELS) | {"cores": cores()}


def part_shares(which: int, parts: int, count: int) -> list[str]:
    """One part of several, in as many parts of its own as there are deployments."""
    return [f"{which + parts * place}/{parts * count}" for place in range(count)]


def _pairs(chosen: argparse.Namespace) -> Row:
    count, (which, parts) = chosen.side_by_side, map(int, chosen.part.split("/"))
    shares = part_shares(which, parts, count)
    with contextlib.ExitStack() as started:
        running = [
            started.enter_context(_part(share, chosen.limit_s, place, count)) for place, share in enumerate(shares)
        ]
        told = [process.communicate()[0] for process in running]
    results, missed = [], []
    for share, text in zip(shares, told, strict=True):
        try:
            results.append(json.loads(text))
        except ValueError:
            missed.append(f"part {share} ended without a result")
    return _judged(together(results, missed), BOUND) | {
        "cores": cores(),
        "side_by_side": count,
        "part": chosen.part,
    }


@contextlib.contextmanager
def _part(share: str, limit_s: float, place: int, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """One part, on its share of the cores; it and what it started ends with the block."""
    command = [sys.executable, "-m", "bench.health", "--pairs", "--json"]
    all_of_them = sorted(os.sched_getaffinity(0))
    ours = all_of_them[: cores()]
    own = ours[place * len(ours) // count : (place + 1) * len(ours) // count] or [ours[place % len(ours)]]
    os.sched_setaffinity(0, own)  # processes started now inherit it
    try:
        process = subprocess.Popen(
            [*command, "--part", share, "--limit-s", f"{limit_s:g}"],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )
    finally:
        os.sched_setaffinity(0, all_of_them)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(END_S)


def together(results: list[dict[str, Any]], missed: list[str]) -> dict[str, Any]:
    order = {(one.name, other.name): place for place, (one, other) in enumerate(pairs(tuple(BY_NAME.values())))}

    def place_of(row: dict[str, Any]) -> tuple[int, bool]:
        names = (row["fault"], row["beside"])
        return (order[names], False) if names in order else (order[names[::-1]], True)

    return {
        "faults": sorted((row for result in results for row in result["faults"]), key=place_of),
        **{name: sum(result[name] for result in results) for name in SUMS},
        "missed": [text for result in results for text in result["missed"]] + missed,
        **{name: results[0][name] for name in ("workers", "streams", "canary_interval_s", "seed") if results},
        "seconds": max((result["seconds"] for result in results), default=0.0),
    }
