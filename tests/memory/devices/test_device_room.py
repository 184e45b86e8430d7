"""How much host memory there is: the smallest of what the machine and every cgroup above the process allow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.memory.devices.host_room import free_host_bytes, free_huge_bytes, host_bytes, shared_huge_mode

MIB = 1024 * 1024
V1_UNLIMITED = 9223372036854771712


def machine(root: Path, *, cgroup: str, mountinfo: str, available_mib: int = 1000) -> Path:
    """A machine's /proc as far as it is read."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_mib * 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mountinfo)
    return root


def v2(folder: Path, limit: str, used_mib: int, cache_mib: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache_mib * MIB}\nactive_file 0\n")


def v1(folder: Path, limit: int, used_mib: int, cache_mib: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"total_inactive_file 0\ntotal_active_file {cache_mib * MIB}\n")


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "37 33 0:34 {shown} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("groups", "free_mib"),
    [
        ({}, 1000),  # no cgroup file bounds nothing, and neither does "max" in it
        ({"pod/box": ("max", 10, 0)}, 1000),
        ({"pod/box": ("500", 100, 0)}, 400),
        ({"pod/box": ("500", 100, 0), "pod": ("600", 550, 0)}, 50),  # a limit far above counts as much as its own
        ({"pod/box": ("500", 450, 300)}, 350),  # weights just read from disk do not count against their own slabs
        ({"pod/box": ("100", 150, 0)}, 0),
    ],
)
def test_the_tightest_group_above_the_process_decides(
    tmp_path: Path, groups: dict[str, tuple[str, int, int]], free_mib: int
) -> None:
    """v2: the limit less what is used, page cache aside; never less than nothing."""
    root = machine(tmp_path, cgroup="0::/pod/box\n", mountinfo=V2_MOUNT)
    for folder, (limit, used_mib, cache_mib) in groups.items():
        v2(root / "sys/fs/cgroup" / folder, limit if limit == "max" else str(int(limit) * MIB), used_mib, cache_mib)
    assert free_host_bytes(root=root) == free_mib * MIB


def test_free_pages_kept_by_the_cpus_are_free(tmp_path: Path) -> None:
    """What was just freed counts at once: it lies on a CPU's list, which MemAvailable does not count."""
    root = machine(tmp_path, cgroup="", mountinfo="")
    sets = "".join(f"    cpu: {cpu}\n              count:    100\n              high:     999\n" for cpu in range(2))
    (root / "proc/zoneinfo").write_text(f"Node 0, zone      DMA\n  pages free     7\n  pagesets\n{sets}")
    assert free_host_bytes(root=root) == 1000 * MIB + 200 * os.sysconf("SC_PAGE_SIZE")


def test_all_there_is_does_not_depend_on_who_uses_it(tmp_path: Path) -> None:
    """The machine's memory, or the tightest limit above the process, however much of either is taken."""
    root = machine(tmp_path, cgroup="0::/pod/box\n", mountinfo=V2_MOUNT)
    (root / "proc/meminfo").write_text(f"MemTotal: {800 * 1024} kB\nMemAvailable: 9 kB\n")
    assert host_bytes(root) == 800 * MIB
    v2(root / "sys/fs/cgroup/pod/box", "max", 100)
    v2(root / "sys/fs/cgroup/pod", str(600 * MIB), 550)
    assert host_bytes(root) == 600 * MIB


def test_the_first_version_of_cgroups_counts_too(tmp_path: Path) -> None:
    """v1, beside an empty v2 hierarchy; its way of saying "no limit" bounds nothing."""
    lines = "9:name=systemd:/\n4:memory:/jobs/one\n1:cpu:/\n0::/\n"
    root = machine(
        tmp_path, cgroup=lines, mountinfo=V1_MOUNT.format(shown="/") + V2_MOUNT.replace("cgroup rw,", "unified rw,")
    )
    v1(root / "sys/fs/cgroup/memory/jobs/one", 300 * MIB, 200, cache_mib=20)
    v1(root / "sys/fs/cgroup/memory/jobs", V1_UNLIMITED, 900)
    assert free_host_bytes(root=root) == 120 * MIB


def test_a_container_sees_its_own_part_of_the_tree(tmp_path: Path) -> None:
    """Without a cgroup namespace the path is the machine's, and the mount begins in the middle of it."""
    root = machine(tmp_path, cgroup="4:memory:/docker/abc\n", mountinfo=V1_MOUNT.format(shown="/docker/abc"))
    v1(root / "sys/fs/cgroup/memory", 256 * MIB, 56)
    assert free_host_bytes(root=root) == 200 * MIB


def test_this_machine_has_some() -> None:
    """Read from the real files: something, and no more than the machine has."""
    total = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert 0 < free_host_bytes() < total * 1024


@pytest.mark.parametrize(("free", "promised", "left_mib"), [("8", "0", 16), ("8", "5", 6), ("2", "5", 0)])
def test_huge_pages_promised_to_others_are_not_free(tmp_path: Path, free: str, promised: str, left_mib: int) -> None:
    """The pool's free pages less those reserved by mappings that have not touched them."""
    pool = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    (pool / "free_hugepages").write_text(f"{free}\n")
    (pool / "resv_hugepages").write_text(f"{promised}\n")
    assert free_huge_bytes(tmp_path) == left_mib * MIB


def test_the_mode_of_shared_huge_pages_is_the_chosen_word(tmp_path: Path) -> None:
    """And "never" where the kernel has none."""
    assert shared_huge_mode(tmp_path) == "never"
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "shmem_enabled").write_text("always within_size [advise] never deny force\n")
    assert shared_huge_mode(tmp_path) == "advise"
