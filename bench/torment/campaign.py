"""`make prove-torment`: a real engine's deployment with everything around it killed, stopped and starved, under load.

Faults come in shuffled rounds, one after the other, each when redundancy is back after the one before: an active and a
ready standby, vault, keeper, launcher and store, none of those that were hit. Meanwhile clients compare every answer
with its unbroken one. All processes run with few descriptors, on a small disk that is full for a while.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.torment.faults import (
    FAULTS,
    FULL_DISK,
    Disk,
    Fault,
    census,
    hit,
    process_state,
    under_full_disk,
    who,
    whole,
)
from bench.torment.load import ANSWER_S, Clients, Seen, learn, scripts
from holdfast.failover.journal import two_leaders
from holdfast.testing.supervised import Supervised, spread

# Redundancy needs a new engine: torch is imported and the model mapped, on two cores that are busy with all the rest.
WHOLE_S = 90.0
PAUSE_S = (0.5, 2.5)
END_S = 20.0


@dataclass(frozen=True, slots=True)
class Torment:
    """How long and with what."""

    seconds: float = 600.0
    clients: int = 8
    scripts: int = 30
    seed: int = 1
    descriptors: int = 256
    faults: tuple[Fault, ...] = FAULTS

    def options(self) -> tuple[str, ...]:
        return ("--engine", "torch", "--model", "tiny", "--torch-threads", "1", "--exact")


@dataclass(slots=True)
class _Run:
    """What happens while it runs."""

    hits: list[tuple[float, str, float]] = field(default_factory=list)  # when, what, seconds until whole again
    not_whole: list[str] = field(default_factory=list)


def run(torment: Torment, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Everything; the result is flat, for a results file. State directories are kept where something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
    disk = Disk(folder)
    disk.mount()
    result: dict[str, Any] = {"met": False}
    try:
        up = Supervised(*torment.options(), folder=folder, descriptors=torment.descriptors, start_s=WHOLE_S)
        try:
            with up:
                result = _under_load(torment, up, disk, tell)
        finally:
            left = _left_behind(folder)
        result |= {"left_behind": left, "met": result["met"] and not left}
    finally:
        disk.unmount()
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _under_load(torment: Torment, up: Supervised, disk: Disk, tell: Callable[[str], None]) -> dict[str, Any]:
    asked = scripts(torment.seed, "tiny", torment.scripts)
    learn(up.port, asked, torment.seed, tell)
    clients = Clients(up.port, asked, torment.clients, torment.seed)
    clients.start()
    state = _Run()
    began_s = time.monotonic()
    for fault in _order(torment, disk):
        if time.monotonic() - began_s > torment.seconds or state.not_whole:
            break
        _one_fault(state, up, disk, fault)
        tell(f"{len(state.hits)} faults, {len(clients.seen)} answers, {len(clients.wrong())} wrong: {fault.name}")
    hanging = clients.stop()
    return _judge(torment, state, clients, hanging, up, disk)


def _order(torment: Torment, disk: Disk) -> Iterator[Fault]:
    """Every fault once in each round, each round in an order of its own."""
    rng = random.Random(torment.seed)
    faults = [fault for fault in torment.faults if fault.roles or disk.mounted]
    while True:
        for fault in rng.sample(faults, len(faults)):
            time.sleep(rng.uniform(*PAUSE_S))
            yield fault


def _one_fault(state: _Run, up: Supervised, disk: Disk, fault: Fault) -> None:
    at_s = time.monotonic()
    pids = under_full_disk(up, disk) if fault.name == FULL_DISK else hit(up, fault)
    try:
        up.wait_until(lambda: whole(up, pids), f"whole deployment after {fault.name}", WHOLE_S)
    except TimeoutError as error:
        there = {role: f"{pid} {process_state(pid)}" for role, pid in who(up).items()}
        state.not_whole.append(f"after {fault.name} of {sorted(pids)}: {there}\n{error}")
    state.hits.append((at_s, fault.name, time.monotonic() - at_s))


def _judge(
    torment: Torment, state: _Run, clients: Clients, hanging: list[str], up: Supervised, disk: Disk
) -> dict[str, Any]:
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
        "descriptors": torment.descriptors,
        "full_disk": "in turn" if disk.mounted else "never: it takes the right to mount a filesystem",
        "seed": torment.seed,
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
    until_s = time.monotonic() + END_S
    while (left := census(folder)) and time.monotonic() < until_s:
        time.sleep(0.1)
    return [f"{pid} {process_state(pid)} {words[:120]}" for pid, words in left.items()]
