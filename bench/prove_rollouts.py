"""`make prove-rollouts`: changes of a manifest under load, one scenario a row, each step of each also hit by a kill.

A row goes to its other shape and back as often as it takes: once with nothing done to it, then once for each step of
that rollout, with a process killed there (`--hits` bounds them); the last row ends the supervisor itself right after
each memory that it writes. Bad updates are tried once. A bound is missed if an answer was lost, wrong or inexact, if
fewer served or more were there than was promised, if anything was started twice, or if a bad update was not undone, not
for its own reason, or met customers.
"""

from __future__ import annotations

import argparse
from functools import partial

from bench.prove import Rows, tell
from bench.rollouts import campaign
from bench.rollouts.table import SCENARIOS

FIGURES = (
    "changes", "hits", "answers", "lost", "wrong", "inexact", "cut", "calm_s", "longest_s", "surge_max", "undone",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hits", type=int, default=campaign.HITS_MAX, help="steps of a rollout that are hit, at most")
    parser.add_argument("--seed", type=int, default=1, help="of what clients ask, and what is killed at which step")


def rows(chosen: argparse.Namespace) -> Rows:
    made: dict[str, partial[dict[str, object]]] = {
        name: partial(campaign.run, scenario, tell, seed=chosen.seed, hits_max=chosen.hits)
        for name, scenario in SCENARIOS.items()
    }
    return made | {"supervisor-dies": partial(campaign.supervisor_dies, tell, seed=chosen.seed)}
