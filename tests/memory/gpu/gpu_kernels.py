"""Two kernels: one fills memory with words that tell slab and place, one counts the words that are wrong.

At the memory's speed, so that every byte of 120 GiB can be verified. Handed an address that is not mapped, `fill` is
the illegal access of an engine gone wrong (Xid 31).
"""

from __future__ import annotations

import ctypes
from typing import Any

from holdfast.memory.devices.cuda_driver import Driver, find_gpu

BLOCKS, THREADS = 1024, 256
WORD_BYTES = 4

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


class Kernels:
    """The kernels, loaded into the primary context, which stays current in this thread."""

    def __init__(self, gpu: str) -> None:
        self.driver = Driver()
        device, _ = find_gpu(self.driver, gpu)
        self.driver("cuCtxSetCurrent", self.driver("cuDevicePrimaryCtxRetain", device))
        module = self.driver("cuModuleLoadData", PTX.encode() + b"\0")
        self._fill: Any = self.driver("cuModuleGetFunction", module, b"fill")
        self._check: Any = self.driver("cuModuleGetFunction", module, b"check")
        self._wrong = int(self.driver("cuMemAlloc", 8))

    def _launch(self, kernel: Any, address: int, size: int, seed: int) -> None:
        values = (address, size // WORD_BYTES, seed & 0xFFFFFFFF, self._wrong)
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        self.driver("cuLaunchKernel", kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, 0, (values, types), 0)

    def fill(self, slabs: list[tuple[int, int]], seed: int) -> None:
        """Fill (address, size) slabs, each with a seed of its own, and wait until it is done."""
        for number, (address, size) in enumerate(slabs):
            self._launch(self._fill, address, size, seed + 7919 * number)
        self.driver("cuCtxSynchronize")

    def count_wrong(self, slabs: list[tuple[int, int]], seed: int) -> int:
        """How many words of the slabs are not what `fill` wrote."""
        self.driver("cuMemsetD8", self._wrong, 0, 8)
        for number, (address, size) in enumerate(slabs):
            self._launch(self._check, address, size, seed + 7919 * number)
        count = ctypes.c_uint64()
        self.driver("cuMemcpyDtoH", ctypes.addressof(count), self._wrong, 8)
        return count.value
