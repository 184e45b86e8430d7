"""`make prove-failover`: every promise of failover at full size, with its bound; written to a results file.

The cases run in one deployment of 1 GiB of vault memory with 32 open streams; the rounds in another. Exits with 1 if a
bound is missed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from bench.failover_cases import HITS, STALL_MS_MAX, run_cases
from bench.prove import Row, prove
from holdfast.bench import failover
from holdfast.kv.resumes import within_a_block
from holdfast.testing.load import Load
from holdfast.testing.supervised import Supervised

RESULTS = Path("bench/results/failover.json")
LOAD = Load(streams=32, tokens=300)
# What surviving KV promises: a resumed stream computes less than one block again.
BLOCK_TOKENS = 16


class Cases:
    """One deployment for all cases, started when the first is asked for, ended with `close`."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._up: Supervised | None = None

    def run(self, name: str) -> Row:
        if self._up is None:
            self._up = self._stack.enter_context(Supervised("--vault-gib", "1", "--sim-ranks", "2"))
        [(_, outcome, more)] = run_cases(self._up, LOAD, (name,))
        limit_ms = STALL_MS_MAX.get(name)
        met = outcome.survived and not more["two_leaders"] and (limit_ms is None or outcome.stall_ms <= limit_ms)
        stall = f", stall <= {limit_ms} ms" if limit_ms is not None else ""
        return outcome.as_dict() | more | {"bound": f"all survive, never two leaders, standby again{stall}", "met": met}

    def close(self) -> None:
        self._stack.close()


def _rounds() -> Row:
    row = failover.run(failover.FailoverBench())
    wrong = row["streams_lost"] + row["tokens_wrong"] + row["two_actives"]
    grown = [name for name, sizes in row["growth"].items() if sizes["fds"] > 2 or sizes["threads"] > 2]
    met = wrong == 0 and not grown and within_a_block(row["recomputed_tokens_max"], BLOCK_TOKENS)
    bound = "nothing lost or wrong, never two leaders, at most a block recomputed, no fds or threads more"
    return row | {"bound": bound, "met": met}


def main(argv: list[str]) -> int:
    cases = Cases()
    rows: dict[str, Callable[[], Row]] = {
        name.replace(" ", "-"): lambda name=name: cases.run(name) for name in HITS  # type: ignore[misc]
    }
    rows["rounds"] = _rounds
    figures = ("stall_ms", "finished", "standby_again_s", "stall_ms_p50", "stall_ms_max", "streams_lost", "two_actives")
    try:
        return prove("prove-failover", __doc__ or "", rows, RESULTS, figures, argv)
    finally:
        cases.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
