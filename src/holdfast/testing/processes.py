"""Finds, inspects and kills processes from outside.

They are found in /proc, by command, parent, or the state directory in their environment. So processes that no record
names, or that outlive their parents, are found as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from holdfast.core.procfs import is_stopped, read_process, read_text
from holdfast.testing.waiting import BOUND_S, wait_until

VAULT, KEEPER = "vault", "keeper"
_MODULES = {"holdfast.memory.vault.server": VAULT, "holdfast.memory.vault.keeper": KEEPER}


# -- finding


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command; empty if it has ended."""
    return (read_text(f"/proc/{pid}/cmdline") or "").split("\0")[:-1]


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def processes_in(folder: Path) -> dict[int, str]:
    """Return pids and commands of all processes with this state directory; a zombie's command is empty."""
    mark = f"HOLDFAST_STATE_DIR={folder}"
    found = (pid for pid in _pids() if mark in (read_text(f"/proc/{pid}/environ") or "").split("\0"))
    return {pid: " ".join(command_of(pid)) for pid in found}


def children_of(pid: int) -> dict[int, str]:
    """Return pids and commands of all descendants."""
    parents: dict[int, int] = {}
    for other in _pids():
        with contextlib.suppress(IndexError):
            parents[other] = int((read_text(f"/proc/{other}/stat") or "").rpartition(")")[2].split()[1])
    found: dict[int, str] = {}
    grown = {pid}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown and child not in found}
        found |= {child: " ".join(command_of(child)) for child in grown}
    return found


def vault_processes(socket: str) -> dict[int, str]:
    """Return VAULT or KEEPER by pid, for every process that serves this socket."""
    found: dict[int, str] = {}
    for pid in _pids():
        words = command_of(pid)
        if len(words) > 2 and words[2] in _MODULES and any(socket in word for word in words):
            found[pid] = _MODULES[words[2]]
    return found


def vault_pair(socket: str, bound_s: float) -> tuple[int, int]:
    """Wait until there is exactly one vault and one keeper, and return their pids."""
    found: dict[int, str] = {}

    def two() -> bool:
        found.clear()
        found.update(vault_processes(socket))
        return sorted(found.values()) == [KEEPER, VAULT]

    wait_until(two, "a vault and a keeper", bound_s, logs=lambda: f"there are {found}")
    by_role = {role: pid for pid, role in found.items()}
    return by_role[VAULT], by_role[KEEPER]


# -- inspecting


def state_of(pid: int) -> str:
    """Return the kernel's state letter (R, S, D, T, Z); "" if the process has ended."""
    found = read_process(pid)
    return found.state if found is not None else ""


def fd_count(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def thread_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def rss_bytes(pid: int) -> int:
    return int((read_text(f"/proc/{pid}/statm") or "0 0").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def anon_kib(pid: int) -> int:
    lines = (read_text(f"/proc/{pid}/status") or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def cpu_ns(pid: int) -> int:
    times = (read_text(f"{task}/schedstat") for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int(text.split()[0]) for text in times if text)


# -- signals


def kill_group(pid: int) -> None:
    """Send SIGKILL to an engine and all its processes: each engine leads its own process group."""
    assert os.getpgid(pid) == pid, "an engine leads its process group"
    os.killpg(pid, signal.SIGKILL)


def kill_together(pids: Iterable[int]) -> None:
    """Send SIGKILL to all processes, in the given order. All are stopped first: a running one could notice that another
    has ended and restart it. When a keeper ends, the kernel lets its stopped vault run on if that ignores SIGHUP
    (nohup)."""
    victims = list(pids)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, number)


def freeze(pid: int, bound_s: float = BOUND_S) -> None:
    """Send SIGSTOP; return once the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), f"process {pid} to stop", bound_s)


def kill_all(pids: Callable[[], Iterable[int]]) -> None:
    """Send SIGKILL until no process is left."""
    while found := list(pids()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
