"""`make prove-fleet-local`: a fleet of real processes on this machine, under load and under attack.

Three models on memory for one and a half, requests to all at random for five minutes, engines and vaults killed at
random (`storm`); one model scaled 1, 4, 1, 0, 1 under load (`steps`); one that its traffic scales (`curve`, drawn to
docs/fleet-local.svg). Every answer is compared with the first one to the same request.
"""

from __future__ import annotations

import argparse
from functools import partial

from bench.fleet_local import curve, steps, storm
from bench.prove import Rows

STORM_S = 300.0
FIGURES = (
    "requests", "lost", "wrong", "killed", "over", "vault_samples", "swaps", "swaps_allowed", "residences_s",
    "wait_ms", "step_s", "held", "first_answer_s", "ready_s", "most_hot",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=STORM_S, help="of the storm")
    parser.add_argument("--seed", type=int, default=1, help="of the storm")


def rows(chosen: argparse.Namespace) -> Rows:
    return {"storm": partial(storm.run, chosen.seconds, chosen.seed), "steps": steps.run, "curve": curve.run}
