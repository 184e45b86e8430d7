"""Checks what an fd is, using only the kernel's information: for a vault, which keeps slabs' fds and maps none.

Always true: nothing here maps memory, loads cuda or trusts a client's description of an fd. A host slab is a memfd with
a sealed size (truncation cannot make a reader fault) and without holes (a reader's access allocates nothing).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from enum import StrEnum

from holdfast.memory.devices.contract import BusyError, WrongFd
from holdfast.spec.names import is_host

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
ALL_SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# The character device major that Linux assigns to NVIDIA's driver (devices.txt); an exported allocation is an open
# /dev/nvidiactl. Compared by number, because paths differ between mount namespaces.
_NVIDIA_MAJOR = 195
_BLOCK_BYTES = 512  # the unit of st_blocks on every file system


class FdKind(StrEnum):
    MEMFD = "memfd"
    CUDA = "cuda"  # an fd of NVIDIA's driver; only an import shows whether it is an allocation
    PIDFD = "pidfd"
    SOCKET = "socket"
    OTHER = "other"


def fd_kind(fd: int) -> FdKind:
    """Return the kind of an fd; OTHER for unknown kinds and closed fds."""
    try:
        status = os.fstat(fd)
        link = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return FdKind.OTHER
    if stat.S_ISSOCK(status.st_mode):
        return FdKind.SOCKET
    if stat.S_ISCHR(status.st_mode):
        return FdKind.CUDA if os.major(status.st_rdev) == _NVIDIA_MAJOR else FdKind.OTHER
    # Since Linux 6.9 pidfds have their own file system; before, they are anonymous inodes.
    if link == "anon_inode:[pidfd]" or link.startswith("pidfd:["):
        return FdKind.PIDFD
    if stat.S_ISREG(status.st_mode) and link.startswith("/memfd:") and _seals(fd) is not None:
        return FdKind.MEMFD
    return FdKind.OTHER


def check_slab_fd(device: str, fd: int) -> int:
    """Return the slab's size, or 0 for a GPU's (its fds do not show it). Raise WrongFd if the fd cannot be a slab of
    `device`."""
    if is_host(device):
        return check_memfd(fd)
    kind = fd_kind(fd)
    if kind is not FdKind.CUDA:
        raise WrongFd(f"{device} keeps fds exported by cuda, and this one is of kind {kind}")
    return 0


def check_memfd(fd: int) -> int:
    """Return the size of a memfd. Raise WrongFd unless its size is sealed, it has no holes, and its content is sealed
    or can be."""
    kind = fd_kind(fd)
    seals = _seals(fd)
    if kind is not FdKind.MEMFD or seals is None:
        raise WrongFd(f"a memfd is needed, and this fd is of kind {kind}")
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise WrongFd("the memfd's size is not sealed", "add F_SEAL_SHRINK and F_SEAL_GROW when it has its size")
    if not seals & fcntl.F_SEAL_WRITE:
        if seals & fcntl.F_SEAL_SEAL:
            raise WrongFd("the memfd can never be sealed against writing: its seals are sealed")
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise WrongFd("the memfd cannot be sealed through a read-only fd", "hand over the fd it was made with")
    status = os.fstat(fd)
    if status.st_size == 0:
        raise WrongFd("the memfd is empty")
    if status.st_blocks * _BLOCK_BYTES < status.st_size:
        raise WrongFd("the memfd has holes", "allocate all of it (posix_fallocate) before handing it over")
    return status.st_size


def is_sealed(fd: int) -> bool:
    seals = _seals(fd)
    return seals is not None and bool(seals & fcntl.F_SEAL_WRITE)


def seal_memfd(fd: int) -> None:
    """Seal size and content permanently. Raises BusyError while any process has a writable mapping of it."""
    if is_sealed(fd):
        return
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL_SEALS)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise BusyError(
                "the slab is still mapped writable, or its pages are pinned", "unmap it, or make it read-only, first"
            ) from error
        raise WrongFd(f"the fd cannot be sealed ({error.strerror})") from error


def _seals(fd: int) -> int | None:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return None  # not a kind of file that has seals
