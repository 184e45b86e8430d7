"""`make prove-engine`: a real model's engine killed 200 times in either arithmetic; written to a results file.

Under `exact` every token of every stream is compared with the unbroken run's. The pool has room for all streams and
little more, so no stream that comes back may find a block of its own evicted or missing. Then what surviving KV saves,
by prompt length. Then how fast it decodes beside transformers, in one process.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from functools import cache, partial
from itertools import pairwise

import uvloop

from bench import ROOT, failover
from bench.failover import engine_bench
from bench.prove import Row, Rows, tell
from holdfast.core.tasks import beside
from holdfast.kv.pool import within_a_block
from holdfast.testing.answers import Answer
from holdfast.testing.clients import ask, read_answer
from holdfast.testing.processes import kill_group
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread
from tests.rigs.engines.mixed_load import BLOCK_TOKENS, FULL_SHARE, EngineLoad

KILLS = 200
DIRECT_KILLS = 60  # each takes four times as long, and shows what is not there
REPEATS = 3
PROMPTS = (100, 500, 1500)
SAVED_TOKENS = 64  # of an answer: the kill must come before its end, and looks for the right moment 20 times a second
SEEN = 6  # of these, before the kill
# A leader's word that its KV may be believed comes a second after its takeover (`engines.host.proving`).
SETTLED_S = 1.5
# A standby imports torch and reads 540 MB of weights to verify them, beside an engine at work; a long prompt takes as
# much on a busy machine.
BOUND_S = 120.0
# Ten minutes on two idle cores; on busy ones several times that.
SPEED_S = 3600.0
SPEED_FIGURES = ("ratio", "fast_tokens_per_s", "transformers_tokens_per_s", "exact_tokens_per_s", "exact_cost")
FIGURES = (
    "rounds", "answers", "resumed_streams", "streams_lost", "tokens_wrong", "counts_wrong", "resumed_identical_share",
    "resumed_resident_total", "resumed_evicted_total", "resumed_missing_total",
    "recomputed_tokens_max", "recomputed_tokens_resident_max", "rounds_all_resident", "stall_ms_p50", "stall_ms_max",
    *(f"next_token_ms_{length}" for length in PROMPTS),
    *(f"recomputed_tokens_{length}" for length in PROMPTS),
    *(f"{name}_{streams}" for streams in (1, 8) for name in SPEED_FIGURES),
)  # fmt: skip


def _kills(rounds: int = KILLS, *, exact: bool = True, kv: str = "vault") -> Row:
    row = failover.run(engine_bench(rounds, exact=exact, kv=kv), tell)
    wrong = row["streams_lost"] + row["counts_wrong"] + row["two_actives"]
    wrong += row["tokens_wrong"] if exact else 0
    met = wrong == 0 and row["resumed_streams"] > 0
    bound = "nothing lost or repeated, never two leaders"
    if exact:
        bound += ", every token as in the unbroken run"
    if kv == "vault":
        lost = row["resumed_evicted_total"] + row["resumed_missing_total"]
        met = met and row["resumed_resident_total"] > 0 and lost == 0
        met = met and within_a_block(row["recomputed_tokens_resident_max"], BLOCK_TOKENS)
        bound += ", no block of a resumed stream evicted or missing, at most one recomputed"
    more = {"pool_blocks": EngineLoad().pool_blocks(), "pool_full_share": FULL_SHARE, "exact": exact, "kv": kv}
    return row | more | {"bound": bound, "met": met}


def _saves(kv: str) -> Row:
    """What surviving KV saves: one stream, its engine killed in mid-answer, with prompts of several lengths; medians.

    With the pool in the vault the next engine goes on from the blocks it finds; with `--kv direct` they ended with
    their engine and the whole text is computed again. The arithmetic is the default one. Both are asked the same
    prompts, each of them once, so that nothing is found that an earlier round left. The time to the next token is from
    the kill to the client's next token: seeing the death, taking over, computing, and the frontend's way to the
    client."""
    source, model = _model()
    # One thread: two of them wait for each other while the dead engine's successor starts beside them on two cores.
    options = ("--engine", "torch", "--model", source, "--fast", "--torch-threads", "1", "--kv", kv, "--kv-gib", "0.25")
    row: Row = {"model": model, "kv": kv, "repeats": REPEATS, "answers": 0, "whole": 0}
    with Supervised(*options) as up:
        for length in PROMPTS:
            rounds = [uvloop.run(_round(up, model, length, place)) for place in range(REPEATS)]
            waits_ms, recomputed, whole = zip(*rounds, strict=True)
            row[f"next_token_ms_{length}"] = round(statistics.median(waits_ms), 1)
            row[f"recomputed_tokens_{length}"] = round(statistics.median(recomputed), 1)
            row["answers"] += len(rounds)
            row["whole"] += sum(whole)
    met = row["whole"] == row["answers"]
    bound = "every answer whole"
    if kv == "vault":
        most = max(row[f"recomputed_tokens_{length}"] for length in PROMPTS)
        met = met and within_a_block(most, BLOCK_TOKENS)
        bound += ", at most a block recomputed"
    return row | {"bound": bound, "met": met}


async def _round(up: Supervised, model: str, length: int, place: int) -> tuple[float, int, bool]:
    """One kill: how long until the next token, how many were computed again, and whether the answer had all of it."""
    await asyncio.sleep(SETTLED_S)
    active = await in_thread(up.active)
    before = active.facts["tokens_total"]
    async with beside(_ask(up.port, model, length, place), "the answer") as asking:
        await in_thread(up.wait_until, lambda: up.active().facts["tokens_total"] - before >= SEEN, "tokens", BOUND_S)
        killed_s = time.perf_counter()
        await in_thread(kill_group, active.pid)
        answer = await asking
    await in_thread(up.wait_restored, active.pid, BOUND_S)
    # Tokens sent before the kill may come after it: the wait is the longest since.
    waits_s = [later_s - max(killed_s, at_s) for at_s, later_s in pairwise(answer.token_times_s) if later_s > killed_s]
    recomputed = (await in_thread(up.active)).facts["recomputed_tokens_max"]
    whole = not answer.wrong and len(answer.tokens) == SAVED_TOKENS
    return max(waits_s, default=0.0) * 1000, recomputed, whole and answer.resumed > 0


async def _ask(port: int, model: str, length: int, place: int) -> Answer:
    ids = EngineLoad(seed=length).ids(place, length)
    body = {"model": model, "prompt": ids, "max_tokens": SAVED_TOKENS, "temperature": 0, "stream": True}
    received = await ask(port, "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
    return read_answer(received)


def _speed() -> Row:
    """The command itself, in a process of its own: this one has no torch, and no say where models are kept."""
    command = [sys.executable, "-m", "bench.engine", "--compare", "transformers", "--model", _model()[0], "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=SPEED_S, check=True)
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


ROWS: Rows = {
    "kills-exact": _kills,
    "kills-fast": partial(_kills, exact=False),
    "kills-direct": partial(_kills, DIRECT_KILLS, kv="direct"),
    "saves-vault": partial(_saves, "vault"),
    "saves-direct": partial(_saves, "direct"),
    "speed": _speed,
}
