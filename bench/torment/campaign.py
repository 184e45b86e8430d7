"""`make prove-torment`: a real engine's deployment with everything around it killed, stopped and starved, under load.

Faults come in shuffled rounds, one after the other, each when redundancy is back after the one before: an active and a
ready standby, vault, keeper, launcher and store, none of those that were hit. Meanwhile clients compare every answer
with its unbroken one. All processes run with few descriptors, on a small disk that is full for a while.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.torment.load import ANSWER_S, Clients, Seen, learn, scripts
from holdfast.failover.journal import two_leaders
from holdfast.testing import disks
from holdfast.testing.load import spread
from holdfast.testing.processes import processes_in, state_of
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import wait_until

# Redundancy needs a new engine: torch is imported and the model mapped, on two cores that are busy with all the rest.
WHOLE_S = 90.0
PAUSE_S = (0.5, 2.5)
END_S = 20.0
DISK_BYTES = 48 << 20
DESCRIPTORS = 256  # of each process
CLIENTS, SCRIPTS = 8, 30
OPTIONS = ("--engine", "torch", "--model", "tiny", "--torch-threads", "1", "--exact")


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# What a role's command holds. Engines are told apart by what they say of themselves.
COMMANDS = {
    "store": "holdfast.roles store",
    "launcher": "holdfast.roles vault",
    "keeper": "-m holdfast.memory.vault.keeper ",
    "vault": "-m holdfast.memory.vault.server ",
}
FULL_DISK_S = 20.0
FULL_DISK = "full disk"



@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to some roles at once; with no roles, a full disk under which the active engine is killed."""

    roles: tuple[str, ...]
    signal: signal.Signals = KILL

    @property
    def name(self) -> str:
        return f"{self.signal.name} {' + '.join(self.roles)}" if self.roles else FULL_DISK


FAULTS = (
    *(
        Fault(roles, number)
        for roles in (
            ("active",), ("standby",), ("vault",), ("keeper",), ("store",), ("launcher",),
            ("vault", "active"), ("keeper", "active"),
        )
        for number in (KILL, STOP)
    ),
    Fault(()),
)  # fmt: skip


@dataclass(slots=True)
class _Run:
    """What happens while it runs."""

    seconds: float
    seed: int
    hits: list[tuple[float, str, float]] = field(default_factory=list)  # when, what, seconds until whole again
    not_whole: list[str] = field(default_factory=list)


def run(tell: Callable[[str], None], seconds: float = 600.0, seed: int = 1) -> dict[str, Any]:
    """Everything; the result is flat, for a results file. State directories are kept where something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
    no_disk = disks.mount(folder, DISK_BYTES)  # it takes the right to mount a filesystem
    result: dict[str, Any] = {"met": False}
    try:
        up = Supervised(*OPTIONS, folder=folder, descriptors=DESCRIPTORS, start_s=WHOLE_S)
        try:
            with up:
                result = _under_load(_Run(seconds, seed), up, no_disk, tell)
        finally:
            left = _left_behind(folder)
        result |= {"left_behind": left, "met": result["met"] and not left}
    finally:
        if not no_disk:
            disks.unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _under_load(state: _Run, up: Supervised, no_disk: str, tell: Callable[[str], None]) -> dict[str, Any]:
    asked = scripts(state.seed, "tiny", SCRIPTS)
    learn(up.port, asked, state.seed, tell)
    clients = Clients(up.port, asked, CLIENTS, state.seed)
    clients.start()
    began_s = time.monotonic()
    for fault in _order(state.seed, no_disk):
        if time.monotonic() - began_s > state.seconds or state.not_whole:
            break
        _one_fault(state, up, fault)
        tell(f"{len(state.hits)} faults, {len(clients.seen)} answers, {len(clients.wrong())} wrong: {fault.name}")
    hanging = clients.stop()
    return _judge(state, clients, hanging, up) | {"full_disk": f"never: {no_disk}" if no_disk else "in turn"}


def _order(seed: int, no_disk: str) -> Iterator[Fault]:
    """Every fault once in each round, each round in an order of its own."""
    rng = random.Random(seed)
    faults = [fault for fault in FAULTS if fault.roles or not no_disk]
    while True:
        for fault in rng.sample(faults, len(faults)):
            time.sleep(rng.uniform(*PAUSE_S))
            yield fault


def _one_fault(state: _Run, up: Supervised, fault: Fault) -> None:
    at_s = time.monotonic()
    pids = under_full_disk(up) if fault.name == FULL_DISK else hit(up, fault)
    try:
        up.wait_until(lambda: whole(up, pids), f"whole deployment after {fault.name}", WHOLE_S)
    except TimeoutError as error:
        there = {role: f"{pid} {state_of(pid)}" for role, pid in who(up).items()}
        state.not_whole.append(f"after {fault.name} of {sorted(pids)}: {there}\n{error}")
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
        "seed": state.seed,
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


# -- what is done, and who is there


def who(up: Supervised) -> dict[str, int]:
    """The pid of every role that is there; an engine only if it answers."""
    roles = {
        role: pid
        for pid, words in processes_in(up.folder).items()
        for role, command in COMMANDS.items()
        if command in words.split(" -- ")[0]
    }
    for engine in up.engines():
        if engine.state == "active" or (engine.state == "standby" and engine.facts["ready"]):
            roles[engine.state] = engine.pid
    return roles


def whole(up: Supervised, hit: set[int]) -> bool:
    """Every role is there, running, and none of the processes that were hit is any more."""
    roles = who(up)
    wanted = {*COMMANDS, "active", "standby"}
    over = not any(state_of(pid) not in ("", "Z") for pid in hit)
    return over and wanted <= roles.keys() and up.restored() and up.health().get("status") == "ready"


def hit(up: Supervised, fault: Fault) -> set[int]:
    """Do it; the pids that must be over afterwards."""
    roles = who(up)
    pids = [roles[role] for role in fault.roles or ("active",)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, fault.signal) if os.getpgid(pid) == pid and _leads_alone(pid, roles) else os.kill(
                pid, fault.signal
            )
    return set(pids)


def _leads_alone(pid: int, roles: dict[str, int]) -> bool:
    """An engine's group is the engine; a keeper's group has the vault in it, which is another role."""
    return pid in (roles.get("active"), roles.get("standby"))


def under_full_disk(up: Supervised) -> set[int]:
    """The disk is full for a while; in the middle of it the active engine is killed."""
    until_s = time.monotonic() + FULL_DISK_S
    gone: set[int] = set()
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            disks.fill(up.folder)
            if left_s < FULL_DISK_S * 0.75 and not gone:
                gone = hit(up, Fault(("active",)))
            time.sleep(min(0.5, left_s))
    finally:
        disks.make_room(up.folder)
    return gone
