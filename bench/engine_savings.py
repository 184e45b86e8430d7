"""What surviving KV saves: one stream, its engine killed in mid-answer, with prompts of several lengths.

With the pool in the vault the next engine goes on from the blocks it finds; with `--kv direct` they ended with their
engine and the whole text is computed again. The arithmetic is the default one. Both are asked the same prompts, each of
them once, so that nothing is found that an earlier round left. The time to the next token is from the kill to the
client's next token: seeing the death, taking over, computing, and the frontend's way to the client.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import uvloop

from holdfast.bench.engine_kills import EngineLoad
from holdfast.testing.answers import Answer
from holdfast.testing.clients import ask, read_answer
from holdfast.testing.processes import kill_group
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread

PROMPTS = (100, 500, 1500)
TOKENS = 64  # of an answer: the kill must come before its end, and looks for the right moment 20 times a second
SEEN = 6  # of these, before the kill
# A leader's word that its KV may be believed comes a second after its takeover (`engines.shadow.proving`).
SETTLED_S = 1.5
# A standby imports torch and reads 540 MB of weights to verify them, beside an engine at work; a long prompt takes as
# much on a busy machine.
BOUND_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """One kill."""

    next_token_ms: float
    recomputed_tokens: int
    whole: bool  # the answer had all its tokens


def run(source: str, model: str, kv: str, repeats: int = 3, prompts: Sequence[int] = PROMPTS) -> dict[str, Any]:
    """Medians by prompt length. `source` is what `--model` is given, `model` what it is served as."""
    # One thread: two of them wait for each other while the dead engine's successor starts beside them on two cores.
    options = ("--engine", "torch", "--model", source, "--fast", "--torch-threads", "1", "--kv", kv, "--kv-gib", "0.25")
    with Supervised(*options) as up:
        rounds = {
            length: [uvloop.run(_round(up, model, length, place)) for place in range(repeats)] for length in prompts
        }
    row: dict[str, Any] = {"model": model, "kv": kv, "repeats": repeats}
    for length, made in rounds.items():
        row[f"next_token_ms_{length}"] = _median(made, lambda one: one.next_token_ms)
        row[f"recomputed_tokens_{length}"] = _median(made, lambda one: one.recomputed_tokens)
    every = [one for made in rounds.values() for one in made]
    return row | {"answers": len(every), "whole": sum(one.whole for one in every)}


def _median(rounds: Sequence[Round], figure: Callable[[Round], float]) -> float:
    return round(statistics.median(figure(one) for one in rounds), 1)


async def _round(up: Supervised, model: str, length: int, place: int) -> Round:
    await asyncio.sleep(SETTLED_S)
    active = await in_thread(up.active)
    before = active.facts["tokens_total"]
    asking = asyncio.ensure_future(_ask(up.port, model, length, place))
    await in_thread(up.wait_until, lambda: up.active().facts["tokens_total"] - before >= SEEN, "tokens", BOUND_S)
    killed_s = time.perf_counter()
    await in_thread(kill_group, active.pid)
    answer = await asking
    await in_thread(up.wait_restored, active.pid, BOUND_S)
    # Tokens sent before the kill may come after it: the wait is the longest since.
    waits_s = [later_s - max(killed_s, at_s) for at_s, later_s in pairwise(answer.token_times_s) if later_s > killed_s]
    recomputed = (await in_thread(up.active)).facts["recomputed_tokens_max"]
    whole = not answer.wrong and len(answer.tokens) == TOKENS
    return Round(max(waits_s, default=0.0) * 1000, recomputed, whole and answer.resumed > 0)


async def _ask(port: int, model: str, length: int, place: int) -> Answer:
    ids = EngineLoad(seed=length).ids(place, length)
    body = {"model": model, "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    received = await ask(port, "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
    return read_answer(received)
