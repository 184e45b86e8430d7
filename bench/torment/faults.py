"""Defines the faults of `make prove-torment`, and what of a deployment each one hits.

Signals go to the processes of one worker, or to the store; `full disk` fills the disk under all of them. The faults on
command (`SAID`) leave every answer right: requests fail, connections break, and known questions are answered wrongly.
They need the sim engine, but for the resets, which the torch engine takes too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.testing.processes import processes_in
from holdfast.testing.supervised import Supervised
from tests.rigs import small_disks

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FULL_DISK_S = 20.0
FULL_DISK = "full disk"
ACTIVE, STANDBY = "active", "standby"
# What a role's command holds, and what tells one worker's from another's. Engines name themselves.
COMMANDS = {
    "store": ("holdfast.roles store", ""),
    "launcher": ("holdfast.roles vault", "/vault-{}.launch"),
    "keeper": ("-m holdfast.memory.vault.keeper ", '"device":"host-{}"'),
    "vault": ("-m holdfast.memory.vault.server ", '"device":"host-{}"'),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to some roles of a worker at once; no roles: a full disk under which its active engine is killed."""

    roles: tuple[str, ...]
    signal: signal.Signals = KILL

    @property
    def name(self) -> str:
        return f"{self.signal.name} {' + '.join(self.roles)}" if self.roles else FULL_DISK


@dataclass(frozen=True, slots=True)
class Said:
    """A fault commanded over the chaos socket, to engines of one worker or of all; then a signal, if it has one."""

    name: str
    sim: Mapping[str, Any]
    roles: tuple[str, ...] = (ACTIVE,)
    everywhere: bool = False
    times: int = 1
    every_s: float = 1.0
    hold_s: float = 0.0  # how long it stays before it is cleared; 0: it is over at once
    then: Fault | None = field(default=None)


SIGNALS: tuple[Fault, ...] = (
    *(
        Fault(roles, number)
        for roles in (
            (ACTIVE,), (STANDBY,), ("vault",), ("keeper",), ("store",), ("launcher",),
            ("vault", ACTIVE), ("keeper", ACTIVE),
        )
        for number in (KILL, STOP)
    ),
    Fault(()),
)  # fmt: skip

# Three within 12 s open a breaker by its default settings.
RESETS: tuple[Said, ...] = (
    Said("connections reset 3 times", {"fault": "reset"}, times=3, every_s=3.0),
    Said("all connections reset 3 times", {"fault": "reset"}, everywhere=True, times=3, every_s=3.0),
)
SAID: tuple[Said, ...] = (
    *RESETS,
    Said("1 of 3 requests fails", {"fault": "error_every", "every": 3}, hold_s=5.0),
    Said("1 of 3 requests fails everywhere", {"fault": "error_every", "every": 3}, everywhere=True, hold_s=5.0),
    Said("running streams fail", {"fault": "error_after", "tokens": 2}),
    Said("running streams vanish", {"fault": "cut"}),
    Said("false canaries", {"fault": "wrong_canaries"}, hold_s=10.0),
    Said("false canaries everywhere", {"fault": "wrong_canaries"}, (ACTIVE, STANDBY), everywhere=True, hold_s=10.0),
    Said("false proof", {"fault": "wrong_proofs", "times": 1}, (STANDBY,), then=Fault((ACTIVE,))),
)


# -- what is there


def roles_of(up: Supervised, number: int) -> dict[str, int]:
    """The pid of every role of a worker that is there, and of the store; an engine only if it answers."""
    roles = {
        role: pid
        for pid, words in processes_in(up.folder).items()
        for role, (command, mark) in COMMANDS.items()
        if command in words.split(" -- ")[0] and mark.format(number) in words
    }
    for engine in up.engines():
        is_ready = engine.state == ACTIVE or (engine.state == STANDBY and engine.facts["ready"])
        if is_ready and engine.facts["group"] == f"worker-{number}":
            roles[engine.state] = engine.pid
    return roles


# -- what is done


def hit(up: Supervised, fault: Fault, number: int) -> set[int]:
    """Send the signal; return the pids that must be over afterwards."""
    if fault.name == FULL_DISK:
        return _under_full_disk(up, number)
    roles = roles_of(up, number)
    pids = [roles[role] for role in fault.roles]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            # An engine's group is the engine; a keeper's group has the vault in it, which is another role.
            is_group = os.getpgid(pid) == pid and pid in (roles.get(ACTIVE), roles.get(STANDBY))
            os.killpg(pid, fault.signal) if is_group else os.kill(pid, fault.signal)
    return set(pids)


def say(up: Supervised, fault: Said, number: int) -> set[int]:
    """Command the fault and take it back; return the pids that must be over afterwards."""
    numbers = range(1, up.workers + 1) if fault.everywhere else (number,)
    names = [engine.name for engine in up.engines() if _is_meant(engine.facts["group"], engine.state, fault, numbers)]
    command = dict(fault.sim)
    kind = command.pop("fault")
    for turn in range(fault.times):
        if turn:
            time.sleep(fault.every_s)
        for name in names:
            _order(up, name, kind, command)
    gone = hit(up, fault.then, number) if fault.then is not None else set()
    if fault.hold_s:
        time.sleep(fault.hold_s)
        for name in names:
            _order(up, name, "clear", {})
    return gone


def _is_meant(group: str, state: str, fault: Said, numbers: range | tuple[int, ...]) -> bool:
    return state in fault.roles and group in {f"worker-{number}" for number in numbers}


def _order(up: Supervised, name: str, kind: str, values: dict[str, Any]) -> None:
    """An engine that a check has ended meanwhile does not answer; what became of it is judged by the answers."""
    with contextlib.suppress(OSError):
        up.chaos(name, kind, **values)


def _under_full_disk(up: Supervised, number: int) -> set[int]:
    """The disk is full for a while; in the middle of it the active engine is killed."""
    until_s = time.monotonic() + FULL_DISK_S
    gone: set[int] = set()
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            small_disks.fill(up.folder)
            if left_s < FULL_DISK_S * 0.75 and not gone:
                gone = hit(up, Fault((ACTIVE,)), number)
            time.sleep(min(0.5, left_s))
    finally:
        small_disks.make_room(up.folder)
    return gone
