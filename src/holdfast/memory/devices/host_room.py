"""How much host memory there really is: the machine's, and what every cgroup above a process still allows.

Always true: reads only; a number the kernel does not tell bounds nothing; page cache that can be given up counts as
free, as it does in MemAvailable.
"""

from __future__ import annotations

import os
from pathlib import Path

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
# A v1 group without a limit shows the largest multiple of a page; no machine has an exbibyte.
_UNLIMITED_BYTES = 1 << 60


def free_host_bytes(pid: int | None = None, root: Path = Path("/")) -> int:
    """What a process (default: this one) can still allocate in ordinary pages, without swap."""
    rooms = [_field_kib(root / "proc/meminfo", "MemAvailable:") * 1024 + _idle_on_cpus_bytes(root)]
    process = "self" if pid is None else str(pid)
    for folder, files in _groups(process, root):
        room = _group_room(folder, files)
        if room is not None:
            rooms.append(room)
    return max(0, min(rooms))


def host_bytes(root: Path = Path("/")) -> int:
    """All that this process and its children could ever have: the machine's memory, or a cgroup's smaller limit."""
    limits = [_field_kib(root / "proc/meminfo", "MemTotal:") * 1024]
    for folder, files in _groups("self", root):
        limit = _number(folder / files[0])
        if limit is not None:
            limits.append(limit)
    return min(limits)


def free_huge_bytes(root: Path = Path("/")) -> int:
    """What the machine's pool of 2 MiB pages has left that nobody was promised."""
    free = _number(root / _POOL / "free_hugepages") or 0
    promised = _number(root / _POOL / "resv_hugepages") or 0
    return max(0, free - promised) * HUGE_PAGE_BYTES


def shared_huge_mode(root: Path = Path("/")) -> str:
    """When shared memory gets transparent huge pages here: the chosen word of shmem_enabled, or "never"."""
    words = _text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), "never")


# limit, usage and the two counts of page cache, as the two versions name them
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")


def _groups(process: str, root: Path) -> list[tuple[Path, tuple[str, str, str, str]]]:
    """The memory cgroups of a process and all above it, as far up as they can be seen from here."""
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
        # In a container without a cgroup namespace the path is the machine's, and the mount shows a part of it.
        inside = path.removeprefix(seen_from) if seen_from != "/" and path.startswith(seen_from) else path
        parts = [part for part in inside.split("/") if part not in ("", "..")]
        found += [(mount.joinpath(*parts[:depth]), files) for depth in range(len(parts), -1, -1)]
    return found


def _mounts(root: Path) -> dict[str, tuple[str, Path]]:
    """Where the memory hierarchies are mounted: version -> (the part of it that is shown, the mount point)."""
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
    """Free pages that each CPU keeps at hand. MemAvailable leaves them out: hundreds of MB since Linux 6.7."""
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
        return ""  # not mounted, hidden, or gone meanwhile
