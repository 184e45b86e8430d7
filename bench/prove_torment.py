"""`make prove-torment`: ten minutes of random faults under a real engine's deployment; then ten with two frontends that
ask twice what the workers can take, calm and with workers killed all the while.

A bound is missed if an answer was lost, wrong or hung, if there were two leaders, if redundancy did not come back, if a
process was left behind, if a refusal was not a 429 with a time to come back, or if a frontend or a client starved.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench.prove import Row, Rows, tell
from bench.torment import campaign as torment
from holdfast.bench import overload
from holdfast.bench.overload import OverloadBench

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
    bound = f"nothing lost or wrong, nobody starves, fair within {UNFAIRNESS_MAX:g}x, refused by 429 with Retry-After, "
    bound += "no migration that was none"
    return row | {"bound": bound, "met": met and row["migrations_counted"] == row["resumed"]}


# Answers of three seconds: of clients for twice the places some wait for 5 s (`overload.QUEUE_S`) and are refused.
_TWICE = OverloadBench(seconds=300.0, workers=2, tokens=150)

ROWS: Rows = {
    "everything": partial(torment.run, tell),
    "overload": partial(_overload, _TWICE),
    "overload-with-kills": partial(_overload, replace(_TWICE, kill_every_s=10.0)),
}
