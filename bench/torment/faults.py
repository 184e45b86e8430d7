"""What is done to a deployment under torment, and who its processes are.

Processes are found by the state directory in their environment and by their command, as the kernel shows them: so those
that a record has lost, or that outlive their parents, are found too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.testing.supervised import Supervised

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# What a role's command holds. Engines are told apart by what they say of themselves.
COMMANDS = {
    "store": "holdfast.cli.child store",
    "launcher": "holdfast.cli.child vault",
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


def census(folder: Path) -> dict[int, str]:
    """Pids and commands of every process with this state directory, zombies left out."""
    mark = f"HOLDFAST_STATE_DIR={folder}".encode()
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def process_state(pid: int) -> str:
    """R, S, D, T, Z as the kernel has it; "" when it is over."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def who(up: Supervised) -> dict[str, int]:
    """The pid of every role that is there; an engine only if it answers."""
    roles = {
        role: pid
        for pid, words in census(up.folder).items()
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
    over = not any(process_state(pid) not in ("", "Z") for pid in hit)
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


class Disk:
    """A small filesystem of its own for a state directory, that can be full. Needs the right to mount."""

    OPTIONS = b"size=48m,mode=700"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.mounted = False

    def mount(self) -> bool:
        done = self._libc.mount(b"tmpfs", str(self._folder).encode(), b"tmpfs", 0, self.OPTIONS)
        self.mounted = done == 0
        return self.mounted

    def unmount(self) -> None:
        if self.mounted:
            self._libc.umount2(str(self._folder).encode(), 2)  # MNT_DETACH: whoever still looks does not keep it
            self.mounted = False

    def fill(self) -> None:
        """To the last byte, and again: what others free meanwhile is taken too."""
        block = bytes(1 << 16)
        fd = os.open(self._folder / "full", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            for size in (len(block), 4096, 1):
                with contextlib.suppress(OSError):
                    while os.write(fd, block[:size]):
                        pass
        finally:
            os.close(fd)

    def free(self) -> None:
        (self._folder / "full").unlink(missing_ok=True)


def under_full_disk(up: Supervised, disk: Disk) -> set[int]:
    """The disk is full for a while; in the middle of it the active engine is killed."""
    until_s = time.monotonic() + FULL_DISK_S
    gone: set[int] = set()
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            disk.fill()
            if left_s < FULL_DISK_S * 0.75 and not gone:
                gone = hit(up, Fault(("active",)))
            time.sleep(min(0.5, left_s))
    finally:
        disk.free()
    return gone
