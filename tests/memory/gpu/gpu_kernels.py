"""Two kernels: one fills memory with words that tell slab and place, one counts the words that are wrong.

At the memory's speed, so that every byte of 120 GiB can be verified. Handed an address that is not mapped, `fill` is
the illegal access of an engine gone wrong (Xid 31).
"""

from __future__ import annotations

import ctypes
from typing import Any

from bench.gpu_kernels import PTX
from holdfast.memory.devices.cuda_driver import Driver, find_gpu

BLOCKS, THREADS = 1024, 256
WORD_BYTES = 4


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
