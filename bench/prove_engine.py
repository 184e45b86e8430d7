"""`make prove-engine`: a real model's engine killed 200 times in either arithmetic; written to a results file.

Under `exact` every token of every stream is compared with the unbroken run's. The pool has room for all streams and
little more, so no stream that comes back may find a block of its own evicted or missing. Then what surviving KV saves,
by prompt length. Then how fast it decodes beside transformers, in one process. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from bench import engine_savings
from bench.prove import Row, prove, tell
from holdfast.bench import failover
from holdfast.bench.engine_kills import EngineKills
from holdfast.kv.resumes import within_a_block
from holdfast.testing.supervised import Supervised

RESULTS = Path("bench/results/engine.json")
KILLS = 200
DIRECT_KILLS = 60  # each takes four times as long, and shows what is not there
# Ten minutes on two idle cores; on busy ones several times that.
SPEED_S = 3600.0
SPEED_FIGURES = ("ratio", "fast_tokens_per_s", "transformers_tokens_per_s", "exact_tokens_per_s", "exact_cost")
FIGURES = (
    "rounds", "answers", "resumed_streams", "streams_lost", "tokens_wrong", "counts_wrong", "resumed_identical_share",
    "resumed_resident_total", "resumed_evicted_total", "resumed_missing_total",
    "recomputed_tokens_max", "recomputed_tokens_resident_max", "rounds_all_resident", "stall_ms_p50", "stall_ms_max",
    *(f"next_token_ms_{length}" for length in engine_savings.PROMPTS),
    *(f"recomputed_tokens_{length}" for length in engine_savings.PROMPTS),
    *(f"{name}_{streams}" for streams in (1, 8) for name in SPEED_FIGURES),
)  # fmt: skip


def _kills(bench: EngineKills) -> Callable[[], Row]:
    def run() -> Row:
        row = failover.run(bench, tell)
        wrong = row["streams_lost"] + row["counts_wrong"] + row["two_actives"]
        wrong += row["tokens_wrong"] if bench.exact else 0
        met = wrong == 0 and row["resumed_streams"] > 0
        bound = "nothing lost or repeated, never two leaders"
        if bench.exact:
            bound += ", every token as in the unbroken run"
        if bench.kv == "vault":
            lost = row["resumed_evicted_total"] + row["resumed_missing_total"]
            met = met and row["resumed_resident_total"] > 0 and lost == 0
            met = met and within_a_block(row["recomputed_tokens_resident_max"], failover.BLOCK_TOKENS)
            bound += ", no block of a resumed stream evicted or missing, at most one recomputed"
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
            met = met and within_a_block(most, failover.BLOCK_TOKENS)
            bound += ", at most a block recomputed"
        return row | {"bound": bound, "met": met}

    return run


def _speed() -> Row:
    """The command itself, in a process of its own: this one has no torch, and no say where models are kept."""
    command = ("bench", "engine", "--compare", "transformers", "--model", _model()[0], "--json")
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *command], stdout=subprocess.PIPE, timeout=SPEED_S, check=True
    )
    result: Row = json.loads(done.stdout)
    found = {
        f"{name}_{row['streams']}": row[name] for row in result.pop("rows") for name in SPEED_FIGURES if name in row
    }
    met = all(found[f"ratio_{streams}"] >= 1.0 for streams in (1, 8))
    return result | found | {"bound": "at least 1.0x transformers at 1 and 8 streams", "met": met}


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
    "kills-fast": _kills(EngineKills(KILLS, exact=False)),
    "kills-direct": _kills(EngineKills(DIRECT_KILLS, kv="direct")),
    "saves-vault": _saves("vault"),
    "saves-direct": _saves("direct"),
    "speed": _speed,
}


def main(argv: list[str]) -> int:
    return prove("prove-engine", __doc__ or "", ROWS, RESULTS, FIGURES, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
