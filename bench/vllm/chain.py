"""One vLLM deployment whose active engine is ended again and again under load, and what clients and engines saw.

First all is asked at once, unbroken: what is right. Then clients ask the same all the time, others leave in the middle,
and the active engine is killed, stopped or sent away; each time, once a standby is there again.

A gap is between two tokens of one stream. An end's stall is the worst gap that was open then or began within five
seconds, minus the run's worst *calm* gap: of the unbroken run, or begun later than that, while the next standby is
loaded beside the streams. So a machine that is busy with other work is not taken for an engine that hangs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from bench.failover import RECOMPUTED, RESUMED
from bench.vllm.load import Quitters, VllmLoad
from bench.vllm.models import BLOCK_BYTES, BLOCK_TOKENS
from holdfast.failover.journal import two_leaders
from holdfast.kv.pool import within_a_block
from holdfast.testing.answers import Answer, difference
from holdfast.testing.clients import read_answer
from holdfast.testing.processes import kill_group, state_of
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread, wait_until
from holdfast.testing.workload import Asking, failures, spread

# vLLM's import takes 10 s of a core, and many times that beside other work.
WHOLE_S = 600.0
PAUSE_S = (2.0, 4.0)  # a leader's word that its KV may be believed comes a second after its takeover
AROUND_S = 5.0
FOUND_S_MAX, STALL_S_MAX = 1.5, 3.0
STOP = "SIGSTOP"
ENDS: dict[str, Callable[[int], None]] = {
    "kill -9": kill_group,
    STOP: lambda pid: os.kill(pid, signal.SIGSTOP),
    "SIGTERM": lambda pid: os.kill(pid, signal.SIGTERM),
}
NEVER = (
    "streams_lost", "tokens_wrong", "counts_wrong", "logprobs_wrong", "cancelled_wrong", "greedy_other_than_stock",
    "two_leaders", "resumed_evicted_total", "resumed_missing_total",
)  # fmt: skip
BOUND = (
    "nothing lost, repeated or other than unbroken, greedy as stock vLLM, never two leaders, "
    f"at most a block recomputed, a stop found within {FOUND_S_MAX:g} s, streams go on within {STALL_S_MAX:g} s, "
    "beyond the worst calm gap"
)


@dataclass(slots=True)
class Chain:
    """What is done to it, and what happens meanwhile."""

    up: Supervised
    load: VllmLoad
    ends: Sequence[str]
    ended_s: list[float] = field(default_factory=list)
    found_s: list[float] = field(default_factory=list)  # from each stop to the stopped process's end
    restored_s: list[float] = field(default_factory=list)
    resumes: list[dict[str, int]] = field(default_factory=list)  # as each new leader tells

    def leader(self) -> int:
        return self.up.active().pid

    def end(self, name: str) -> None:
        """End the leader, and wait until another leads and another stands by."""
        pid = self.leader()
        began_s = time.perf_counter()
        self.ended_s.append(began_s)
        ENDS[name](pid)
        if name == STOP:
            wait_until(lambda: state_of(pid) in ("", "Z"), "the stopped engine's end", WHOLE_S, every_s=0.01)
            self.found_s.append(time.perf_counter() - began_s)
        self.restored_s.append(self.up.wait_restored(pid, WHOLE_S))
        facts = self.up.active().facts
        self.resumes.append({name: facts.get(name, 0) for name in (*RESUMED, *RECOMPUTED)})


def options(model: str, load: VllmLoad) -> tuple[str, ...]:
    kv_gib = load.blocks() * BLOCK_BYTES / 2**30
    up = ("--engine", "vllm", "--model", model, "--served-name", load.model, "--standbys", "1")
    return (*up, "--kv-gib", f"{kv_gib:.3f}", "--context", "2048", "--", "--enforce-eager")


def order(kills: int, stops: int, leaves: int, seed: int) -> list[str]:
    """Of so many ends, in an order of its own, how each is."""
    names = ["kill -9"] * kills + [STOP] * stops + ["SIGTERM"] * leaves
    return random.Random(seed).sample(names, len(names))


def run(
    model: str, load: VllmLoad, ends: Sequence[str], stock: dict[int, list[int]], tell: Callable[[str], None]
) -> dict[str, Any]:
    """All of it; the result is flat, for a results file."""
    with Supervised(*options(model, load), start_s=WHOLE_S) as up:
        return uvloop.run(_run(Chain(up, load, ends), stock, tell))


async def _run(chain: Chain, stock: dict[int, list[int]], tell: Callable[[str], None]) -> dict[str, Any]:
    asking, quitters = Asking(chain.up.port, chain.load), Quitters(chain.up.port, chain.load)
    tell(f"{chain.load.streams} streams unbroken, to know what is right")
    right = [read_answer(one) for one in await asking.once()]
    rng = random.Random(chain.load.seed)
    async with asking.all_the_time(), quitters.all_the_time():
        for number, name in enumerate(chain.ends, 1):
            await asyncio.sleep(rng.uniform(*PAUSE_S))
            await in_thread(chain.end, name)
            tell(f"end {number} of {len(chain.ends)}: {len(asking.received)} answers")
    answers = [(number, read_answer(one)) for number, one in asking.received]
    return judge(chain, right, answers, stock) | _of_quitters(quitters, right)


def _of_quitters(quitters: Quitters, right: list[Answer]) -> dict[str, Any]:
    wrong = quitters.wrong(right)
    return {"cancelled": len(quitters.left), "cancelled_wrong": len(wrong), "cancelled_errors": sorted(set(wrong))[:3]}


def judge(
    chain: Chain, right: list[Answer], answers: Sequence[tuple[int, Answer]], stock: dict[int, list[int]]
) -> dict[str, Any]:
    differences = [difference(right[number], answer) for number, answer in answers]
    others = [number for number, answer in answers if answer.logprobs != right[number].logprobs]
    calm_s, stalls_s = stalls(chain.ended_s, [answer for _, answer in answers], right)
    terms, stall = chain.up.terms(), spread([each * 1000 for each in stalls_s])
    return {
        "ends": {name: chain.ends.count(name) for name in ENDS},
        "streams": chain.load.streams,
        "answers": len(answers),
        "resumed_streams": sum(answer.resumed > 0 for _, answer in answers),
        "streams_lost": sum(bool(answer.wrong) for _, answer in answers),
        "tokens_wrong": sum(map(bool, differences)),
        "counts_wrong": sum(len(answer.tokens) != chain.load.tokens for _, answer in answers),
        "logprobs_wrong": len(others),
        "greedy_compared_with_stock": len(stock),
        "greedy_other_than_stock": sum(right[number].tokens != tokens for number, tokens in stock.items()),
        "two_leaders": len(two_leaders(terms)),
        "leaders": len(terms),
        **{name: sum(told[name] for told in chain.resumes) for name in RESUMED},
        **{name: max((told[name] for told in chain.resumes), default=0) for name in RECOMPUTED},
        "block_tokens": BLOCK_TOKENS,
        "calm_worst_gap_ms": round(calm_s * 1000, 1),
        **{f"stall_ms_{name}": stall[name] for name in ("p50", "max")},
        "stall_ms_max_by_end": _by_end(chain, stalls_s),
        "found_ms": [round(each * 1000) for each in chain.found_s],
        "standby_again_s_max": round(max(chain.restored_s, default=0.0), 1),
        "errors": failures(answer for _, answer in answers) + sorted({why for why in differences if why})[:3],
    }


def sound(row: dict[str, Any]) -> bool:
    """Nothing was lost, wrong or computed again, however long it took."""
    recomputed = within_a_block(row["recomputed_tokens_max"], row["block_tokens"])
    return bool(recomputed and row["resumed_streams"]) and not any(row[name] for name in NEVER)


def soon(row: dict[str, Any]) -> bool:
    found_ms: float = max(row["found_ms"], default=0) - row["calm_worst_gap_ms"]
    stall_ms: float = row["stall_ms_max"]
    return found_ms <= FOUND_S_MAX * 1000 and stall_ms <= STALL_S_MAX * 1000


def stalls(ended_s: Sequence[float], answers: Sequence[Answer], right: Sequence[Answer]) -> tuple[float, list[float]]:
    """Return the worst calm gap, and each end's stall beyond it."""
    gaps = [gap for answer in answers for gap in itertools.pairwise(answer.token_times_s)]
    worst = [0.0] * len(ended_s)
    calm_s = max((max(answer.gaps_s, default=0.0) for answer in right), default=0.0)
    for began_s, over_s in gaps:
        near = [at for at, end_s in enumerate(ended_s) if over_s > end_s and began_s < end_s + AROUND_S]
        for at in near:
            worst[at] = max(worst[at], over_s - began_s)
        if not near:
            calm_s = max(calm_s, over_s - began_s)
    return calm_s, [max(0.0, each - calm_s) for each in worst]


def _by_end(chain: Chain, stalls_s: Sequence[float]) -> dict[str, float]:
    pairs = list(zip(chain.ends, stalls_s, strict=True))
    return {end: round(max((s for name, s in pairs if name == end), default=0.0) * 1000, 1) for end in ENDS}
