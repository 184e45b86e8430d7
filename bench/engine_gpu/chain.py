"""A chain of kills under load: what clients see of each.

`holdfast up` with a torch or vllm engine, standbys started ahead, streams with long prompts. First the same requests
unbroken; then, again and again, SIGKILL to the active engine's group. Always true: a kill comes only while a standby is
ready, every stream decodes and the leader has led for a while; around it none is asked anything, so that no question
delays what is measured; every kill is written down as soon as it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

import uvloop

from bench.engine_gpu.words import Keep, Kill, Row, chain_row, prompt_ids, takeover_marks
from holdfast.core.errors import UserError
from holdfast.failover.journal import two_leaders
from holdfast.spec.names import is_host
from holdfast.testing.answers import Answer
from holdfast.testing.clients import read_answer
from holdfast.testing.processes import kill_group
from holdfast.testing.rig import EngineSeen
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread, until
from holdfast.testing.workload import Asking, failures
from tests.rigs.gpu.smi import device_memory, gpu_uuid

NAME = "bench"  # what the model is served as
POLL_S = 0.25  # seldom enough that asking four status pages is no load
SEEN, LEFT = 16, 200  # tokens a stream has had before a kill, and has before it: seconds, beside a takeover's tenths
AFTER = 32  # tokens of every stream after a kill, until it is over for clients
AFTER_S = 60.0  # for those; streams are held for 30 s and then failed by name
# A leader's word that its KV may be believed comes a second after its takeover, and one that dies younger than two
# seconds looks to the supervisor like a crash (`engines.host.proving`, `supervise.machine`).
SETTLED_S = 2.5
AHEAD_S = 45.0  # for all standbys to be ready again, so that no start disturbs the next kill; then one is enough
STANDBY_S = 120.0  # for one: the supervisor's own bound of a start
LOG_CHARS = 100_000
ENDS_S = 40.0  # kept for the last answers' ends: 2,000 tokens at 15 ms and some
FENCE_S = 5.0  # the GPU fence's mark comes within half a second (facts 4a)
TOKENS = re.compile(rb'"token_ids":\[\d')  # in every chunk that brings some

# What clients ask for, in turn. `plain` draws inside the step's graph; every other kind of row takes another path to
# its token (facts 44), and a takeover must survive all of them in one batch.
SAMPLING: dict[str, tuple[Row, ...]] = {
    "plain": ({"temperature": 0}, {"temperature": 0.8}),
    "mixed": (
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "logit_bias": {"1000": -5, "1001": 5}},
    ),
}


@dataclass(frozen=True, slots=True)
class ChainBench:
    """What is started, asked and killed."""

    model: str = "random:8b"
    engine: str = "torch"
    device: str = "cuda-0"
    streams: int = 32
    kills: int = 10
    prompt: int = 2000
    tokens: int = 2000
    standbys: int = 2
    kv_gib: float = 40.0
    start_s: float = 300.0  # weights are made at the first load
    limit_s: float = 480.0  # for all: a GPU is lent for minutes
    sampling: str = "plain"  # of SAMPLING
    ahead_s: float = AHEAD_S  # how long all standbys are waited for before the next kill
    up: str = ""  # other words for `holdfast up`

    def options(self) -> tuple[str, ...]:
        host = is_host(self.device)
        device = ("--device", "cpu" if host else self.device)
        sizes = ["--kv-gib", f"{self.kv_gib:g}", "--standbys", str(self.standbys)]
        # A canary rides beside the streams after a takeover: without a place of its own one of them would wait for it.
        if self.streams >= (32 if host else 64):
            sizes += ["--streams-max", str(self.streams + 1)]
        what = ["--engine", self.engine, "--model", self.model, "--served-name", NAME]
        what += ["--fast"] if self.engine == "torch" else []
        return (*what, *device, *sizes, *self.up.split())

    def body(self, number: int) -> tuple[str, Row]:
        kinds = SAMPLING[self.sampling]
        return "/v1/completions", {
            "model": NAME,
            "prompt": prompt_ids(number, self.prompt),
            "max_tokens": self.tokens,
            "seed": 1000 + number,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            **kinds[number % len(kinds)],
        }


@dataclass(slots=True)
class _Run:
    bench: ChainBench
    up: Supervised
    asking: Asking
    gpu: str
    keep: Keep
    deadline_s: float
    head: Row
    kills: list[Kill] = field(default_factory=list)
    spans_s: list[tuple[float, float]] = field(default_factory=list)  # of each: the kill, and when it was over

    def row(self, answers: Sequence[tuple[Answer, Answer]]) -> Row:
        each = [asdict(kill) for kill in self.kills]
        return self.head | chain_row(self.kills, answers, self.bench.kills) | {"each": each}

    def pieces(self) -> list[list[tuple[float, bytes]]]:
        """What has come of every answer under way: a piece a token, as a rule."""
        return [client.received.pieces for client in self.asking.open.values()]

    def decoding(self) -> bool:
        return in_their_middle([len(pieces) for pieces in self.pieces()], self.bench.tokens)

    def moved_on(self, since_s: float) -> bool:
        return all(len(pieces) >= AFTER and pieces[-AFTER][0] > since_s for pieces in self.pieces())


def in_their_middle(counts: Sequence[int], tokens: int) -> bool:
    """Whether streams that have so many tokens of an answer have all begun it, and none is near its end."""
    return all(SEEN <= count <= tokens - LEFT for count in counts)


def run(bench: ChainBench, keep: Keep) -> Row:
    """All of it; `keep` hears the row as it grows."""
    began_s = time.monotonic()
    gpu = gpu_uuid(bench.device)
    with Supervised(*bench.options(), start_s=bench.start_s) as up:
        head: Row = {"engine": bench.engine, "model": bench.model, "streams": bench.streams}
        head |= {"prompt_tokens": bench.prompt, "answer_tokens": bench.tokens, "standbys": bench.standbys}
        head["sampling"] = bench.sampling
        head["start_s"] = round(time.monotonic() - began_s, 1)
        state = _Run(bench, up, Asking(up.port, bench), gpu, keep, began_s + bench.limit_s, head)
        try:
            return uvloop.run(_run(state))
        finally:
            keep.log(up.logs(LOG_CHARS))


async def _run(state: _Run) -> Row:
    head, asking = state.head, state.asking
    await _standbys(state, state.bench.standbys, STANDBY_S)
    # What the device holds with all engines ready. A process may be charged for the vault's pages that it maps.
    memory = await in_thread(device_memory, state.gpu)
    states = {engine.pid: engine.state for engine in await in_thread(state.up.engines)}
    head |= {"kv_gib": state.bench.kv_gib} | memory.facts(states)
    state.keep(head)
    async with asyncio.timeout(state.deadline_s - time.monotonic()):
        received = await asking.once()
    expected = [read_answer(one) for one in received]
    if wrong := failures(expected):
        raise UserError(f"an unbroken answer failed: {wrong[0]}")
    gaps_s = [gap_s for answer in expected for gap_s in answer.gaps_s]
    head["unbroken_worst_gap_ms"] = round(max(gaps_s) * 1000, 2)
    head["unbroken_step_ms_p50"] = round(statistics.median(gaps_s) * 1000, 2)
    head["unbroken_first_token_s_max"] = round(max(one.first_s for one in received), 2)
    state.keep(head)
    stopped = ""
    async with asking.all_the_time(state.deadline_s):
        try:
            await _kills(state)
        except TimeoutError as error:
            stopped = str(error)[-1500:] or "the time was over"
    answers = [(expected[number], read_answer(one)) for number, one in asking.received]
    _add_calm_gaps(state, [answer for _, answer in answers])
    row = state.row(answers) | {"unfinished": asking.unfinished, "stopped": stopped}
    terms = state.up.terms()
    row |= {"errors": failures(answer for _, answer in answers), "two_leaders": len(two_leaders(terms))}
    # Every leadership but the last was ended by a kill of ours; one more means that an engine ended by itself.
    row["ended_by_themselves"] = len(terms) - 1 - len(state.kills)
    row["met"] = row["met"] and not (row["two_leaders"] or row["ended_by_themselves"] or stopped)
    state.keep(row)
    return row


# -- kills


async def _kills(state: _Run) -> None:
    for number in range(1, state.bench.kills + 1):
        if time.monotonic() > state.deadline_s - ENDS_S:
            raise TimeoutError(f"the time was over after {number - 1} kills")
        ready = await _standbys(state, 1, STANDBY_S)
        if not ready:
            raise TimeoutError("no standby was ready")
        await asyncio.sleep(SETTLED_S)
        kill = await _kill(state, ready)
        state.kills.append(kill)
        shown = {key: value for key, value in asdict(kill).items() if value is not None}
        print(f"kill {number} of {state.bench.kills}: {json.dumps(shown)}", file=sys.stderr, flush=True)
        state.keep(state.row([]) | {"met": False, "stopped": "under way"})


async def _kill(state: _Run, ready: int) -> Kill:
    await _until(state, state.decoding, "all streams to decode")
    active = await in_thread(state.up.active)
    before = await in_thread(device_memory, state.gpu)
    await _until(state, state.decoding, "all streams to decode")
    killed_s = time.monotonic()
    kill_group(active.pid)
    await _until(state, lambda: state.moved_on(killed_s), "every stream to go on after a kill")
    state.spans_s.append((killed_s, time.monotonic()))
    gap_ms = round(max(worst_gap_s(pieces, killed_s) for pieces in state.pieces()) * 1000, 2)
    leader = await _leader(state, active.pid)
    dead = await in_thread(device_memory, state.gpu)
    failover = leader.facts.get("failover") or {}
    again = await _standbys(state, ready, state.bench.ahead_s)
    again_s = round(time.monotonic() - killed_s, 1) if again else None
    after = await in_thread(device_memory, state.gpu)
    return Kill(
        gap_ms,
        None,
        takeover_marks(failover, killed_s),
        leader.facts["recomputed_tokens_max"],
        ready,
        blocks=failover.get("blocks"),
        why_empty=failover.get("why_empty") or "",
        standby_again_s=again_s,
        freed_mib=before.over(dead),
        standby_mib=after.over(dead) if again else None,
    )


async def _leader(state: _Run, but_not: int) -> EngineSeen:
    """The new one, once its timeline is whole; on a host device there may be no last mark, and the bound passes."""
    seen: list[EngineSeen] = []

    async def whole() -> bool:
        leader = await in_thread(state.up.engine, "active")
        if leader is not None and leader.pid != but_not:
            seen.append(leader)
        return bool(seen) and "gpu_fence_ms" in (seen[-1].facts.get("failover") or {})

    with contextlib.suppress(TimeoutError):
        await until(whole, "a new leader's timeline", FENCE_S, every_s=POLL_S)
    if not seen:
        raise TimeoutError("no engine leads after a kill")
    return seen[-1]


async def _standbys(state: _Run, wanted: int, within_s: float) -> int:
    """Wait until so many are ready beside an active; how many are, 0 if that took too long."""

    async def ready() -> int:
        engines = await in_thread(state.up.engines)
        count = sum(bool(engine.state == "standby" and engine.facts["ready"]) for engine in engines)
        return count if count >= wanted and any(engine.state == "active" for engine in engines) else 0

    left_s = min(within_s, state.deadline_s - time.monotonic())
    try:
        return int(await until(ready, "standbys", left_s, every_s=POLL_S))
    except TimeoutError:
        return 0


async def _until(state: _Run, true: Callable[[], bool], what: str) -> None:
    left_s = state.deadline_s - time.monotonic()
    try:
        await until(true, what, max(0.0, min(AFTER_S, left_s)))  # its own streams are looked at, no process is asked
    except TimeoutError as error:
        raise TimeoutError(f"{error}; pieces {[len(pieces) for pieces in state.pieces()]}") from None


# -- figures


def worst_gap_s(pieces: Sequence[tuple[float, bytes]], since_s: float) -> float:
    """Return the worst gap between two pieces with tokens, from the last one before `since_s` on. Comments do not
    count."""
    times_s: list[float] = []
    for at_s, data in reversed(pieces):
        if TOKENS.search(data):
            times_s.append(at_s)
            if at_s < since_s:
                break
    return max((later - earlier for later, earlier in pairwise(times_s)), default=0.0)


def _add_calm_gaps(state: _Run, answers: Sequence[Answer]) -> None:
    """The worst gaps that ended after one kill was over and before the next came."""
    gaps = [gap for answer in answers for gap in pairwise(answer.token_times_s)]
    over_s = 0.0
    for place, (killed_s, next_over_s) in enumerate(state.spans_s[: len(state.kills)]):
        worst_s = max((later - earlier for earlier, later in gaps if over_s < later <= killed_s), default=0.0)
        state.kills[place] = replace(state.kills[place], calm_gap_ms=round(worst_s * 1000, 2))
        over_s = next_over_s
