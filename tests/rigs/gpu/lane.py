"""Work on a device: fill memory with words that tell seed and place, count the words that are wrong, copy, take.

A filled piece's word number n is n * STEP + seed, so every word tells the seed it was last written with. On a GPU these
are kernels (as PTX: no compiler is needed where they run) at the memory's speed, so that every byte of 120 GiB can be
verified, queued in order; on the host they are done at once, and nothing outlives its process.
Always true: what is queued is over when `synchronize` returns; `take` takes all or nothing.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.memory.devices import OutOfMemory, view
from holdfast.memory.devices.cuda import Driver, find_gpu
from holdfast.spec.names import is_host

STEP = 0x9E3779B1
WORD_BYTES = 4
# Blocks and threads of a launch: all of the GPU, or one warp, so that a short queue takes long.
WIDE, THIN = (1024, 256), (1, 32)
# Direct memory comes in pieces of this size: few calls, and none larger than what fragments leave.
TAKE_BYTES = 4 * 1024**3

Piece = tuple[int, int, int]  # address, size, seed
Words = NDArray[np.uint32]


_HEAD = """
.visible .entry {name}(.param .u64 at, .param .u64 words, .param .u32 seed, .param .u64 wrong)
{{
    .reg .pred %p<3>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [at];
    ld.param.u64 %rd2, [words];
    ld.param.u32 %r1, [seed];
    ld.param.u64 %rd8, [wrong];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mov.u32 %r5, %nctaid.x;
    cvt.u64.u32 %rd4, %r4;
    mad.wide.u32 %rd3, %r2, %r3, %rd4;
    mul.wide.u32 %rd5, %r5, %r3;
NEXT:
    setp.ge.u64 %p1, %rd3, %rd2;
    @%p1 bra DONE;
    cvt.u32.u64 %r6, %rd3;
    mad.lo.u32 %r7, %r6, 0x9E3779B1, %r1;
    shl.b64 %rd6, %rd3, 2;
    add.u64 %rd6, %rd1, %rd6;
    {body}
    add.u64 %rd3, %rd3, %rd5;
    bra NEXT;
DONE:
    ret;
}}
"""
_FILL = "st.global.u32 [%rd6], %r7;"
_CHECK = """ld.global.u32 %r8, [%rd6];
    setp.ne.u32 %p2, %r8, %r7;
    @%p2 red.global.add.u64 [%rd8], 1;"""
PTX = (
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    + _HEAD.format(name="fill", body=_FILL)
    + _HEAD.format(name="check", body=_CHECK)
)


class CudaLane:
    """One process's work on a GPU, in order; its primary context stays current in the threads that use it."""

    def __init__(self, gpu: str) -> None:
        self._driver = Driver()
        device, _ = find_gpu(self._driver, gpu)
        self._context: Any = self._driver("cuDevicePrimaryCtxRetain", device)
        self.bind()
        module = self._driver("cuModuleLoadData", PTX.encode() + b"\0")
        self._fill: Any = self._driver("cuModuleGetFunction", module, b"fill")
        self._check: Any = self._driver("cuModuleGetFunction", module, b"check")
        self._wrong = self.scratch(8)

    def bind(self) -> None:
        """To be called first in every thread but the one that made it."""
        self._driver("cuCtxSetCurrent", self._context)

    def _launch(self, kernel: Any, piece: Piece, grid: tuple[int, int]) -> None:
        address, size, seed = piece
        blocks, threads = grid
        values = (address, size // WORD_BYTES, seed & 0xFFFFFFFF, self._wrong)
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        self._driver("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, 0, (values, types), 0)

    def fill(self, address: int, size: int, seed: int, grid: tuple[int, int] = WIDE) -> None:
        """Queue a fill."""
        self._launch(self._fill, (address, size, seed), grid)

    def read_through(self, address: int, size: int, seed: int) -> None:
        """Queue a read of everything; what it finds is not asked for."""
        self._launch(self._check, (address, size, seed), WIDE)

    def copy(self, to: int, source: int, size: int) -> None:
        """Queue a copy within the device."""
        self._driver("cuMemcpyDtoDAsync", to, source, size, 0)

    def count_wrong(self, pieces: Sequence[Piece]) -> int:
        """How many words of the pieces are not what `fill` wrote; waits."""
        self._driver("cuMemsetD8", self._wrong, 0, 8)
        for piece in pieces:
            self._launch(self._check, piece, WIDE)
        count = ctypes.c_uint64()
        self._driver("cuMemcpyDtoH", ctypes.addressof(count), self._wrong, 8)
        return count.value

    def words(self, address: int, size: int) -> Words:
        """A copy in host memory; waits."""
        found: Words = np.empty(size // WORD_BYTES, np.uint32)
        self._driver("cuMemcpyDtoH", found.ctypes.data, address, size)
        return found

    def scratch(self, size: int) -> int:
        """Private memory, for as long as the process lives."""
        return int(self._driver("cuMemAlloc", size))

    def synchronize(self) -> None:
        self._driver("cuCtxSynchronize")

    def free_bytes(self) -> int:
        free, _ = self._driver("cuMemGetInfo")
        return int(free)

    def take(self, total: int) -> list[tuple[int, int]]:
        """Direct memory as (address, size), every byte touched; OutOfMemory, and nothing taken."""
        taken: list[tuple[int, int]] = []
        try:
            for start in range(0, total, TAKE_BYTES):
                size = min(TAKE_BYTES, total - start)
                taken.append((int(self._driver("cuMemAlloc", size)), size))
        except OutOfMemory:
            for address, _ in taken:
                self._driver("cuMemFree", address)
            raise
        for address, size in taken:
            self._driver("cuMemsetD8Async", address, 0x5A, size, 0)
        self.synchronize()
        return taken


class HostLane:
    """The same on the host, a stand-in without a queue: work is done when its call returns."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []

    def bind(self) -> None:
        pass

    def fill(self, address: int, size: int, seed: int, grid: tuple[int, int] = WIDE) -> None:
        _words_at(address, size, writable=True)[:] = _pattern(size, seed)

    def read_through(self, address: int, size: int, seed: int) -> None:
        _words_at(address, size).max()

    def copy(self, to: int, source: int, size: int) -> None:
        _words_at(to, size, writable=True)[:] = _words_at(source, size)

    def count_wrong(self, pieces: Sequence[Piece]) -> int:
        return sum(
            int(np.count_nonzero(_words_at(address, size) != _pattern(size, seed))) for address, size, seed in pieces
        )

    def words(self, address: int, size: int) -> Words:
        return _words_at(address, size).copy()

    def scratch(self, size: int) -> int:
        return self.take(size)[0][0]

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        """The stand-in's direct memory is this process's own; there is no shared device to run out of."""
        return 1 << 62

    def take(self, total: int) -> list[tuple[int, int]]:
        self._kept.append(mmap.mmap(-1, total))
        whole = np.frombuffer(self._kept[-1], np.uint8)
        whole[:] = 0x5A
        return [(whole.ctypes.data, total)]


def _words_at(address: int, size: int, *, writable: bool = False) -> Words:
    return np.frombuffer(view(address, size, writable=writable), np.uint32)


def _pattern(size: int, seed: int) -> Words:
    return np.arange(size // WORD_BYTES, dtype=np.uint32) * np.uint32(STEP) + np.uint32(seed & 0xFFFFFFFF)


def open_lane(device: str) -> CudaLane | HostLane:
    """The lane of a device's name, in the calling thread."""
    return HostLane() if is_host(device) else CudaLane(device)
