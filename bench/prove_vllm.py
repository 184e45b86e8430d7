"""`make prove-vllm`: `holdfast up --engine vllm --standbys 1` on CPUs, over tiny models of two families, its active
engine ended 20 times in a chain under mixed load: half of them killed, some stopped, some sent away.

Every answer is compared with the same deployment's unbroken one; greedy ones also with stock vLLM's, in a process of
its own. Run with vLLM's venv (`make prove-vllm`).
"""

from __future__ import annotations

import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

from bench.prove import Row, Rows, tell
from bench.vllm import chain
from bench.vllm.load import VllmLoad
from bench.vllm.models import FAMILIES, make_model
from bench.vllm.stock import stock_tokens

KILLS, STOPS, LEAVES = 11, 6, 3
FIGURES = (
    "ends", "answers", "resumed_streams", "cancelled", "streams_lost", "tokens_wrong", "logprobs_wrong",
    "greedy_compared_with_stock", "greedy_other_than_stock", "two_leaders", "recomputed_tokens_max",
    "calm_worst_gap_ms", "stall_ms_p50", "stall_ms_max", "found_ms",
)  # fmt: skip


def ends(family: str, kills: int = KILLS, stops: int = STOPS, leaves: int = LEAVES, seed: int = 1) -> Row:
    with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
        model = make_model(family, Path(name) / family)
        load = VllmLoad(f"tiny-{family}", seed=seed)
        tell("stock vLLM, to know what it says")
        stock = stock_tokens(model, load.comparable())
        row = chain.run(str(model), load, chain.order(kills, stops, leaves, seed), stock, tell)
    met = chain.sound(row) and chain.soon(row)
    return row | {"vllm": version("vllm"), "seed": seed, "bound": chain.BOUND, "met": met}


ROWS: Rows = {family: partial(ends, family) for family in FAMILIES}
