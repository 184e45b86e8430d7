"""`make prove-torment`: a deployment with everything around it killed, stopped and starved, under load.

Faults come in shuffled rounds, one after the other, each when redundancy is back after the one before: an active and a
ready standby, vault, keeper, launcher and store, none of those that were hit. Meanwhile clients compare every answer
with its unbroken one. All processes run with few descriptors, on a small disk that is full for a while. With the sim
engine a control judges the workers meanwhile, and requests that fail, connections that break and known questions that
are answered wrongly are among the faults.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.torment.faults import (
    ACTIVE,
    COMMANDS,
    FULL_DISK,
    RESETS,
    SAID,
    SIGNALS,
    STANDBY,
    Fault,
    Said,
    hit,
    roles_of,
    say,
)
from bench.torment.load import ANSWER_S, Clients, Seen, learn, scripts
from holdfast.failover.journal import two_leaders
from holdfast.testing.processes import processes_in, state_of
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import wait_until
from holdfast.testing.workload import spread
from tests.rigs import small_disks

# Redundancy needs a new engine: torch is imported and the model mapped, on two cores that are busy with all the rest.
WHOLE_S = 90.0
PAUSE_S = (0.5, 2.5)
END_S = 20.0
DISK_BYTES = 48 << 20
DESCRIPTORS = 256  # of each process
CLIENTS, SCRIPTS = 8, 30
# Without a control of its own, the deployment gets one that asks often: a canary of the sim engine takes 100 ms.
OPTIONS = {
    "torch": ("--engine", "torch", "--model", "tiny", "--torch-threads", "1", "--exact", "--allow-chaos"),
    "sim": ("--engine", "sim", "--allow-chaos", "--sim-ttft-ms", "20", "--sim-tpot-ms", "10", "--controls", "0"),
}
MODELS = {"torch": "tiny", "sim": "holdfast-sim"}
LONG_ANSWER = {"torch": 0, "sim": 800}  # tokens; 8 s of the sim engine
JUDGING: dict[str, Any] = {"canary_interval_s": 2.0, "canary_share": 1.0}


@dataclass(frozen=True, slots=True)
class Torment:
    """Settings: how long, with which random choices, and what runs. The sim engine takes the faults on command."""

    seconds: float = 600.0
    seed: int = 1
    workers: int = 1
    engine: str = "torch"

    @property
    def faults(self) -> tuple[Fault | Said, ...]:
        return (*SIGNALS, *(SAID if self.engine == "sim" else RESETS))


@dataclass(slots=True)
class _Run:
    """What happens while it runs."""

    torment: Torment
    hits: list[tuple[float, str, float]] = field(default_factory=list)  # when, what, seconds until whole again
    not_whole: list[str] = field(default_factory=list)


def run(tell: Callable[[str], None], torment: Torment = Torment()) -> dict[str, Any]:  # noqa: B008 (it is frozen)
    """Everything; the result is flat, for a results file. State directories are kept where something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
    no_disk = small_disks.mount(folder, DISK_BYTES)  # it takes the right to mount a filesystem
    result: dict[str, Any] = {"met": False}
    options = (*OPTIONS[torment.engine], "--workers", str(torment.workers))
    try:
        up = Supervised(*options, folder=folder, descriptors=DESCRIPTORS, start_s=WHOLE_S)
        try:
            with up:
                if torment.engine == "sim":
                    up.start_control(**JUDGING)
                result = _under_load(_Run(torment), up, no_disk, tell)
        finally:
            left = _left_behind(folder)
        result |= {"left_behind": left, "met": result["met"] and not left}
    finally:
        if not no_disk:
            small_disks.unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _under_load(state: _Run, up: Supervised, no_disk: str, tell: Callable[[str], None]) -> dict[str, Any]:
    torment = state.torment
    asked = scripts(torment.seed, MODELS[torment.engine], SCRIPTS, LONG_ANSWER[torment.engine])
    learn(up.port, asked, torment.seed, tell)
    clients = Clients(up.port, asked, CLIENTS, torment.seed)
    clients.start()
    began_s = time.monotonic()
    for fault, number in _order(torment, no_disk):
        if time.monotonic() - began_s > torment.seconds or state.not_whole:
            break
        _one_fault(state, up, fault, number)
        tell(f"{len(state.hits)} faults, {len(clients.seen)} answers, {len(clients.wrong())} wrong: {fault.name}")
    hanging = clients.stop()
    return _judge(state, clients, hanging, up) | {"full_disk": f"never: {no_disk}" if no_disk else "in turn"}


def _order(torment: Torment, no_disk: str) -> Iterator[tuple[Fault | Said, int]]:
    """Every fault once in each round, each round in an order of its own, and each to a worker by chance."""
    rng = random.Random(torment.seed)
    faults = [fault for fault in torment.faults if fault.name != FULL_DISK or not no_disk]
    while True:
        for fault in rng.sample(faults, len(faults)):
            time.sleep(rng.uniform(*PAUSE_S))
            yield fault, rng.randint(1, torment.workers)


def _one_fault(state: _Run, up: Supervised, fault: Fault | Said, number: int) -> None:
    at_s = time.monotonic()
    pids = say(up, fault, number) if isinstance(fault, Said) else hit(up, fault, number)
    try:
        up.wait_until(lambda: whole(up, pids), f"whole deployment after {fault.name}", WHOLE_S)
    except TimeoutError as error:
        there = {role: f"{pid} {state_of(pid)}" for role, pid in roles_of(up, number).items()}
        state.not_whole.append(f"after {fault.name} of {sorted(pids)}: {there}, {up.health()}\n{error}")
    state.hits.append((at_s, fault.name, time.monotonic() - at_s))


def _judge(state: _Run, clients: Clients, hanging: list[str], up: Supervised) -> dict[str, Any]:
    wrong = clients.wrong()
    again_s = [seconds for _, _, seconds in state.hits]
    two = len(two_leaders(up.terms()))
    return {
        "faults": len(state.hits),
        "faults_by_kind": {name: sum(name == what for _, what, _ in state.hits) for _, name, _ in state.hits},
        "answers": len(clients.seen),
        "cancelled": sum(seen.kind == "cancelled" for seen in clients.seen),
        "lost_or_wrong": len(wrong),
        "hanging": len(hanging),
        "longest_answer_s": round(max((seen.ended_s - seen.began_s for seen in clients.seen), default=0.0), 1),
        "two_leaders": two,
        "whole_again_s_p50": spread(again_s)["p50"],
        "whole_again_s_max": spread(again_s)["max"],
        "not_whole": state.not_whole,
        "descriptors": DESCRIPTORS,
        "workers": state.torment.workers,
        "engine": state.torment.engine,
        "seed": state.torment.seed,
        "wrong": [_story(state, seen) for seen in wrong[:20]],
        "bound": "nothing lost, wrong or hanging, never two leaders, whole again after each fault, nothing left behind",
        "met": not (wrong or hanging or state.not_whole or two) and bool(state.hits) and len(clients.seen) > 0,
    }


def _story(state: _Run, seen: Seen) -> str:
    """A wrong answer, with what was done while it ran."""
    during = [name for at_s, name, took_s in state.hits if at_s < seen.ended_s and at_s + took_s > seen.began_s]
    took_s = seen.ended_s - seen.began_s
    return f"script {seen.script} {seen.kind}, {took_s:.1f} s of {ANSWER_S:g}, during {during}: {seen.wrong}"


def _left_behind(folder: Path) -> list[str]:
    """What still runs after the end, which may take a moment to be reaped."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not processes_in(folder), "everything to be over", END_S)
    return [f"{pid} {state_of(pid)} {words[:120]}" for pid, words in processes_in(folder).items()]


def whole(up: Supervised, hit: set[int]) -> bool:
    """Every role is there, running, and has its traffic; none of the processes that were hit is there any more."""
    over = not any(state_of(pid) not in ("", "Z") for pid in hit)
    wanted = {*COMMANDS, ACTIVE, STANDBY}
    if not (over and up.restored() and all(wanted <= roles_of(up, at + 1).keys() for at in range(up.workers))):
        return False
    health = up.health()
    serving = [worker for worker in health.get("workers", []) if worker["active"] and worker["weight"] > 0]
    return health.get("status") == "ready" and len(serving) >= up.workers
