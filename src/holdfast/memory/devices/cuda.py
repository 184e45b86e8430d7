"""A GPU's memory as a device, through the driver's virtual memory management. Imported only when a GPU is used.

Always true: a slab is one physical allocation, and what keeps it alive is its exported fd or a mapping, never a
handle of this process (facts 3, 4); the primary context is the one every library in this process shares; the calling
thread's current context is afterwards what it was before.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.memory.devices.contract import DeviceError, OutOfMemory, WrongFd
from holdfast.memory.devices.cuda_driver import Driver, find_gpu, refuse_unfit
from holdfast.memory.devices.fds import FdKind, fd_kind
from holdfast.memory.devices.ranges import Mapping, Ranges, scratch_pieces

# Bytes copied at a time between host and GPU: large enough to hide the call, small beside an engine's host memory.
_PIECE_BYTES = 64 * 1024 * 1024
# What scratch is made of: mapping costs by the piece (facts 5), and a standby has it for as long as there is no pool.
_SCRATCH_BYTES = 128 * 1024 * 1024


class CudaDevice:
    """Slabs of one GPU."""

    def __init__(self, name: str) -> None:
        self._driver = Driver()
        self._gpu, self.name = find_gpu(self._driver, name)
        refuse_unfit(self._driver, self._gpu, self.name)
        api = self._driver.api
        self._fd_handle = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._prop = self._properties()
        recommended = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity: int = self._driver("cuMemGetAllocationGranularity", self._prop, recommended)
        self._ranges = Ranges(self.granularity)
        self._context: Any = self._driver("cuDevicePrimaryCtxRetain", self._gpu)

    def __repr__(self) -> str:
        mapped = self._ranges.mappings()
        return f"<{self.name}: {len(mapped)} slabs mapped, {sum(one.size for one in mapped)} bytes>"

    def _properties(self) -> Any:
        api = self._driver.api
        prop = api.CUmemAllocationProp()
        prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = self._fd_handle
        prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = int(self._gpu)
        if self._driver.attribute(self._gpu, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            prop.allocFlags.gpuDirectRDMACapable = 1
        return prop

    @contextlib.contextmanager
    def current(self) -> Iterator[Driver]:
        """The driver, with this GPU's primary context current in the calling thread."""
        if self._context is None:
            raise DeviceError(f"{self.name} is closed")
        self._driver("cuCtxPushCurrent", self._context)
        try:
            yield self._driver
        finally:
            self._driver("cuCtxPopCurrent")

    # -- slabs

    def create(self, size: int) -> int:
        self._ranges.check_size(size)
        with self.current() as driver:
            try:
                handle = driver("cuMemCreate", size, self._prop, 0)
            except OutOfMemory as error:
                raise OutOfMemory(f"{self.name} has no {size} bytes left ({error.cause})", error.mend) from error
            try:
                fd = int(driver("cuMemExportToShareableHandle", handle, self._fd_handle, 0))
            finally:
                driver("cuMemRelease", handle)  # the fd alone keeps the slab from here on
        os.set_inheritable(fd, False)
        return fd

    # -- addresses

    def reserve(self, size: int) -> int:
        self._ranges.check_size(size)
        with self.current() as driver:
            address = int(driver("cuMemAddressReserve", size, self.granularity, 0, 0))
        self._ranges.add_reserved(address, size)
        return address

    def map(self, address: int, size: int, fd: int, *, writable: bool) -> None:
        self.map_many(address, [(size, fd)], writable=writable)

    def map_many(self, address: int, slabs: Sequence[tuple[int, int]], *, writable: bool) -> None:
        total = sum(size for size, _ in slabs)
        self._ranges.check_free(address, total)
        with self.current() as driver:
            at = address
            try:
                for size, fd in slabs:
                    self._map_one(driver, at, size, fd)
                    self._ranges.add(Mapping(at, size, writable))
                    at += size
                # One call for all: changing access is what costs (facts 5).
                self._set_access(driver, address, total, writable)
            except BaseException:
                self._drop(driver, self._ranges.within(address, total))
                raise

    def _map_one(self, driver: Driver, address: int, size: int, fd: int) -> None:
        self._ranges.check_size(size)
        kind = fd_kind(fd)
        if kind is not FdKind.CUDA:
            raise WrongFd(f"{self.name} maps fds exported by cuda, and this one is of kind {kind}")
        try:
            handle = driver("cuMemImportFromShareableHandle", fd, self._fd_handle)
        except OutOfMemory:
            raise
        except DeviceError as error:
            raise WrongFd(f"the fd holds no slab of this GPU ({error.cause})") from error
        try:
            driver("cuMemMap", address, size, 0, handle, 0)
        finally:
            driver("cuMemRelease", handle)  # the mapping keeps the slab

    def scratch(self, address: int, size: int, own: Sequence[tuple[int, int]] = ()) -> None:
        """A few slabs again and again, but where bytes must be themselves."""
        self._ranges.check_scratch(address, size, own)
        again: dict[int, Any] = {}  # by their sizes
        with self.current() as driver:
            try:
                for at, length, alone in scratch_pieces(size, _SCRATCH_BYTES, own):
                    handle = None if alone else again.get(length)
                    if handle is None:
                        handle = driver("cuMemCreate", length, self._prop, 0)
                    try:
                        if not alone:
                            again[length] = handle
                        driver("cuMemMap", address + at, length, 0, handle, 0)
                    finally:
                        if alone:
                            driver("cuMemRelease", handle)  # the mapping keeps it
                    self._ranges.add(Mapping(address + at, length, writable=True))
                self._set_access(driver, address, size, writable=True)
            except BaseException:
                self._drop(driver, self._ranges.within(address, size))
                raise
            finally:
                for handle in again.values():
                    driver("cuMemRelease", handle)

    def _set_access(self, driver: Driver, address: int, size: int, writable: bool) -> None:
        api = driver.api
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._gpu)
        flags = api.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        driver("cuMemSetAccess", address, size, [access], 1)

    def protect(self, address: int, size: int, *, writable: bool) -> None:
        found = self._ranges.within(address, size)
        if not found:
            raise DeviceError(f"nothing is mapped in {address:#x}+{size}")
        with self.current() as driver:
            for start, length in _runs(found):
                self._set_access(driver, start, length, writable)
        for one in found:
            one.writable = writable

    def unmap(self, address: int, size: int) -> None:
        found = self._ranges.within(address, size)
        with self.current() as driver:
            self._drop(driver, found)

    def _drop(self, driver: Driver, found: list[Mapping]) -> None:
        for one in found:
            driver("cuMemUnmap", one.address, one.size)
            self._ranges.remove(one)

    def release(self, address: int, size: int) -> None:
        self._ranges.check_release(address, size)
        with self.current() as driver:
            driver("cuMemAddressFree", address, size)
        self._ranges.drop_reserved(address)

    # -- bytes

    def _pieces(self, address: int, size: int) -> Iterator[memoryview]:
        self._ranges.check_covered(address, size)
        buffer = (ctypes.c_ubyte * min(size, _PIECE_BYTES))()
        for start in range(0, size, _PIECE_BYTES):
            piece = min(_PIECE_BYTES, size - start)
            with self.current() as driver:
                driver("cuMemcpyDtoH", ctypes.addressof(buffer), address + start, piece)
            yield memoryview(buffer).cast("B")[:piece]

    def read(self, address: int, size: int) -> bytes:
        return b"".join(bytes(piece) for piece in self._pieces(address, size))

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        source = memoryview(data).cast("B")
        size = source.nbytes
        self._ranges.check_covered(address, size, writable=True)
        buffer = (ctypes.c_ubyte * min(size, _PIECE_BYTES))()
        for start in range(0, size, _PIECE_BYTES):
            piece = source[start : start + _PIECE_BYTES]
            memoryview(buffer).cast("B")[: piece.nbytes] = piece
            with self.current() as driver:
                driver("cuMemcpyHtoD", address + start, ctypes.addressof(buffer), piece.nbytes)
                # The call may return when the bytes are staged, not when they are there.
                driver("cuCtxSynchronize")

    def checksum(self, address: int, size: int) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for piece in self._pieces(address, size):
            digest.update(piece)
        return digest.hexdigest()

    def synchronize(self) -> None:
        with self.current() as driver:
            driver("cuCtxSynchronize")

    def free_bytes(self) -> int:
        with self.current() as driver:
            free, _ = driver("cuMemGetInfo")
        return int(free)

    def close(self) -> None:
        if self._context is None:
            return
        for address, size in list(self._ranges.reserved.items()):
            self.unmap(address, size)
            self.release(address, size)
        self._driver("cuDevicePrimaryCtxRelease", self._gpu)
        self._context = None


def _runs(mappings: list[Mapping]) -> list[tuple[int, int]]:
    """Neighbouring mappings as (address, size) of the ranges they fill."""
    runs: list[tuple[int, int]] = []
    for one in mappings:
        if runs and sum(runs[-1]) == one.address:
            runs[-1] = (runs[-1][0], runs[-1][1] + one.size)
        else:
            runs.append((one.address, one.size))
    return runs
