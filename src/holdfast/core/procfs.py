"""Reads from the kernel (/proc): processes, threads, and the users of local connections. Never waits.

Always true: what is gone or hidden reads as None, never as an exception; a process name with spaces or brackets never
shifts a field; the user of an unknown peer is None.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
from dataclasses import dataclass
from functools import cache

# Field 22 of /proc/<pid>/stat, counted from the state (field 3), which follows the name's closing bracket.
_START_TICKS_FIELD = 22 - 3
_FLAGS_FIELD = 9 - 3
_ARM_MODEL = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part")
_LISTEN = "0A"  # a socket's state in /proc/net/tcp
_CREDENTIALS = struct.Struct("3i")  # of a Unix socket's peer: pid, uid, gid
_PF_EXITING = 0x4  # of the kernel's task flags: the process will never run user code again


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A process's state letter and start time; together with the start time a pid is unique."""

    state: str
    start_ticks: int


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """A thread's state letter, the CPU time it used, and the time it was runnable but waited for a CPU."""

    state: str
    cpu_ns: int
    run_delay_ns: int


def boot_id() -> str:
    """Return an id that differs between machines and between boots; "" if the kernel does not have it."""
    return (read_text("/proc/sys/kernel/random/boot_id") or "").strip()


def cpu_model() -> str:
    """Return the first processor's name or, on ARM, its maker's numbers; empty if unknown."""
    lines = (read_text("/proc/cpuinfo") or "").split("\n\n")[0].splitlines()
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return said.get("model name") or "/".join(said[name] for name in _ARM_MODEL if name in said)


def pid_namespace() -> str:
    """Return this process's pid namespace, within which pids are unique; "" if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def read_process(pid: int) -> ProcessStat | None:
    """Return a process's state and start, or None if no such pid is visible."""
    fields = _stat_fields(f"/proc/{pid}/stat")
    if fields is None:
        return None
    return ProcessStat(state=fields[0], start_ticks=int(fields[_START_TICKS_FIELD]))


def pid_of(pidfd: int) -> int | None:
    """Return the pid of a pidfd: 0 if it is in another namespace, -1 if the process has ended, None if there is no free
    descriptor to read it with."""
    lines = (read_text(f"/proc/self/fdinfo/{pidfd}") or "").splitlines()
    return next((int(line[4:]) for line in lines if line.startswith("Pid:")), None)


def is_over(pidfd: int) -> bool:
    """Return True if the process has ended, and with it the work it had queued on a GPU (facts 1)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def listens(pid: int, port: int) -> bool:
    """Return True if a process listens for TCP connections to this port; False if its sockets cannot be seen."""
    tables = [read_text(f"/proc/{pid}/net/{name}") or "" for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port}
    try:
        return any(os.readlink(entry.path) in sockets for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def is_ending(pid: int) -> bool | None:
    """Return whether the process runs no more user code, even if the kernel is still ending it; None if it is not
    visible."""
    fields = _stat_fields(f"/proc/{pid}/stat")
    if fields is None:
        return None
    return fields[0] in ("Z", "X") or bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING)


def is_frozen(pid: int) -> bool:
    """Return whether the process's cgroup (v2), or a parent of it, is frozen. The v1 freezer is not detected here: it
    shows as a thread without context switches."""
    mount = _cgroup2_mount()
    lines = (read_text(f"/proc/{pid}/cgroup") or "").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if mount is None or path is None:
        return False
    events = read_text(f"{mount}{path.rstrip('/')}/cgroup.events") or ""
    return "frozen 1" in events.splitlines()


@cache
def _cgroup2_mount() -> str | None:
    """Return the mount point of cgroup v2, which does not change while we run; None if there is none."""
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return mount.split()[4]
    return None


def is_stopped(pid: int) -> bool:
    """Return whether a signal, a debugger or its cgroup keeps the process from running."""
    stat = read_process(pid)
    return stat is not None and (stat.state in "Tt" or is_frozen(pid))


def read_thread(pid: int, thread: int) -> ThreadTimes | None:
    """Return a thread's times, or None if it is gone or this kernel has no schedstat."""
    return _thread_times(f"/proc/{pid}/task/{thread}")


def read_main_thread(pid: int) -> ThreadTimes | None:
    return _thread_times(f"/proc/{pid}")


def _thread_times(folder: str) -> ThreadTimes | None:
    fields = _stat_fields(f"{folder}/stat")
    times = (read_text(f"{folder}/schedstat") or "").split()
    if fields is None or len(times) < 2:
        return None
    return ThreadTimes(state=fields[0], cpu_ns=int(times[0]), run_delay_ns=int(times[1]))


def read_text(path: str) -> str | None:
    """Return a small file's text, or None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _stat_fields(path: str) -> list[str] | None:
    """Return the fields from the state on. The name before it may contain anything, so the *last* bracket ends it."""
    fields = (read_text(path) or "").rpartition(")")[2].split()
    return fields if len(fields) > _START_TICKS_FIELD else None


def peer_uid(sock: socket.socket | None) -> int | None:
    """Return the peer's uid. For a Unix socket: the user that connected, or that listens. For a TCP connection within
    this machine: the owner of its other end. None: another machine's, or another network namespace's."""
    if sock is None:
        return None
    if sock.family == socket.AF_UNIX:
        return int(_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])
    try:
        ours, theirs = sock.getsockname()[:2], sock.getpeername()[:2]
    except OSError:
        return None
    return _tcp_uid(theirs, ours, 6 if sock.family == socket.AF_INET6 else 4)


def _tcp_uid(local: tuple[str, int], remote: tuple[str, int], version: int) -> int | None:
    """Return the owner of the other end: the kernel lists every TCP socket of this namespace, and we look for the one
    with our address as its remote. An IPv4 client of a socket that serves both families is listed among the IPv4
    ones."""
    for name in ("tcp6", "tcp") if version == 6 else ("tcp",):
        wanted = _written(local, name), _written(remote, name)
        if None in wanted:
            continue
        for line in (read_text(f"/proc/net/{name}") or "").splitlines()[1:]:
            fields = line.split()
            if (fields[1], fields[2]) == wanted:
                # A socket that its process has closed has no owner: it is listed as root's, with inode 0.
                return int(fields[7]) if fields[9] != "0" else None
    return None


def _written(address: tuple[str, int], name: str) -> str | None:
    """Return an address as /proc/net writes it, in 32-bit words of the machine's byte order; None if the list cannot
    contain it."""
    host: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address[0].partition("%")[0])
    if name == "tcp" and isinstance(host, ipaddress.IPv6Address):
        if host.ipv4_mapped is None:
            return None
        host = host.ipv4_mapped
    words = struct.unpack(f"={len(host.packed) // 4}I", host.packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
