"""`python -m bench.failover`: kill the active engine again and again under continuous load, and judge what clients saw.

Every answer is compared with the same request's unbroken one. A round's stall is the worst gap between two tokens of
any stream around that kill, minus the worst gap of the unbroken run. Whether there were ever two leaders is
read from the engines' own journals. What lives through all rounds (supervisor, vault, keeper, frontend, store) must
not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import uvloop

from bench.command import main, show, tell
from holdfast.cli.arguments import CommandOptions, Json
from holdfast.failover.journal import two_leaders
from holdfast.kv.pool import within_a_block
from holdfast.settings import Environment
from holdfast.spec.settings import about
from holdfast.testing.answers import Answer, difference
from holdfast.testing.clients import read_answer
from holdfast.testing.processes import anon_kib, fd_count, kill_group, thread_count
from holdfast.testing.rig import EngineSeen
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread
from holdfast.testing.workload import Asking, Requests, Workload, failures, spread
from tests.rigs.engines.mixed_load import BLOCK_TOKENS, EngineLoad

# How engines are ended.
ENDS: dict[str, Callable[[int], None]] = {
    "kill the group": kill_group,
    "kill only the parent": lambda pid: os.kill(pid, signal.SIGKILL),
    "SIGTERM": lambda pid: os.kill(pid, signal.SIGTERM),
}
WARM_ROUNDS = 5  # before growth is measured: logs, caches and arenas fill up first
TINY_BLOCK_BYTES = 16_384  # keys and values of a block of the tiny model
GIB = 1024**3
# What engines tell of the streams that came back to them, as counts and as the worst of one stream.
RESUMED = ("resumed_total", "resumed_resident_total", "resumed_evicted_total", "resumed_missing_total")
RECOMPUTED = ("recomputed_tokens_max", "recomputed_tokens_resident_max")


@dataclass(frozen=True, slots=True)
class FailoverBench:
    """What is started, what is asked of it, and how often it is broken."""

    rounds: int
    options: tuple[str, ...]  # of `holdfast up`
    load: Requests
    seed: int
    # Between a standby's return and the next kill: an engine that lives shorter than two seconds looks to the
    # supervisor like a crash loop, and one that dies within a second of adopting (`engines.host.proving`) leaves KV
    # that the next does not believe.
    pause_s: tuple[float, float]
    ends: Mapping[str, int]  # how engines are ended, and how often of all


def sim_bench(
    rounds: int = 200, streams: int = 16, tokens: int = 200, *, vault_gib: float = 0.25, seed: int = 1
) -> FailoverBench:
    """Run sim engines of two ranks. Mostly SIGKILL to all of one; the other ends must be as harmless."""
    options = ("--sim-tpot-ms", "20.0", "--vault-gib", str(vault_gib), "--sim-ranks", "2")
    ends = {"kill the group": 6, "kill only the parent": 2, "SIGTERM": 2}
    return FailoverBench(rounds, options, Workload(streams, tokens, seed), seed, (0.8, 1.6), ends)


def engine_bench(
    rounds: int = 200, streams: int = 12, tokens: int = 150, *, seed: int = 1, exact: bool = True, kv: str = "vault"
) -> FailoverBench:
    """Run torch engines of the tiny model. Two standbys: a new one takes seconds to import torch, and the next kill
    need not wait for it.

    A standby is there at once as a rule, so the new leader has led as long as the pause when it is killed. Without
    surviving KV it computes all texts again first, for some four seconds: a stream that is killed three times before it
    said a word would look like one that kills engines, and be failed for it (`streams.ledger`)."""
    load = EngineLoad(streams, tokens, seed)
    options = (
        *("--engine", "torch", "--model", "tiny", "--torch-threads", "1", "--kv", kv, "--standbys", "2"),
        *("--exact" if exact else "--fast", "--kv-gib", str(load.pool_blocks() * TINY_BLOCK_BYTES / GIB)),
    )
    pause_s = (1.2, 2.2) if kv == "vault" else (5.0, 7.0)
    return FailoverBench(rounds, options, load, seed, pause_s, {"kill the group": 1})


@dataclass(slots=True)
class _Run:
    """What happens while it runs."""

    up: Supervised
    bench: FailoverBench
    asking: Asking
    kills_s: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    resumes: list[dict[str, int]] = field(default_factory=list)  # by round, as the new leader tells
    restored_s: list[float] = field(default_factory=list)


def run(bench: FailoverBench, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All rounds; the result is flat, for `--json`."""
    with Supervised(*bench.options) as up:
        return uvloop.run(_run(_Run(up, bench, Asking(up.port, bench.load)), tell))


async def _run(state: _Run, tell: Callable[[str], None]) -> dict[str, Any]:
    tell(f"{state.bench.load.streams} streams unbroken, to know what is right")
    unbroken = [read_answer(one) for one in await state.asking.once()]
    async with state.asking.all_the_time():
        growth = await _rounds(state, tell)
    answers = [(unbroken[number], read_answer(one)) for number, one in state.asking.received]
    return _judge(state, unbroken, answers) | {"growth": growth, "errors": failures(answer for _, answer in answers)}


async def _rounds(state: _Run, tell: Callable[[str], None]) -> dict[str, dict[str, int]]:
    """All of them; by how much the processes that stay have grown."""
    bench, up = state.bench, state.up
    rng = random.Random(bench.seed)
    names = [name for name, weight in bench.ends.items() for _ in range(weight)]
    early: dict[str, Any] = {}
    for number in range(1, bench.rounds + 1):
        await asyncio.sleep(rng.uniform(*bench.pause_s))
        active = await in_thread(up.active)
        if number > 1:
            state.resumes.append(_told(active))
        end = rng.choice(names)
        state.ends.append(end)
        state.kills_s.append(time.perf_counter())
        await in_thread(ENDS[end], active.pid)
        state.restored_s.append(await in_thread(up.wait_restored, active.pid))
        if number == min(WARM_ROUNDS, bench.rounds // 2 + 1):
            early = await in_thread(_sizes, up)
        if number % 10 == 0 or number == bench.rounds:
            said = [one for _, one in state.asking.received]
            lost = sum(one.status != 200 or bool(one.error) for one in said)
            tell(f"round {number} of {bench.rounds}: {len(said)} answers, {lost} lost")
    await asyncio.sleep(bench.pause_s[0])  # as long as every other leader had for its streams to come back
    state.resumes.append(_told(await in_thread(up.active)))
    late = await in_thread(_sizes, up)
    return {name: {key: late[name][key] - early[name][key] for key in late[name]} for name in late if name in early}


def _told(leader: EngineSeen) -> dict[str, int]:
    """Of the streams that came back to it. An engine that keeps no such books tells none."""
    return {name: leader.facts.get(name, 0) for name in (*RESUMED, *RECOMPUTED)}


def _judge(state: _Run, unbroken: Sequence[Answer], answers: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    """`answers` are pairs, what is right and what came."""
    right = [not difference(*pair) for pair in answers]
    resumed = [good for good, (_, answer) in zip(right, answers, strict=True) if answer.resumed]
    whole = [(expected, answer) for expected, answer in answers if not answer.wrong]
    calm_s = max(max(answer.gaps_s) for answer in unbroken)
    gaps_s = _gaps_by_kill(state, [answer for _, answer in answers])
    stalls = [max(0.0, (gap_s - calm_s) * 1000) for gap_s in gaps_s]
    terms, worst, again = state.up.terms(), spread(stalls), spread(state.restored_s)
    return {
        "rounds": state.bench.rounds,
        "answers": len(answers),
        "resumed_streams": len(resumed),
        "streams_lost": len(answers) - len(whole),
        "tokens_wrong": len(whole) - sum(right),
        # Something was lost or came twice, whatever the tokens are.
        "counts_wrong": sum(len(answer.tokens) != len(expected.tokens) for expected, answer in whole),
        "resumed_identical_share": round(sum(resumed) / len(resumed), 4) if resumed else 1.0,
        **{f"stall_ms_{name}": worst[name] for name in ("p50", "p99", "max")},
        "unbroken_worst_gap_ms": round(calm_s * 1000, 1),
        "stall_ms_max_by_end": _by_end(state, stalls),
        "two_actives": len(two_leaders(terms)),
        "leaders": len(terms),
        **{name: sum(told[name] for told in state.resumes) for name in RESUMED},
        **{name: max((told[name] for told in state.resumes), default=0) for name in RECOMPUTED},
        "rounds_all_resident": sum(within_a_block(told[RECOMPUTED[0]], BLOCK_TOKENS) for told in state.resumes),
        **{f"standby_again_s_{name}": again[name] for name in ("p50", "max")},
    }


def _by_end(state: _Run, stalls: list[float]) -> dict[str, float]:
    pairs = list(zip(state.ends, stalls, strict=True))
    return {end: round(max((ms for name, ms in pairs if name == end), default=0.0), 1) for end in state.bench.ends}


def _gaps_by_kill(state: _Run, answers: Sequence[Answer]) -> list[float]:
    """For each kill the worst gap that was open at it or began before the next kill."""
    gaps = sorted(
        gap for answer in answers for gap in itertools.pairwise(answer.token_times_s) if gap[1] - gap[0] > 0.01
    )
    worst: list[float] = []
    for at_s, until_s in itertools.pairwise([*state.kills_s, float("inf")]):
        mine = [later - earlier for earlier, later in gaps if later > at_s and earlier < min(until_s, at_s + 5.0)]
        worst.append(max(mine, default=0.0))
    return worst


def _sizes(up: Supervised) -> dict[str, dict[str, int]]:
    """Descriptors, threads and private memory of everything that stays."""
    sizes: dict[str, dict[str, int]] = {}
    for name, pid in up.lasting().items():
        with contextlib.suppress(OSError):
            sizes[name] = {"fds": fd_count(pid), "threads": thread_count(pid), "anon_kib": anon_kib(pid)}
    return sizes


class FailoverOptions(CommandOptions, frozen=True):
    """End the active engine repeatedly under load: lost and wrong answers, and the pauses that clients saw."""

    rounds: Annotated[int, about("Number of times the active engine is killed.", min=1)] = 200
    streams: Annotated[int, about("Number of concurrent clients; 0: 16 with sim, 12 with torch.", min=0)] = 0
    tokens: Annotated[int, about("Tokens per answer; 0: 200 with sim, 150 with torch.", min=0)] = 0
    vault_gib: Annotated[
        float, about("sim: memory of the engine in the vault, weights and KV pool.", "GiB", min=0.01)
    ] = 0.25
    seed: Annotated[int, about("Random seed for when and how the engine is killed.")] = 1
    engine: Annotated[str, about("Engine: sim, or torch with the tiny model.", choices=("sim", "torch"))] = "sim"
    exact: Annotated[
        bool, about("torch: --exact computes independently of the batch; --fast is quicker.", flag="--exact/--fast")
    ] = True
    kv: Annotated[
        str, about("torch: KV pool in the vault, or in the engine itself (direct).", choices=("vault", "direct"))
    ] = "vault"
    json: Json = False

    def run(self, env: Environment) -> int:
        if self.engine == "torch":
            streams, tokens = self.streams or 12, self.tokens or 150
            bench = engine_bench(self.rounds, streams, tokens, seed=self.seed, exact=self.exact, kv=self.kv)
        else:
            streams, tokens = self.streams or 16, self.tokens or 200
            bench = sim_bench(self.rounds, streams, tokens, vault_gib=self.vault_gib, seed=self.seed)
        return show(run(bench, tell), self.json)


if __name__ == "__main__":
    main(FailoverOptions, "failover")
