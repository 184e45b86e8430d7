"""`holdfast bench failover`: kill the active engine again and again under continuous load, and judge what clients saw.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvloop

from holdfast.failover.journal import two_leaders
from holdfast.kv.resumes import within_a_block
from holdfast.testing.answers import Answer, difference
from holdfast.testing.clients import ask, read_answer
from holdfast.testing.load import Load, failures, spread
from holdfast.testing.place import EngineSeen
from holdfast.testing.processes import anon_kib, fd_count, kill_group, thread_count
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread

# How engines are ended.
ENDS: dict[str, Callable[[int], None]] = {
    "kill the group": kill_group,
    "kill only the parent": lambda pid: os.kill(pid, signal.SIGKILL),
    "SIGTERM": lambda pid: os.kill(pid, signal.SIGTERM),
}
WARM_ROUNDS = 5  # before growth is measured: logs, caches and arenas fill up first
BLOCK_TOKENS = 16  # of every engine's KV by default: a resumed stream that computes more again has lost a block
# What engines tell of the streams that came back to them, as counts and as the worst of one stream.
RESUMED = ("resumed_total", "resumed_resident_total", "resumed_evicted_total", "resumed_missing_total")
RECOMPUTED = ("recomputed_tokens_max", "recomputed_tokens_resident_max")


class Requests(Protocol):
    """What clients ask for, all the time."""

    @property
    def streams(self) -> int: ...

    def body(self, number: int) -> tuple[str, dict[str, Any]]:
        """The path and the body of a client's request, always the same one."""


class Bench(Protocol):
    """What is started, what is asked of it, and how often it is broken."""

    @property
    def rounds(self) -> int: ...
    @property
    def seed(self) -> int: ...

    @property
    def pause_s(self) -> tuple[float, float]:
        """Between a standby's return and the next kill: an engine that lives shorter than two seconds looks to the
        supervisor like a crash loop, and one that dies within a second of adopting (`engines.shadow.proving`) leaves KV
        that the next does not believe."""

    @property
    def ends(self) -> dict[str, int]:
        """How engines are ended, and how often of all."""

    def options(self) -> tuple[str, ...]:
        """Of `holdfast up`."""

    def load(self) -> Requests: ...


@dataclass(frozen=True, slots=True)
class FailoverBench:
    """Sim engines of two ranks."""

    rounds: int = 200
    streams: int = 16
    tokens: int = 200
    tpot_ms: float = 20.0
    vault_gib: float = 0.25
    seed: int = 1

    @property
    def pause_s(self) -> tuple[float, float]:
        return 0.8, 1.6

    @property
    def ends(self) -> dict[str, int]:
        """Mostly SIGKILL to all of it; the others must be as harmless."""
        return {"kill the group": 6, "kill only the parent": 2, "SIGTERM": 2}

    def options(self) -> tuple[str, ...]:
        return ("--sim-tpot-ms", str(self.tpot_ms), "--vault-gib", str(self.vault_gib), "--sim-ranks", "2")

    def load(self) -> Load:
        return Load(self.streams, self.tokens, self.seed)


@dataclass(slots=True)
class _Run:
    """What happens while it runs."""

    up: Supervised
    bench: Bench
    expected: dict[int, Answer] = field(default_factory=dict)
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    kills_s: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    resumes: list[dict[str, int]] = field(default_factory=list)  # by round, as the new leader tells
    restored_s: list[float] = field(default_factory=list)
    over: bool = False


def run(bench: Bench, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All rounds; the result is flat, for `--json`."""
    with Supervised(*bench.options()) as up:
        return uvloop.run(_run(_Run(up, bench), tell))


async def _run(state: _Run, tell: Callable[[str], None]) -> dict[str, Any]:
    load = state.bench.load()
    tell(f"{load.streams} streams unbroken, to know what is right")
    for number, answer in enumerate(await asyncio.gather(*(_one(state, load, n) for n in range(load.streams)))):
        state.expected[number] = answer
    async with asyncio.TaskGroup() as tasks:
        for number in range(load.streams):
            tasks.create_task(_keep_asking(state, load, number))
        sizes = await _rounds(state, tell)
    return _judge(state, *sizes)


async def _keep_asking(state: _Run, load: Requests, number: int) -> None:
    """One client, one request after another, until the rounds are over."""
    while not state.over:
        state.answers.append((number, await _one(state, load, number)))


async def _one(state: _Run, load: Requests, number: int) -> Answer:
    return read_answer(await ask(state.up.port, *load.body(number)))


async def _rounds(state: _Run, tell: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Any]]:
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
            tell(f"round {number} of {bench.rounds}: {len(state.answers)} answers, {_wrong(state)} wrong")
    await asyncio.sleep(bench.pause_s[0])  # as long as every other leader had for its streams to come back
    state.resumes.append(_told(await in_thread(up.active)))
    late = await in_thread(_sizes, up)
    state.over = True
    return early, late


def _told(leader: EngineSeen) -> dict[str, int]:
    """Of the streams that came back to it. An engine that keeps no such books tells none."""
    return {name: leader.facts.get(name, 0) for name in (*RESUMED, *RECOMPUTED)}


def _wrong(state: _Run) -> int:
    return sum(not _is_right(state, number, answer) for number, answer in state.answers)


def _is_right(state: _Run, number: int, answer: Answer) -> bool:
    return not difference(state.expected[number], answer)


def _count_wrong(state: _Run, number: int, answer: Answer) -> bool:
    """Something was lost or came twice, whatever the tokens are."""
    return bool(answer.wrong) or len(answer.tokens) != len(state.expected[number].tokens)


def _identical_share(state: _Run) -> float:
    """Of the streams that a kill went through."""
    resumed = [_is_right(state, number, answer) for number, answer in state.answers if answer.resumed]
    return round(sum(resumed) / len(resumed), 4) if resumed else 1.0


def _judge(state: _Run, early: dict[str, Any], late: dict[str, Any]) -> dict[str, Any]:
    lost = [answer for _, answer in state.answers if answer.wrong]
    calm_s = max(max(answer.gaps_s) for answer in state.expected.values())
    stalls = [max(0.0, (gap_s - calm_s) * 1000) for gap_s in _gaps_by_kill(state)]
    terms = state.up.terms()
    worst = spread(stalls)
    growth = {name: {key: late[name][key] - early[name][key] for key in late[name]} for name in late if name in early}
    return {
        "rounds": state.bench.rounds,
        "answers": len(state.answers),
        "resumed_streams": sum(answer.resumed > 0 for _, answer in state.answers),
        "streams_lost": len(lost),
        "tokens_wrong": _wrong(state) - len(lost),
        "counts_wrong": sum(_count_wrong(state, number, answer) for number, answer in state.answers) - len(lost),
        "resumed_identical_share": _identical_share(state),
        "stall_ms_p50": worst["p50"],
        "stall_ms_p99": worst["p99"],
        "stall_ms_max": worst["max"],
        "unbroken_worst_gap_ms": round(calm_s * 1000, 1),
        "stall_ms_max_by_end": _by_end(state, stalls),
        "two_actives": len(two_leaders(terms)),
        "leaders": len(terms),
        **{name: sum(told[name] for told in state.resumes) for name in RESUMED},
        **{name: max((told[name] for told in state.resumes), default=0) for name in RECOMPUTED},
        "rounds_all_resident": sum(within_a_block(told[RECOMPUTED[0]], BLOCK_TOKENS) for told in state.resumes),
        "standby_again_s_p50": spread(state.restored_s)["p50"],
        "standby_again_s_max": spread(state.restored_s)["max"],
        "growth": growth,
        "errors": failures(lost),
    }


def _by_end(state: _Run, stalls: list[float]) -> dict[str, float]:
    pairs = list(zip(state.ends, stalls, strict=True))
    return {end: round(max((ms for name, ms in pairs if name == end), default=0.0), 1) for end in state.bench.ends}


def _gaps_by_kill(state: _Run) -> list[float]:
    """For each kill the worst gap that was open at it or began before the next kill."""
    gaps = sorted(
        gap
        for _, answer in state.answers
        for gap in itertools.pairwise(answer.token_times_s)
        if gap[1] - gap[0] > 0.01
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
