"""GGUF's block-quantised kinds, back to fp32.

A block is 32 numbers of a row: an fp16 scale (Q4_1: and an fp16 minimum), then the numbers as 4- or 8-bit integers.
Always true: every number equals what ggml's reference gives, bit for bit: the same fp32 products and sums.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# kind -> numbers in a block, bytes of a block
BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20)}

# Blocks at a time: half a megabyte of fp32, which stays in a core's cache over the few passes made over it.
_STRIDE = 4096


def dequantise(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Whole rows of blocks, as bytes, to their numbers, in a flat array."""
    numbers, size = BLOCKS[kind]
    blocks = raw.reshape(-1, size)
    out = np.empty((len(blocks), numbers), np.float32)
    into = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}[kind]
    for start in range(0, len(blocks), _STRIDE):
        into(blocks[start : start + _STRIDE], out[start : start + _STRIDE])
    return out.reshape(-1)


def _q8_0(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_0(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    out[:] = _nibbles(blocks[:, 2:])
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    out[:] = _nibbles(blocks[:, 4:])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The fp16 number at a byte of every block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Low halves are a block's first 16 numbers, high halves its last 16."""
    apart = np.empty((len(packed), 32), np.uint8)
    np.bitwise_and(packed, 15, out=apart[:, :16])
    np.right_shift(packed, 4, out=apart[:, 16:])
    return apart
