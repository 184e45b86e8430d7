"""Host memory as a device: a slab is a memfd, an address range is a reservation that memfds are mapped over.

Always true:
- A slab's pages are allocated before it is mapped, so a later access cannot fault because memory is short. Its size is
  sealed.
- A sealed slab is mapped read-only and cannot be written by any means (facts 4d).
- A read-only mapping is made from a read-only fd, so that it never prevents sealing.
- A forked child has none of these mappings.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.memory.devices import pages
from holdfast.memory.devices.contract import DeviceError, OutOfMemory, Unsupported, WrongFd
from holdfast.memory.devices.fds import SIZE_SEALS, check_memfd, is_sealed
from holdfast.memory.devices.host_room import HUGE_PAGE_BYTES, free_host_bytes, free_huge_bytes, shared_huge_mode
from holdfast.memory.devices.ranges import Ranges, SlabMapping

# The same as a GPU's granularity: a layout made for one device fits the other, and every slab can use huge pages.
_GRANULARITY = HUGE_PAGE_BYTES
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3
_MFD_HUGETLB_2MB = 0x4 | 21 << 26
# Memory is allocated in pieces, with a new check before each: another process may have taken it since.
_PIECE_BYTES = 64 * 1024 * 1024

HugePages = Literal["auto", "hugetlb", "transparent", "never"]


@dataclass(frozen=True, slots=True)
class HostSettings:
    # auto: pages from the machine's pool of 2 MiB pages if it has enough, else transparent huge pages if shared memory
    # may use them, else ordinary pages. With huge pages an engine's death is detected 20-100 times sooner (facts 4c).
    huge_pages: HugePages = "auto"
    # Not used for slabs: page tables and other processes need memory, and the kernel would kill rather than refuse.
    spare_bytes: int = 64 * 1024 * 1024


def view(address: int, size: int, *, writable: bool = False) -> memoryview:
    """Return mapped host bytes as a memoryview, without a copy. It must not be used after they are unmapped."""
    whole = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    return whole if writable else whole.toreadonly()


class HostDevice:
    """Memfds mapped at fixed addresses."""

    def __init__(self, name: str = "host-0", settings: HostSettings | None = None) -> None:
        if HUGE_PAGE_BYTES % os.sysconf("SC_PAGE_SIZE"):
            raise Unsupported(f"pages of {os.sysconf('SC_PAGE_SIZE')} bytes")
        self.name = name
        self.granularity = _GRANULARITY
        self.settings = settings or HostSettings()
        self._ranges = Ranges(_GRANULARITY)
        mode = shared_huge_mode()
        usable = self.settings.huge_pages in ("auto", "transparent") and mode not in ("never", "deny")
        self._transparent = mode if usable else ""

    def __repr__(self) -> str:
        mapped = self._ranges.mappings()
        return f"<{self.name}: {len(mapped)} slabs mapped, {sum(one.size for one in mapped)} bytes>"

    # -- slabs

    def create(self, size: int) -> int:
        self._ranges.check_size(size)
        wanted = self.settings.huge_pages
        if wanted in ("auto", "hugetlb") and free_huge_bytes() >= size:
            try:
                return self._new_memfd(size, _MFD_HUGETLB_2MB)
            except OutOfMemory:
                if wanted == "hugetlb":  # otherwise use ordinary pages
                    raise
        if wanted == "hugetlb":
            raise OutOfMemory(
                f"the pool of huge pages has {free_huge_bytes()} bytes left, {size} are needed",
                "raise vm.nr_hugepages, or set huge_pages to auto",
            )
        return self._new_memfd(size, 0)

    def _new_memfd(self, size: int, flags: int) -> int:
        flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create("holdfast", flags | _MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise _translated(error) from error
            fd = os.memfd_create("holdfast", flags)  # the kernel does not know the flag
        try:
            if flags & _MFD_HUGETLB_2MB:
                os.posix_fallocate(fd, 0, size)
            else:
                self._fill(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
        except OSError as error:
            os.close(fd)
            raise _translated(error) from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _fill(self, fd: int, size: int) -> None:
        """Allocate ordinary pages for the whole slab. Checks free memory first: the kernel would kill, not refuse."""
        if self._transparent == "advise":
            os.ftruncate(fd, size)
        for start in range(0, size, _PIECE_BYTES):
            piece = min(_PIECE_BYTES, size - start)
            # The whole slab must fit before the first piece, so that a request that cannot succeed allocates nothing.
            needed, room = size - start, free_host_bytes() - self.settings.spare_bytes
            if needed > room:
                raise OutOfMemory(
                    f"{self.name} has {max(0, room)} bytes left, {needed} more are needed",
                    "free memory, or raise the memory limit of this process's cgroup",
                )
            if self._transparent == "advise":
                self._fill_advised(fd, start, piece)
            else:
                os.posix_fallocate(fd, start, piece)

    def _fill_advised(self, fd: int, start: int, size: int) -> None:
        """Fill through an advised mapping, where the kernel gives huge pages only on advice."""
        address = pages.reserve(size, HUGE_PAGE_BYTES)
        try:
            pages.map_fd(address, size, fd, writable=True, offset=start)
            _advise_huge(address, size)
            pages.advise(address, size, pages.MADV_POPULATE_WRITE)
        finally:
            pages.unmap(address, size)

    # -- addresses

    def reserve(self, size: int) -> int:
        self._ranges.check_size(size)
        try:
            address = pages.reserve(size, self.granularity)
        except OSError as error:
            raise _translated(error) from error
        self._ranges.add_reserved(address, size)
        return address

    def map(self, address: int, size: int, fd: int, *, writable: bool) -> None:
        self.map_many(address, [(size, fd)], writable=writable)

    def map_many(self, address: int, slabs: Sequence[tuple[int, int]], *, writable: bool) -> None:
        total = sum(size for size, _ in slabs)
        self._ranges.check_free(address, total)
        at = address
        try:
            for size, fd in slabs:
                self._map_one(at, size, fd, writable)
                at += size
        except BaseException:
            self.unmap(address, total)
            raise

    def _map_one(self, address: int, size: int, fd: int, writable: bool) -> None:
        self._ranges.check_size(size)
        actual = check_memfd(fd)
        if actual != size:
            raise WrongFd(f"the slab has {actual} bytes, not {size}")
        sealed = is_sealed(fd)
        if writable and sealed:
            raise WrongFd("the slab is sealed against writing", "map it read-only")
        own = -1
        try:
            # Kept for later changes of access; a sealed slab's access never changes.
            own = -1 if sealed else fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
            self._overlay(address, size, fd, writable)
        except OSError as error:
            if own >= 0:
                os.close(own)
            pages.clear(address, size)
            raise _translated(error) from error
        self._ranges.add(SlabMapping(address, size, writable, own))

    def scratch(self, address: int, size: int, own: Sequence[tuple[int, int]] = ()) -> None:
        """Map an empty memfd, whose pages the kernel allocates on first access."""
        self._ranges.check_scratch(address, size, own)
        try:
            fd = os.memfd_create("holdfast-scratch", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, size)
                self._overlay(address, size, fd, writable=True)
            finally:
                os.close(fd)
        except OSError as error:
            pages.clear(address, size)
            raise _translated(error) from error
        self._ranges.add(SlabMapping(address, size, writable=True))

    def _overlay(self, address: int, size: int, fd: int, writable: bool) -> None:
        """Replace the existing mapping atomically: the range is never unmapped in between."""
        if writable:
            pages.map_fd(address, size, fd, writable=True)
        else:
            # A read-only mapping of a writable fd could become writable, so it counts as writable to the kernel.
            reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                pages.map_fd(address, size, reader, writable=False)
            finally:
                os.close(reader)
        pages.advise(address, size, pages.MADV_DONTFORK)  # a forked child is not registered, so it must not hold pages
        if self._transparent == "advise":
            _advise_huge(address, size)

    def protect(self, address: int, size: int, *, writable: bool) -> None:
        found = self._ranges.within(address, size)
        if not found:
            raise DeviceError(f"nothing is mapped in {address:#x}+{size}")
        changing = [one for one in found if one.writable != writable]
        if writable and any(one.fd < 0 or is_sealed(one.fd) for one in changing):
            raise WrongFd("the slab is sealed against writing")
        try:
            for one in changing:
                self._overlay(one.address, one.size, one.fd, writable)
        except OSError as error:
            for one in changing:
                self._overlay(one.address, one.size, one.fd, not writable)
            raise _translated(error) from error
        for one in changing:
            one.writable = writable

    def unmap(self, address: int, size: int) -> None:
        for one in self._ranges.within(address, size):
            pages.clear(one.address, one.size)
            self._ranges.remove(one)
            if one.fd >= 0:
                os.close(one.fd)

    def release(self, address: int, size: int) -> None:
        self._ranges.check_release(address, size)
        pages.unmap(address, size)
        self._ranges.drop_reserved(address)

    # -- bytes

    def read(self, address: int, size: int) -> bytes:
        self._ranges.check_covered(address, size)
        return bytes(view(address, size))

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        source = memoryview(data).cast("B")
        self._ranges.check_covered(address, source.nbytes, writable=True)
        view(address, source.nbytes, writable=True)[:] = source

    def checksum(self, address: int, size: int) -> str:
        self._ranges.check_covered(address, size)
        return hashlib.blake2b(view(address, size), digest_size=16).hexdigest()

    def synchronize(self) -> None:
        """Do nothing: host stores are complete when they return."""

    def free_bytes(self) -> int:
        ordinary = max(0, free_host_bytes() - self.settings.spare_bytes)
        if self.settings.huge_pages == "hugetlb":
            return free_huge_bytes()
        return ordinary + (free_huge_bytes() if self.settings.huge_pages == "auto" else 0)

    def close(self) -> None:
        for address, size in list(self._ranges.reserved.items()):
            self.unmap(address, size)
            self.release(address, size)


def _advise_huge(address: int, size: int) -> None:
    with contextlib.suppress(OSError):  # only advice: pages from the huge page pool may refuse it
        pages.advise(address, size, pages.MADV_HUGEPAGE)


def _translated(error: OSError) -> DeviceError:
    if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
        # Out of memory (MADV_POPULATE_WRITE reports that as EFAULT), or of mappings for this process.
        return OutOfMemory(f"the kernel refused memory ({error.strerror})", "use larger slabs or free memory")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DeviceError("no more files may be opened", "use larger slabs, or raise the limit (ulimit -n)")
    if error.errno in (errno.EPERM, errno.EACCES):
        return WrongFd(f"the slab may not be mapped this way ({error.strerror})")
    return DeviceError(f"the kernel refused ({error.strerror})")
