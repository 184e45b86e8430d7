"""Memory mapping calls that Python's mmap does not offer: at a fixed address, without an object that owns the mapping.

Always true: every failure is an OSError with the call's name; this module has no state.
"""

from __future__ import annotations

import ctypes
import mmap
import os

PROT_NONE = 0
MAP_FIXED = 0x10  # these two are the same on x86-64 and aarch64
MAP_NORESERVE = 0x4000
MADV_HUGEPAGE = 14
MADV_DONTFORK = 10
MADV_POPULATE_WRITE = 23  # Linux 5.14: allocates pages, and fails where an access would raise SIGBUS

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def reserve(size: int, alignment: int) -> int:
    """Reserve an aligned, inaccessible range, which takes no memory; return its address."""
    start = _mmap(None, size + alignment, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
    address = -(-start // alignment) * alignment
    if address > start:
        unmap(start, address - start)
    if address + size < start + size + alignment:
        unmap(address + size, start + alignment - address)
    return address


def clear(address: int, size: int) -> None:
    """Make a range inaccessible again, atomically: no other mapping can take it in between."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    _mmap(address, size, PROT_NONE, flags, -1)


def map_fd(address: int, size: int, fd: int, *, writable: bool, offset: int = 0) -> None:
    """Map a file over a reserved range, atomically replacing the old mapping."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    _mmap(address, size, access, mmap.MAP_SHARED | MAP_FIXED, fd, offset=offset)


def map_private(address: int, size: int, fd: int, offset: int) -> None:
    """Map a file, which may be sealed, over a reserved range. Writes stay private to this process."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    _mmap(address, size, access, mmap.MAP_PRIVATE | MAP_FIXED, fd, offset=offset)


def map_own(address: int, size: int) -> None:
    """Map private memory over a reserved range; the kernel allocates it on first access."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    _mmap(address, size, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1)


def unmap(address: int, size: int) -> None:
    if _libc.munmap(address, size) != 0:
        raise _failure("munmap")


def advise(address: int, size: int, advice: int) -> None:
    if _libc.madvise(address, size, advice) != 0:
        raise _failure("madvise")


def _mmap(address: int | None, size: int, access: int, flags: int, fd: int, *, offset: int = 0) -> int:
    found: int | None = _libc.mmap(address, size, access, flags, fd, offset)
    if found is None or found == _FAILED:
        raise _failure("mmap")
    return found


def _failure(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
