"""What only host memory promises: seals that hold through every path, pages that are there, addresses without a gap."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.memory.devices import BusyError, DeviceError, HostDevice, HostSettings, OutOfMemory, WrongFd, view
from holdfast.memory.devices.fds import seal_memfd
from holdfast.memory.devices.host_room import free_host_bytes
from tests.rigs.memory.device_agent import Peer
from tests.rigs.memory.device_contract import until

MIB = 1024 * 1024
SIZE = 4 * MIB


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice()
    yield device
    device.close()


def run_code(code: str) -> int:
    """Run lines in a process of their own, with a device and a mapped slab; its exit status (negative: a signal)."""
    start = "import ctypes, os, threading\nfrom holdfast.memory.devices import HostDevice\n"
    start += f"device = HostDevice()\nsize = {SIZE}\nfd = device.create(size)\naddress = device.reserve(size)\n"
    start += "device.map(address, size, fd, writable=True)\n"
    return subprocess.run([sys.executable, "-c", start + code], timeout=60, check=False).returncode


def test_a_sealed_slab_cannot_be_written_through_proc(device: HostDevice) -> None:
    """Reopened writable, mapped writable, written through /proc/self/mem, truncated or punched: refused (facts 4d)."""
    fd = device.create(SIZE)
    address = device.reserve(SIZE)
    device.map(address, SIZE, fd, writable=True)
    device.write(address, b"committed")
    device.protect(address, SIZE, writable=False)
    seal_memfd(fd)
    again = os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR)
    with open("/proc/self/mem", "r+b", buffering=0) as memory, pytest.raises(OSError):
        os.pwrite(memory.fileno(), b"changed!!", address)
    for attempt in (
        lambda: os.pwrite(again, b"changed!!", 0),
        lambda: mmap.mmap(again, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: os.ftruncate(again, 0),
        lambda: os.posix_fallocate(again, 0, 2 * SIZE),
        lambda: fcntl.fcntl(again, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW),
    ):
        with pytest.raises(OSError):
            attempt()
    with pytest.raises(WrongFd):
        device.protect(address, SIZE, writable=True)
    with pytest.raises(WrongFd):
        device.map(device.reserve(SIZE), SIZE, fd, writable=True)
    assert device.read(address, 9) == b"committed"
    os.close(again)
    os.close(fd)


def gets_sealed(fd: int) -> bool:
    try:
        seal_memfd(fd)
    except BusyError:
        return False
    return True


def test_sealing_waits_for_no_one_and_is_refused_while_somebody_can_write(device: HostDevice) -> None:
    """A writable mapping here is in its way, and so is one in another process, until that process's memory is gone.

    That may be after its end: whoever reads /proc/PID/maps or the like just then keeps it for a moment.
    """
    fd = device.create(SIZE)
    address = device.reserve(SIZE)
    device.map(address, SIZE, fd, writable=True)
    with pytest.raises(BusyError, match="mapped writable"):
        seal_memfd(fd)
    device.protect(address, SIZE, writable=False)
    with Peer("host-0") as other:
        other.ask("reserve", sizes=[SIZE])
        assert "error" not in other.ask("map", [fd], writable=True)
        with pytest.raises(BusyError):
            seal_memfd(fd)
        other.kill()
        assert until(lambda: gets_sealed(fd))
    os.close(fd)


def test_a_slabs_size_is_fixed_from_the_start(device: HostDevice) -> None:
    """A writer cannot make readers fault by truncating what they have mapped."""
    fd = device.create(SIZE)
    for size in (0, SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_reserved_and_unmapped_addresses_cannot_be_touched() -> None:
    """A stale pointer ends the process, instead of reading another's bytes or zeros."""
    assert run_code("device.unmap(address, size)\nctypes.string_at(address, 1)") == -signal.SIGSEGV


def test_a_change_of_access_leaves_no_gap() -> None:
    """A thread that reads all the while never meets an address that is not there."""
    code = (
        "device.write(address, b'x')\n"
        "over = threading.Event()\n"
        "def read():\n"
        "    while not over.is_set():\n"
        "        assert ctypes.string_at(address, 1) == b'x'\n"
        "thread = threading.Thread(target=read)\n"
        "thread.start()\n"
        "for turn in range(2000):\n"
        "    device.protect(address, size, writable=bool(turn % 2))\n"
        "over.set()\n"
        "thread.join()\n"
    )
    assert run_code(code) == 0


def test_a_forked_child_has_no_slabs() -> None:
    """A process that never registered with the vault cannot hold its pages (facts 2)."""
    code = (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    ctypes.string_at(address, 1)\n"
        "    os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "ctypes.string_at(address, 1)\n"
        "os._exit(os.WTERMSIG(status))\n"
    )
    assert run_code(code) == signal.SIGSEGV


def test_more_than_there_is_left_is_refused_before_anything_is_taken() -> None:
    """The kernel would kill someone for it; here it is an error that says how much there is and what to do."""
    device = HostDevice("host-0", HostSettings(huge_pages="never", spare_bytes=free_host_bytes() - 512 * MIB))
    with pytest.raises(OutOfMemory, match="cgroup"):
        device.create(1024 * MIB)
    os.close(device.create(2 * MIB))


def test_huge_pages_that_are_not_there_are_refused_by_name() -> None:
    """Who insists on the pool of huge pages is told that it is too small."""
    device = HostDevice("host-0", HostSettings(huge_pages="hugetlb"))
    with pytest.raises(OutOfMemory, match="nr_hugepages"):
        device.create(device.free_bytes() + device.granularity)


def test_a_view_is_the_memory_itself(device: HostDevice) -> None:
    """No copy: what is stored through one view is seen through another; a view is read-only unless asked for."""
    fd = device.create(SIZE)
    address = device.reserve(SIZE)
    device.map(address, SIZE, fd, writable=True)
    view(address + 5, 3, writable=True)[:] = b"abc"
    assert view(address, 8)[5:].tobytes() == b"abc"
    assert view(address, 8).readonly
    os.close(fd)


def mapped_slabs() -> set[str]:
    """Lines of this process's mappings that are slabs; other tests in it may have left some."""
    with open("/proc/self/maps") as maps:
        return {line for line in maps if "memfd:holdfast" in line}


def test_close_gives_everything_back(device: HostDevice) -> None:
    """After close no mapping and no fd of the device is left, and closing again does nothing."""
    before = set(os.listdir("/proc/self/fd"))
    mapped = mapped_slabs()
    fd = device.create(SIZE)
    address = device.reserve(4 * SIZE)
    device.map_many(address, [(SIZE, fd)] * 3, writable=True)
    os.close(fd)
    device.close()
    device.close()
    assert mapped_slabs() <= mapped, "others' may go meanwhile; none of this device's stays"
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(DeviceError):
        device.map(address, SIZE, fd, writable=True)
