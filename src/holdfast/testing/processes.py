"""Processes from outside: who there is, what each holds, and what is done to them.

They are found as the kernel shows them, by their command, their parents or the state directory in their environment: so
those that a record has lost, or that outlive their parents, are found too.
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


# -- who there is


def command_of(pid: int) -> list[str]:
    """The words of its command; none if it is over."""
    return (read_text(f"/proc/{pid}/cmdline") or "").split("\0")[:-1]


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def processes_in(folder: Path) -> dict[int, str]:
    """Pids and commands of all processes with this state directory, whoever started them; zombies have none."""
    mark = f"HOLDFAST_STATE_DIR={folder}"
    found = (pid for pid in _pids() if mark in (read_text(f"/proc/{pid}/environ") or "").split("\0"))
    return {pid: " ".join(command_of(pid)) for pid in found}


def children_of(pid: int) -> dict[int, str]:
    """Pids and commands of all descendants."""
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
    """Pid -> VAULT or KEEPER, of every process that serves this socket."""
    found: dict[int, str] = {}
    for pid in _pids():
        words = command_of(pid)
        if len(words) > 2 and words[2] in _MODULES and any(socket in word for word in words):
            found[pid] = _MODULES[words[2]]
    return found


def vault_pair(socket: str, bound_s: float) -> tuple[int, int]:
    """The vault's pid and its keeper's, once there are exactly these two."""
    found: dict[int, str] = {}

    def two() -> bool:
        found.clear()
        found.update(vault_processes(socket))
        return sorted(found.values()) == [KEEPER, VAULT]

    wait_until(two, "a vault and a keeper", bound_s, logs=lambda: f"there are {found}")
    by_role = {role: pid for pid, role in found.items()}
    return by_role[VAULT], by_role[KEEPER]


# -- what each has


def state_of(pid: int) -> str:
    """R, S, D, T, Z as the kernel has it; "" when it is over."""
    found = read_process(pid)
    return found.state if found is not None else ""


def fd_count(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def thread_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def rss_bytes(pid: int) -> int:
    return int((read_text(f"/proc/{pid}/statm") or "0 0").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def anon_kib(pid: int) -> int:
    """Its private memory."""
    lines = (read_text(f"/proc/{pid}/status") or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def cpu_ns(pid: int) -> int:
    """CPU time of all its threads, nanoseconds."""
    times = (read_text(f"{task}/schedstat") for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int(text.split()[0]) for text in times if text)


# -- what is done to them


def kill_group(pid: int) -> None:
    """SIGKILL to an engine and all its processes: each engine leads a group of its own."""
    assert os.getpgid(pid) == pid, "an engine leads its process group"
    os.killpg(pid, signal.SIGKILL)


def kill_together(pids: Iterable[int]) -> None:
    """SIGKILL in one breath: stopped first, else one sees another's end and may have started it again before its own.
    In the order given: with a keeper's end the kernel lets a stopped vault run on where SIGHUP is ignored (nohup)."""
    victims = list(pids)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, number)


def freeze(pid: int, bound_s: float = BOUND_S) -> None:
    """SIGSTOP; returns once it has stopped, which takes the signal a moment."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), f"process {pid} to stop", bound_s)


def kill_all(pids: Callable[[], Iterable[int]]) -> None:
    """SIGKILL until there is nobody left."""
    while found := list(pids()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
