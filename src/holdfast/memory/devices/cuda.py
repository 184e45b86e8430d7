"""A GPU's memory as a device, through the driver's virtual memory management. Imported only when a GPU is used.

Always true: a slab is one physical allocation, kept alive by its exported fd or a mapping, never by a handle of this
process (facts 3, 4); all libraries in this process share the primary context; each call restores the calling thread's
current context.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.memory.devices.contract import BusyError, DeviceError, OutOfMemory, Unsupported, WrongFd
from holdfast.memory.devices.fds import FdKind, fd_kind
from holdfast.memory.devices.ranges import Ranges, SlabMapping, scratch_pieces

# The driver's error names -> our errors; every other failure is a plain DeviceError.
_MEANINGS: dict[str, tuple[type[DeviceError], str]] = {
    "CUDA_ERROR_OUT_OF_MEMORY": (OutOfMemory, "free memory on the GPU"),
    "CUDA_ERROR_NOT_SUPPORTED": (Unsupported, ""),
    "CUDA_ERROR_NO_DEVICE": (Unsupported, "run on a machine with an NVIDIA GPU, or use host-0"),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (BusyError, "another process has the GPU for itself: nvidia-smi -c DEFAULT"),
    "CUDA_ERROR_ILLEGAL_ADDRESS": (DeviceError, "this process's GPU context is lost: restart it"),
}
_WITHOUT_MPS = "stop the MPS daemon (echo quit | nvidia-cuda-mps-control), or unset CUDA_MPS_PIPE_DIRECTORY"
_MPS_CONTROL = Path("/tmp/nvidia-mps/control")


class Driver:
    """NVIDIA's driver API, loaded on first use. `driver("cuMemCreate", …)` calls a function and returns its value, a
    tuple of values, or None. Every failure raises, with the driver's own error name."""

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise Unsupported("the package cuda-bindings is not installed", "pip install cuda-bindings") from error
        self("cuInit", 0)

    def __call__(self, function: str, *arguments: object) -> Any:
        try:
            result, *values = getattr(self.api, function)(*arguments)
        except RuntimeError as error:  # raised by the bindings if the library, or a function in it, is missing
            raise Unsupported(f"NVIDIA's driver cannot be used here: {error}", "install the GPU's driver") from error
        if int(result) != 0:
            raise self.failure(function, result)
        return values[0] if len(values) == 1 else tuple(values) or None

    def failure(self, function: str, result: Any) -> DeviceError:
        name = getattr(result, "name", str(result))
        kind, mend = _MEANINGS.get(name, (DeviceError, ""))
        if name.startswith("CUDA_ERROR_MPS_"):
            kind, mend = Unsupported, _WITHOUT_MPS
        return kind(f"{function}: {name}", mend)

    def attribute(self, device: Any, name: str, unknown: int = 0) -> int:
        """Return a device attribute, or `unknown` if driver or bindings are too old to have it."""
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:
            return unknown
        result, value = self.api.cuDeviceGetAttribute(attribute, device)
        return int(value) if int(result) == 0 else unknown


def find_gpu(driver: Driver, name: str) -> tuple[Any, str]:
    """Return the GPU with this UUID or `cuda-<n>` name (PCI bus order, like nvidia-smi), and its UUID."""
    gpus: list[tuple[str, Any, str]] = []
    for number in range(driver("cuDeviceGetCount")):
        gpu = driver("cuDeviceGet", number)
        gpus.append((_bus(driver, gpu), gpu, _uuid_text(bytes(driver("cuDeviceGetUuid", gpu).bytes))))
    gpus.sort(key=lambda one: one[0])
    kind, _, rest = name.partition("-")
    for position, (_, gpu, uuid) in enumerate(gpus):
        if kind == "cuda" and rest == str(position):
            return gpu, f"GPU-{uuid}"
        if kind != "cuda" and rest.lower() == uuid:
            return gpu, name
    found = ", ".join(f"GPU-{uuid}" for _, _, uuid in gpus) or "none"
    raise Unsupported(f"no GPU {name!r} is visible to this process", f"visible are: {found}")


def pci_and_uuid(driver: Driver, name: str) -> tuple[str, str]:
    """Return a GPU's PCI bus id, which the kernel's log uses, and its UUID."""
    gpu, uuid = find_gpu(driver, name)
    return _bus(driver, gpu), uuid


def _bus(driver: Driver, gpu: Any) -> str:
    return bytes(driver("cuDeviceGetPCIBusId", 32, gpu)).split(b"\0")[0].decode()


def refuse_unfit(driver: Driver, gpu: Any, name: str) -> None:
    """Raise, naming the reason, if the GPU's mode or driver cannot support memory that outlives processes."""
    mode = driver.attribute(gpu, "COMPUTE_MODE")
    modes = driver.api.CUcomputemode
    if mode == int(modes.CU_COMPUTEMODE_EXCLUSIVE_PROCESS):
        raise Unsupported(
            f"{name} is in exclusive-process mode, where a standby cannot have a context beside the active engine",
            "nvidia-smi -c DEFAULT",
        )
    if mode == int(modes.CU_COMPUTEMODE_PROHIBITED):
        raise Unsupported(f"{name} is in prohibited mode", "nvidia-smi -c DEFAULT")
    through_mps = driver.attribute(gpu, "MPS_ENABLED", unknown=-1)
    # If the driver does not report it, look for the daemon's pipe at its default path.
    if through_mps > 0 or (through_mps < 0 and _MPS_CONTROL.exists()):
        raise Unsupported(
            f"{name} is shared through MPS, where one engine's fault takes its neighbours with it",
            _WITHOUT_MPS,
        )
    for attribute in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        if not driver.attribute(gpu, attribute):
            raise Unsupported(f"{name} lacks {attribute}", "use a GPU and driver with virtual memory management")


def _uuid_text(raw: bytes) -> str:
    digits = raw.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


# Bytes per copy between host and GPU: large enough to hide the call's cost, small against an engine's host memory.
_PIECE_BYTES = 64 * 1024 * 1024
# Size of a scratch slab: mapping costs per piece (facts 5), and a standby keeps scratch as long as there is no pool.
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
        """Return the driver, with this GPU's primary context current in the calling thread."""
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
                driver("cuMemRelease", handle)  # from here on only the fd keeps the slab alive
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
                    self._ranges.add(SlabMapping(at, size, writable))
                    at += size
                # One call for all: changing access is the expensive part (facts 5).
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
            driver("cuMemRelease", handle)  # the mapping keeps the slab alive

    def scratch(self, address: int, size: int, own: Sequence[tuple[int, int]] = ()) -> None:
        """Map a few slabs repeatedly, and separate slabs for the parts in `own`."""
        self._ranges.check_scratch(address, size, own)
        again: dict[int, Any] = {}  # slabs mapped repeatedly, by size
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
                            driver("cuMemRelease", handle)  # the mapping keeps it alive
                    self._ranges.add(SlabMapping(address + at, length, writable=True))
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

    def _drop(self, driver: Driver, found: list[SlabMapping]) -> None:
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
                # The call may return when the bytes are staged, before they are on the GPU.
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


def _runs(mappings: list[SlabMapping]) -> list[tuple[int, int]]:
    """Return (address, size) of the ranges that adjacent mappings fill."""
    runs: list[tuple[int, int]] = []
    for one in mappings:
        if runs and sum(runs[-1]) == one.address:
            runs[-1] = (runs[-1][0], runs[-1][1] + one.size)
        else:
            runs.append((one.address, one.size))
    return runs
