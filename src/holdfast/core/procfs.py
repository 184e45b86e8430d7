"""What the kernel tells of processes and threads under /proc. Reads only; never waits.

Always true: something that is gone or hidden reads as None, never as an exception; a process name with spaces
or brackets in it never shifts a field.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

# Field 22 of /proc/<pid>/stat, counted from the state (field 3), which follows the name's closing bracket.
_START_TICKS_FIELD = 22 - 3
_FLAGS_FIELD = 9 - 3
_ARM_MODEL = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part")
_LISTEN = "0A"  # a socket's state in /proc/net/tcp
_PF_EXITING = 0x4  # of the kernel's task flags: it will never run a line of its own again


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A process's state letter, and when it started (a pid may be used again, a start never)."""

    state: str
    start_ticks: int


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """A thread's state letter, the CPU time it got and the time it stood in line for a CPU."""

    state: str
    cpu_ns: int
    run_delay_ns: int


def boot_id() -> str:
    """Differs between machines, and between two boots of one; empty where the kernel does not tell."""
    return (read_text("/proc/sys/kernel/random/boot_id") or "").strip()


def cpu_model() -> str:
    """What the first processor calls itself, by name or, on ARM, by its maker's numbers; empty where nobody tells."""
    lines = (read_text("/proc/cpuinfo") or "").split("\n\n")[0].splitlines()
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return said.get("model name") or "/".join(said[name] for name in _ARM_MODEL if name in said)


def pid_namespace() -> str:
    """Pids mean the same only within one namespace; empty where the kernel does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def read_process(pid: int) -> ProcessStat | None:
    """State and start of a process, or None if there is no such pid to be seen."""
    fields = _stat_fields(f"/proc/{pid}/stat")
    if fields is None:
        return None
    return ProcessStat(state=fields[0], start_ticks=int(fields[_START_TICKS_FIELD]))


def pid_of(pidfd: int) -> int | None:
    """The pid behind a pidfd of this process; 0: it is another namespace's, -1: it is over; None: no descriptor is
    left to look with."""
    lines = (read_text(f"/proc/self/fdinfo/{pidfd}") or "").splitlines()
    return next((int(line[4:]) for line in lines if line.startswith("Pid:")), None)


def listens(pid: int, port: int) -> bool:
    """Whether a process has a socket that TCP connections to this port may come to; who cannot be seen has none."""
    tables = [read_text(f"/proc/{pid}/net/{name}") or "" for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port}
    try:
        return any(os.readlink(entry.path) in sockets for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def is_ending(pid: int) -> bool | None:
    """Whether the process is past its last instruction, its end perhaps still under way; None: it cannot be seen."""
    fields = _stat_fields(f"/proc/{pid}/stat")
    if fields is None:
        return None
    return fields[0] in ("Z", "X") or bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING)


def is_frozen(pid: int) -> bool:
    """Is its cgroup (v2), or one above it, frozen? The old freezer shows as a thread that makes no switches."""
    mount = _cgroup2_mount()
    lines = (read_text(f"/proc/{pid}/cgroup") or "").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if mount is None or path is None:
        return False
    events = read_text(f"{mount}{path.rstrip('/')}/cgroup.events") or ""
    return "frozen 1" in events.splitlines()


@cache
def _cgroup2_mount() -> str | None:
    """Where the one cgroup v2 tree is mounted; it does not move while we run."""
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return place.split()[4]
    return None


def is_stopped(pid: int) -> bool:
    """Is it kept from running, by a signal, a debugger or its cgroup?"""
    stat = read_process(pid)
    return stat is not None and (stat.state in "Tt" or is_frozen(pid))


def read_thread(pid: int, thread: int) -> ThreadTimes | None:
    """Times of a process's thread, or None if it is gone or this kernel keeps no schedstat."""
    return _thread_times(f"/proc/{pid}/task/{thread}")


def read_main_thread(pid: int) -> ThreadTimes | None:
    """Times of the first thread of a process, or None as above."""
    return _thread_times(f"/proc/{pid}")


def _thread_times(place: str) -> ThreadTimes | None:
    fields = _stat_fields(f"{place}/stat")
    times = (read_text(f"{place}/schedstat") or "").split()
    if fields is None or len(times) < 2:
        return None
    return ThreadTimes(state=fields[0], cpu_ns=int(times[0]), run_delay_ns=int(times[1]))


def read_text(path: str) -> str | None:
    """A small file's text, or None if it cannot be read (gone, hidden, or not kept by this kernel)."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _stat_fields(path: str) -> list[str] | None:
    """The fields from the state on; the name before it may hold anything, so its *last* bracket counts."""
    fields = (read_text(path) or "").rpartition(")")[2].split()
    return fields if len(fields) > _START_TICKS_FIELD else None
