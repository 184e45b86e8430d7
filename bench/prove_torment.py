"""`make prove-torment`: ten minutes of random faults under a real engine's deployment; ten minutes each with one sim
worker and with two, whose requests fail, connections break and known questions are answered wrongly while a control
judges them; then ten with two frontends that ask twice what the workers can take, calm and with workers killed.

A bound is missed if an answer was lost, wrong or hung, if there were two leaders, if redundancy did not come back, if a
process was left behind, if a refusal was not a 429 with a time to come back, or if a frontend or a client starved.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from bench import overload
from bench.overload import OverloadBench
from bench.prove import Row, Rows, tell
from bench.torment import campaign as torment
from bench.torment.campaign import Torment

UNFAIRNESS_MAX = 2.0
FIGURES = (
    "faults", "answers", "cancelled", "lost_or_wrong", "hanging", "two_leaders",
    "longest_answer_s", "whole_again_s_p50", "whole_again_s_max", "full_disk",
    "completed", "unfairness", "clients_starved", "refused_429", "refused_otherwise", "wait_s_max", "wrong", "lost",
    "resumed", "migrations_counted",
)  # fmt: skip


def _overload(bench: OverloadBench) -> Row:
    row = overload.run(bench, tell)
    wrong = row["wrong"] + row["lost"] + row["clients_starved"] + row["refused_without_retry_after"]
    if not bench.kill_every_s:
        wrong += row["refused_otherwise"] + row["resumed"]
    met = wrong == 0 and row["unfairness"] <= UNFAIRNESS_MAX and row["completed"] > 0 and row["refused_429"] > 0
    bound = f"nothing lost or wrong, none starves, fair within {UNFAIRNESS_MAX:g}x, refused by 429 with Retry-After, "
    bound += "no migration that was none"
    return row | {"bound": bound, "met": met and row["migrations_counted"] == row["resumed"]}


# Answers of three seconds: of clients for twice the places some wait for 5 s (`overload.QUEUE_S`) and are refused.
_TWICE = OverloadBench(seconds=300.0, workers=2, tokens=150)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the rows with random faults."""
    defaults = Torment()
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="how long each row with faults lasts")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the faults' order and of the requests")
    parser.add_argument("--workers", type=int, default=defaults.workers, help="workers of the row `everything`")
    parser.add_argument("--engine", choices=sorted(torment.OPTIONS), default=defaults.engine, help="of `everything`")


def rows(chosen: argparse.Namespace) -> Rows:
    own = Torment(seconds=chosen.seconds, seed=chosen.seed, workers=chosen.workers, engine=chosen.engine)
    return {
        "everything": partial(torment.run, tell, own),
        "judged-one": partial(torment.run, tell, replace(own, workers=1, engine="sim")),
        "judged-two": partial(torment.run, tell, replace(own, workers=2, engine="sim")),
        **OVERLOADS,
    }


OVERLOADS: Rows = {
    "overload": partial(_overload, _TWICE),
    "overload-with-kills": partial(_overload, replace(_TWICE, kill_every_s=10.0)),
}
