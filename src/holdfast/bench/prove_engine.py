"""`make prove-engine`: a real model's engine killed 200 times in each of its ways to run; written to a results file.

Under `exact` every token of every stream is compared with the unbroken run's. A pool as full as this evicts: rounds in
which some resumed stream had lost a block are counted apart (`rounds` less `rounds_all_resident`), and with room
for all there must be none. Then what surviving KV saves, by prompt length. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from holdfast.bench import engine_savings, failover
from holdfast.bench.engine_kills import EngineKills
from holdfast.bench.results import Row, prove
from holdfast.bench.supervised import Supervised

RESULTS = Path("bench/results/engine.json")
KILLS = 200
FIGURES = (
    "rounds", "answers", "resumed_streams", "streams_lost", "tokens_wrong", "counts_wrong", "resumed_identical_share",
    "recomputed_tokens_max", "rounds_all_resident", "stall_ms_p50", "stall_ms_max",
    *(f"next_token_ms_{length}" for length in engine_savings.PROMPTS),
    *(f"recomputed_tokens_{length}" for length in engine_savings.PROMPTS),
)  # fmt: skip


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _kills(bench: EngineKills, *, resident: bool = False) -> Callable[[], Row]:
    def run() -> Row:
        row = failover.run(bench, _tell)
        wrong = row["streams_lost"] + row["counts_wrong"] + row["two_actives"]
        wrong += row["tokens_wrong"] if bench.exact else 0
        met = wrong == 0 and row["resumed_streams"] > 0
        bound = "nothing lost or repeated, never two leaders"
        if bench.exact:
            bound += ", every token as in the unbroken run"
        if resident:
            met = met and row["recomputed_tokens_max"] < failover.BLOCK_TOKENS
            bound += ", less than a block recomputed"
        more = {"pool_blocks": bench.pool_blocks(), "pool_full_share": bench.full_share, "exact": bench.exact}
        return row | more | {"kv": bench.kv, "bound": bound, "met": met}

    return run


def _saves(kv: str) -> Callable[[], Row]:
    def run() -> Row:
        row = engine_savings.run(*_model(), kv)
        met = row["whole"] == row["answers"]
        bound = "every answer whole"
        if kv == "vault":
            most = max(row[f"recomputed_tokens_{length}"] for length in engine_savings.PROMPTS)
            met = met and most < failover.BLOCK_TOKENS
            bound += ", less than a block recomputed"
        return row | {"bound": bound, "met": met}

    return run


@cache
def _model() -> tuple[str, str]:
    """The default model if it can be had, else the tiny one: as `--model` takes it, and as it is served."""
    try:
        with Supervised("--engine", "torch", "--model", "default"):
            return "default", "smollm2-135m-instruct"
    except TimeoutError as error:
        print(f"the default model did not start, the tiny one is used: {str(error)[:300]}", file=sys.stderr)
        return "tiny", "tiny"


ROWS: dict[str, Callable[[], Row]] = {
    "kills-exact": _kills(EngineKills(KILLS)),
    "kills-exact-roomy": _kills(EngineKills(KILLS, full_share=0.5), resident=True),
    "kills-fast": _kills(EngineKills(KILLS, exact=False)),
    "kills-direct": _kills(EngineKills(KILLS, kv="direct")),
    "saves-vault": _saves("vault"),
    "saves-direct": _saves("direct"),
}


def main(argv: list[str]) -> int:
    return prove("prove-engine", __doc__ or "", ROWS, RESULTS, FIGURES, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
