"""`make prove-apart`: two deployments with the same components on one machine and in one store, asked 10,000 times;
then one is deleted while the other is asked on. And two behind the frontend of a third, one of which is replaced.

A bound is missed if an answer was not its own set's, if a frontend knew a worker of the other, or if the end or the
rollout of one changed a process, a record or an answer of the other.
"""

from __future__ import annotations

from functools import partial

from bench.apart import crosstalk, sharing
from bench.prove import Rows, tell

FIGURES = (
    "requests", "requests_per_s", "wrong", "strangers", "requests_meanwhile", "other_unchanged", "keys_left",
    "rollout_s",
)  # fmt: skip

ROWS: Rows = {
    "two-deployments": partial(crosstalk.run, 10_000, tell),
    "shared-frontend": partial(sharing.run, 1_000, tell),
}
