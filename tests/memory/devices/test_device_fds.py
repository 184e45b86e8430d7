"""What a vault can know of an fd without mapping it, and without cuda."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.memory.devices import FdKind, HostDevice, Unsupported, WrongFd, check_slab_fd, fd_kind, open_device
from holdfast.memory.devices.fds import SIZE_SEALS, is_sealed, seal_memfd

SIZE = 2 * 1024 * 1024


@pytest.fixture
def memfd() -> Iterator[int]:
    """A memfd that is a slab."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    assert check_slab_fd("host-0", fd) == SIZE
    yield fd
    os.close(fd)


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    """A memfd, a pidfd and a socket by name; a pipe, a file, a device and a closed fd are other."""
    pidfd, memfd = os.pidfd_open(os.getpid()), os.memfd_create("x")
    reading, writing = os.pipe()
    with socket.socket() as sock, tempfile.TemporaryFile() as file, open("/dev/null") as null:
        kinds = [fd_kind(fd) for fd in (memfd, pidfd, sock.fileno(), reading, file.fileno(), null.fileno(), 999_999)]
    assert kinds == [FdKind.MEMFD, FdKind.PIDFD, FdKind.SOCKET] + [FdKind.OTHER] * 4
    for fd in (pidfd, memfd, reading, writing):
        os.close(fd)


def test_a_file_that_calls_itself_a_memfd_is_none() -> None:
    """A name is no proof: a file on a shared-memory file system has one seal for ever and cannot be sealed."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="memfd:") as file:
        file.truncate(SIZE)
        with pytest.raises(WrongFd):
            check_slab_fd("host-0", file.fileno())


def test_a_slab_of_one_device_is_none_of_another() -> None:
    """A GPU's vault refuses host slabs."""
    fd = HostDevice().create(SIZE)
    assert check_slab_fd("host-3", fd) == SIZE
    with pytest.raises(WrongFd, match="memfd"):
        check_slab_fd("GPU-00000000-0000-0000-0000-000000000000", fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("bytes_made", "bytes_said", "seals", "why"),
    [
        (SIZE, SIZE, 0, "size is not sealed"),  # its readers could be made to fault
        (SIZE, 2 * SIZE, SIZE_SEALS, "holes"),  # reading a hole would take memory that nobody counted
        (0, 0, SIZE_SEALS, "empty"),
    ],
)
def test_a_memfd_that_readers_cannot_trust_is_refused(bytes_made: int, bytes_said: int, seals: int, why: str) -> None:
    """By the reason; once it is sealed, whole and not empty it is a slab."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if bytes_made:
        os.posix_fallocate(fd, 0, bytes_made)
    os.ftruncate(fd, bytes_said)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(WrongFd, match=why):
        check_slab_fd("host-0", fd)
    os.close(fd)


def test_a_memfd_that_cannot_be_sealed_is_refused(memfd: int) -> None:
    """Neither one whose seals are sealed nor a read-only fd of one could ever be committed."""
    reader = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY)
    with pytest.raises(WrongFd, match="read-only"):
        check_slab_fd("host-0", reader)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    with pytest.raises(WrongFd, match="never"):
        check_slab_fd("host-0", memfd)
    with pytest.raises(WrongFd):
        seal_memfd(memfd)
    os.close(reader)


def test_a_vault_can_seal_what_it_holds(memfd: int) -> None:
    """Without mapping it; a read-only fd of a sealed slab is a slab."""
    assert not is_sealed(memfd)
    seal_memfd(memfd)
    reader = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY)
    assert is_sealed(reader)
    assert check_slab_fd("host-0", reader) == SIZE
    os.close(reader)


def test_names_of_no_device_are_refused() -> None:
    """With the names there are."""
    for name in ("", "host", "host-", "host-0x", "gpu0"):
        with pytest.raises(Unsupported, match="host-0"):
            open_device(name)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here: tests/memory/gpu")
def test_without_a_gpu_opening_one_says_why() -> None:
    """By name, with the mend, and not by a missing symbol."""
    with pytest.raises(Unsupported, match=r"cuda-bindings|driver"):
        open_device("cuda-0")
