"""A model that its traffic sends to host memory and fetches back, again and again, beside another whose streams run.

One run: the large model is loaded and asked; left alone it goes to host memory, and what the device has in use is
looked at; asked again it comes back, and its first token is timed from the request, which is held meanwhile. All the
while the other model's streams run: their worst gap at each move is told beside their worst gap far from any.
Always true: every answer of the large model is compared with its first one; what its vault has is asked of itself.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.prove import Row, tell
from holdfast.memory.client.calls import VaultStatus, vault_status
from holdfast.spec.names import is_host
from holdfast.testing.answers import Answer, difference
from holdfast.testing.clients import ask, read_answer
from holdfast.testing.waiting import in_thread, until
from holdfast.testing.workload import Asking
from tests.rigs.fleet.fleet_rig import FleetRig
from tests.rigs.gpu.smi import DeviceMemory, device_memory, gpu_uuid

LARGE, OTHER = "large", "other"
GIB = 2**30
IDLE_S = 2.0  # without a request, until it goes
START_S = 120.0  # weights are made at the first load
MOVE_S = 60.0
ASKED_S = 6.0
CALM_S = 1.5  # of the other's streams, between two moves
TOKENS = 32
AROUND_S = 0.1  # of a move, that counts as its time
FIRST_S_MAX = 0.6
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class WakeBench:
    """What is started and asked."""

    device: str = "cuda-0"
    large: str = "random:8b"
    other: str = "random:1b"
    kv_gib: float = 16.0
    memory_gib: float = 34.0  # of the large one: its weights and its KV
    host_gib: float = 17.0
    other_memory_gib: float = 12.0
    streams: int = 16
    rounds: int = 4

    def deploy(self, model: str, kv_gib: float, memory_gib: float) -> tuple[str, ...]:
        engine = ("--engine", "torch", "--model", model, "--fast", "--kv-gib", f"{kv_gib:g}")
        threads = ("--torch-threads", "1") if is_host(self.device) else ()
        return (*engine, *threads, "--memory-gib", f"{memory_gib:g}", "--max", "1")

    def body(self, number: int) -> tuple[str, Row]:
        return _asked(OTHER, number, 1000)


def trial(device: str) -> WakeBench:
    """With the tiny model, without a GPU: to try the bench itself."""
    return WakeBench(device, "tiny", "tiny", 0.05, 0.2, 0.1, 0.2, streams=4, rounds=3)


@dataclass(slots=True)
class _Run:
    bench: WakeBench
    fleet: FleetRig
    gpu: str
    first: Answer
    rounds: list[Row] = field(default_factory=list)
    moves: list[Span] = field(default_factory=list)

    async def used_mib(self) -> int | None:
        seen: DeviceMemory = await in_thread(device_memory, self.gpu)
        return seen.used_mib

    async def once(self) -> None:
        """Move it to host memory and back."""
        hot_mib = await self.used_mib()
        warm = await self._goes()
        await asyncio.sleep(CALM_S)
        warm_mib = await self.used_mib()
        begin_s = time.perf_counter()
        received = await ask(self.fleet.port, *_asked(LARGE, 7, TOKENS))
        answer = read_answer(received)
        wait_s = answer.token_times_s[0] - received.sent_s if answer.token_times_s else MOVE_S
        self.moves.append((begin_s, begin_s + wait_s))
        self.rounds.append(
            {
                "hot_mib": hot_mib,
                "warm_mib": warm_mib,
                "device_gib": round(warm.device_bytes / GIB, 2),
                "host_gib": round(warm.host_bytes / GIB, 2),
                "first_token_s": round(wait_s, 3),
                "wrong": answer.wrong or difference(self.first, answer),
            }
        )

    async def _goes(self) -> VaultStatus:
        """Left alone, it does: what its vault says then."""
        (launch,) = (self.fleet.folder / "run").glob(f"*-{LARGE}-*-vault.launch")
        path = json.loads(launch.read_bytes())["socket_path"]
        begin_s = 0.0
        said: VaultStatus | None = None

        async def gone() -> bool:
            nonlocal said, begin_s
            said = await vault_status(path)
            if said.weights == "DEMOTING":
                begin_s = begin_s or time.perf_counter()
            return said.weights == "WARM"

        await until(gone, f"{LARGE} to be in host memory", MOVE_S)
        end_s = time.perf_counter()
        self.moves.append((begin_s or end_s, end_s))
        await until(lambda: in_thread(self._is_warm), "the fleet to know", MOVE_S, every_s=0.2)
        assert said is not None
        return said

    def _is_warm(self) -> bool:
        seen = self.fleet.model(LARGE)
        return bool(seen["warm"] == 1 and seen["hot"] == 0)


def run(bench: WakeBench, logs: list[str]) -> Row:
    """All of it; `logs` gets the ends of what all its processes logged."""
    has: dict[str, Any] = {"devices": 1, "gib": 1.0} if is_host(bench.device) else {"device": bench.device}
    gpu = gpu_uuid(bench.device)
    with FleetRig(host_gib=2 * bench.host_gib, **has) as fleet:
        try:
            return asyncio.run(_run(bench, fleet, gpu))
        finally:
            logs.append(fleet.logs(60_000))


async def _run(bench: WakeBench, fleet: FleetRig, gpu: str) -> Row:
    memory = await in_thread(device_memory, gpu)
    other = bench.deploy(bench.other, bench.kv_gib / 4, bench.other_memory_gib)
    large = bench.deploy(bench.large, bench.kv_gib, bench.memory_gib)
    scaled = ("--autoscale", "--scale-idle-s", f"{IDLE_S:g}", "--host-gib", f"{bench.host_gib:g}", "--wanted", "0")
    await in_thread(fleet.told, "deploy", OTHER, *other)
    await in_thread(fleet.told, "deploy", LARGE, *large, *scaled)
    came_s, answers = list[float](), list[Answer]()
    for model in (OTHER, LARGE, LARGE):
        # With others in its batch a GPU rounds otherwise: what it is compared with is asked when control has asked its
        # questions of the new ones, alone, as each wake's first request is.
        await asyncio.sleep(ASKED_S if len(answers) == 2 else 0)
        async with asyncio.timeout(START_S):
            received = await ask(fleet.port, *_asked(model, 7, TOKENS))
        answers.append(read_answer(received))
        if answers[-1].wrong:
            raise RuntimeError(f"{model} does not answer: {answers[-1].wrong}")
        came_s.append(answers[-1].token_times_s[0] - received.sent_s)
    state = _Run(bench, fleet, gpu, answers[-1])
    asking = Asking(fleet.port, bench)
    async with asking.all_the_time():
        for number in range(bench.rounds):
            tell(f"round {number + 1} of {bench.rounds}")
            await state.once()
        await asyncio.sleep(CALM_S)
    tell("")
    head = {"large": bench.large, "kv_gib": bench.kv_gib, "empty_mib": memory.used_mib}
    head |= {"cold_first_token_s": round(came_s[1], 1), "hot_first_token_s": round(came_s[2], 3)}
    return head | row(state.rounds, [read_answer(received) for _, received in asking.received], state.moves)


def row(rounds: Sequence[Row], others: Sequence[Answer], moves: Sequence[Span]) -> Row:
    """What they come to."""
    gaps: dict[bool, float] = {}  # the worst, at moves and far from them
    for sooner, later in (gap for one in others for gap in pairwise(one.token_times_s)):
        near = any(sooner < end + AROUND_S and later > begin - AROUND_S for begin, end in moves)
        gaps[near] = max(gaps.get(near, 0.0), later - sooner)

    firsts = sorted(one["first_token_s"] for one in rounds)
    freed = [one["hot_mib"] - one["warm_mib"] for one in rounds if one["hot_mib"] is not None]
    lost = [one.wrong for one in others if one.wrong]
    wrong = [one["wrong"] for one in rounds if one["wrong"]]
    return {
        "wakes": len(rounds),
        "first_token_s_p50": round(statistics.median(firsts), 3),
        "first_token_s_max": firsts[-1],
        "freed_mib_min": min(freed, default=None),
        "wrong": len(wrong),
        "others": len(others),
        "others_lost": len(lost),
        "others_gap_at_moves_ms": round(1000 * gaps.get(True, 0.0), 1),
        "others_gap_far_ms": round(1000 * gaps.get(False, 0.0), 1),
        "first_bad": [*wrong[:2], *lost[:2]],
        "each": list(rounds),
        "bound": f"first token within {FIRST_S_MAX:g} s of the request, the same tokens; others' answers whole",
        "met": firsts[-1] <= FIRST_S_MAX and not wrong and not lost and all(not one["device_gib"] for one in rounds),
    }


def _asked(model: str, number: int, tokens: int) -> tuple[str, Row]:
    words = {"model": model, "prompt": f"story {number}", "max_tokens": tokens, "temperature": 0, "stream": True}
    return "/v1/completions", words | {"ignore_eos": True, "return_token_ids": True}
