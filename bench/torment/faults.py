"""What is done to a deployment under torment, and who its processes are."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from holdfast.testing import disks
from holdfast.testing.processes import processes_in, state_of
from holdfast.testing.supervised import Supervised

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
