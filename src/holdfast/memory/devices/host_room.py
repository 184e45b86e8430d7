"""How much host memory is available: the machine's, within the limits of all cgroups above a process.

Always true: this only reads; a value that the kernel does not report sets no limit; reclaimable page cache counts as
free, as in MemAvailable.
"""

from __future__ import annotations

import os
from pathlib import Path

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
# A v1 group without a limit reports the largest multiple of a page; no machine has an exbibyte.
_UNLIMITED_BYTES = 1 << 60


def free_host_bytes(pid: int | None = None, root: Path = Path("/")) -> int:
    """Return the bytes that a process (default: this one) can still allocate in ordinary pages, without swap."""
    rooms = [_field_kib(root / "proc/meminfo", "MemAvailable:") * 1024 + _idle_on_cpus_bytes(root)]
    process = "self" if pid is None else str(pid)
    for folder, files in _groups(process, root):
        room = _group_room(folder, files)
        if room is not None:
            rooms.append(room)
    return max(0, min(rooms))


def host_bytes(root: Path = Path("/")) -> int:
    """Return the most memory this process and its children can have: the machine's, or a smaller cgroup limit."""
    limits = [_field_kib(root / "proc/meminfo", "MemTotal:") * 1024]
    for folder, files in _groups("self", root):
        limit = _number(folder / files[0])
        if limit is not None:
            limits.append(limit)
    return min(limits)


def free_huge_bytes(root: Path = Path("/")) -> int:
    """Return the bytes in the machine's pool of 2 MiB pages that are free and not reserved."""
    free = _number(root / _POOL / "free_hugepages") or 0
    promised = _number(root / _POOL / "resv_hugepages") or 0
    return max(0, free - promised) * HUGE_PAGE_BYTES


def shared_huge_mode(root: Path = Path("/")) -> str:
    """Return when shared memory gets transparent huge pages: the selected value of shmem_enabled, or "never"."""
    words = _text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), "never")


# Limit, usage and the two page cache counters, as named in the two cgroup versions.
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")


def _groups(process: str, root: Path) -> list[tuple[Path, tuple[str, str, str, str]]]:
    """Return the memory cgroups of a process and all visible groups above it."""
    mounts = _mounts(root)
    found = []
    for line in _text(root / "proc" / process / "cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            version, files = "cgroup2", _V2
        elif "memory" in controllers.split(","):
            version, files = "cgroup", _V1
        else:
            continue
        if version not in mounts:
            continue
        seen_from, mount = mounts[version]
        # In a container without a cgroup namespace, the path is the machine's, and the mount shows only a part of it.
        inside = path.removeprefix(seen_from) if seen_from != "/" and path.startswith(seen_from) else path
        parts = [part for part in inside.split("/") if part not in ("", "..")]
        found += [(mount.joinpath(*parts[:depth]), files) for depth in range(len(parts), -1, -1)]
    return found


def _mounts(root: Path) -> dict[str, tuple[str, Path]]:
    """Return where the memory hierarchies are mounted: version -> (visible part, mount point)."""
    mounts: dict[str, tuple[str, Path]] = {}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "memory" in kind[2].split(",")):
            mounts.setdefault(kind[0], (fields[3], root / fields[4].lstrip("/")))
    return mounts


def _group_room(folder: Path, files: tuple[str, str, str, str]) -> int | None:
    limit_file, usage_file, *cache = files
    limit, usage = _number(folder / limit_file), _number(folder / usage_file)
    if limit is None or usage is None or limit >= _UNLIMITED_BYTES:
        return None
    counts = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return limit - usage + sum(int(counts.get(name, "0")) for name in cache)


def _idle_on_cpus_bytes(root: Path) -> int:
    """Return the free bytes in per-CPU page lists. MemAvailable omits them: hundreds of MB since Linux 6.7."""
    lines = (line.split() for line in _text(root / "proc/zoneinfo").splitlines())
    return sum(int(line[1]) for line in lines if len(line) == 2 and line[0] == "count:") * os.sysconf("SC_PAGE_SIZE")


def _field_kib(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _text(path).splitlines() if line.startswith(name)), 0)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not mounted, hidden, or removed in the meantime
