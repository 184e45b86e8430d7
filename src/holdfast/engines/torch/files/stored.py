"""Reads rows of a tensor as it lies in a file, and turns GGUF's block-quantised kinds back into fp32.

Always true: a read holds no more memory than the rows asked for, in their stored form and (for block-quantised kinds)
in fp32. Files are read, not mapped: a file cut short under us is then an error with a name, where a mapped one is a
SIGBUS; and the pages stay the page cache's, so that loading a large model does not swell this process. Where a tensor
lies is known without torch, which takes seconds to load: a model is looked at first.

A block is 32 numbers of a row: an fp16 scale (Q4_1: and an fp16 minimum), then the numbers as 4- or 8-bit integers.
Every number equals what ggml's reference gives, bit for bit: the same fp32 products and sums.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import UserError

if TYPE_CHECKING:
    import torch

# plain kind -> bytes of a number, and its name in torch
PLAIN = {"F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16")}
# block-quantised kind -> numbers in a block, bytes of a block
BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20)}
KINDS = (*PLAIN, *BLOCKS)

# Blocks at a time: half a megabyte of fp32, which stays in a core's cache over the few passes made over it.
_STRIDE = 4096


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor lies, under its Hugging Face name's shape."""

    kind: str  # one of KINDS
    shape: tuple[int, ...]
    path: Path
    offset: int
    # Rows of each head are stored in pairs (0, h/2, 1, h/2 + 1, …), as llama.cpp's rope wants them; 0: as they are.
    paired_head_size: int = 0

    @property
    def size(self) -> int:
        return self.shape[0] * self._row_bytes if self.shape else self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return bytes_of(self.kind, math.prod(self.shape[1:]))

    def read(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return rows `first` up to `last`, in stored precision; block-quantised kinds in fp32."""
        import torch  # here, not above: see the file's first paragraph

        last = self.shape[0] if last is None else last
        assert 0 <= first <= last <= self.shape[0], f"rows {first}:{last} of {self.shape}"
        raw = self._unpaired(first, last) if self.paired_head_size else self._rows(first, last)
        shape = (last - first, *self.shape[1:])
        plain = PLAIN.get(self.kind)
        if plain is not None:
            kind = getattr(torch, plain[1])
            return torch.from_numpy(np.ascontiguousarray(raw).reshape(-1)).view(kind).reshape(shape)
        return torch.from_numpy(dequantise(self.kind, raw)).reshape(shape)

    def numbers(self) -> list[float]:
        """Return all of a small fp32 vector, without torch."""
        assert self.kind == "F32", self.kind
        return [float(number) for number in read_bytes(self.path, self.offset, self.size).view(np.float32)]

    def _rows(self, first: int, last: int) -> NDArray[np.uint8]:
        data = read_bytes(self.path, self.offset + first * self._row_bytes, (last - first) * self._row_bytes)
        return data.reshape(last - first, self._row_bytes)

    def _unpaired(self, first: int, last: int) -> NDArray[np.uint8]:
        """Reorder the stored bytes by whole heads: stored row 2j + t of a head is its row t · h/2 + j (fact 26)."""
        head = self.paired_head_size
        start, stop = first // head * head, -(-last // head) * head
        rows = self._rows(start, stop).reshape(-1, head // 2, 2, self._row_bytes)
        return rows.swapaxes(1, 2).reshape(-1, self._row_bytes)[first - start : last - start]


def bytes_of(kind: str, numbers: int) -> int:
    """Return how many bytes so many numbers take; ValueError if they do not fill whole blocks."""
    if kind in PLAIN:
        return numbers * PLAIN[kind][0]
    block_numbers, block_bytes = BLOCKS[kind]
    if numbers % block_numbers:
        raise ValueError(f"rows of {numbers} numbers cannot be {kind}, which comes in blocks of {block_numbers}")
    return numbers // block_numbers * block_bytes


def read_bytes(path: Path, offset: int, size: int) -> NDArray[np.uint8]:
    """Return exactly these bytes; UserError if the file is gone or ends before them."""
    data = np.empty(size, np.uint8)
    view = data.data
    done = 0
    try:
        with path.open("rb") as file:
            while done < size:  # ends: each call gives a byte or more (2 GiB at most), or says that there are none
                got = os.preadv(file.fileno(), [view[done:]], offset + done)
                if not got:
                    raise UserError(f"{path} ends {size - done} bytes before its tensors do: it is cut short")
                done += got
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return data


def dequantise(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Convert whole rows of blocks, as bytes, to their numbers, in a flat array."""
    numbers, size = BLOCKS[kind]
    blocks = raw.reshape(-1, size)
    out = np.empty((len(blocks), numbers), np.float32)
    for start in range(0, len(blocks), _STRIDE):
        _dequantise(kind, blocks[start : start + _STRIDE], out[start : start + _STRIDE])
    return out.reshape(-1)


def _dequantise(kind: str, blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    if kind == "Q8_0":
        out[:] = blocks[:, 2:].view(np.int8)
    else:
        out[:] = _nibbles(blocks[:, 4 if kind == "Q4_1" else 2 :])
    if kind == "Q4_0":
        out -= 8
    out *= _half(blocks, 0)
    if kind == "Q4_1":
        out += _half(blocks, 2)


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """Return the fp16 number at a byte of every block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack nibbles: low halves are a block's first 16 numbers, high halves its last 16."""
    apart = np.empty((len(packed), 32), np.uint8)
    np.bitwise_and(packed, 15, out=apart[:, :16])
    np.right_shift(packed, 4, out=apart[:, 16:])
    return apart
