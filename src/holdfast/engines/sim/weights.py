"""The sim engine's weights: bytes that follow from their identity, so that anybody can say what they must be.

Word i is (i + seed) * ODD modulo 2**64; a tensor starts where the one before it ended. Their sum is known ahead and
kept in the layout, so a reader can verify everything it maps. The first tensor is the *head*: every step reads a word
of it, and a word that is not what it must be makes wrong tokens, as damaged weights would.

numpy is imported by engines with a vault only: a worker without one starts without it.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from holdfast.memory.client.mapped import Mapped
from holdfast.memory.devices import view
from holdfast.memory.packing import TensorSpec

MIB = 1024 * 1024
ODD = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
WORD_BYTES = 8
HEAD_WORDS = 512
HEAD = "head"
BODY_TENSORS = 4
PIECE_WORDS = MIB // WORD_BYTES  # fits a core's cache: filling and adding run at the memory's speed
BYTES_MIN = 2 * MIB  # one slab on any device
SUM = "sum"  # its name in the layout's meta


class SimWeights:
    """What is to be written, and whether what is mapped is it."""

    def __init__(self, revision: str, total_bytes: int) -> None:
        total_bytes = max(BYTES_MIN, total_bytes // (2 * MIB) * (2 * MIB))
        self.identity = f"{revision}, {total_bytes} bytes"
        self.seed = int.from_bytes(blake2b(self.identity.encode(), digest_size=8).digest(), "little")
        self.specs = _specs(total_bytes // WORD_BYTES)
        self._words = sum(spec.shape[0] for spec in self.specs)
        self.meta = {SUM: f"{self._sum():016x}"}
        self._head: memoryview | None = None
        self._right = tuple((place + self.seed) * ODD & MASK for place in range(HEAD_WORDS))
        self._at = 0

    def _sum(self) -> int:
        count = self._words
        return (count * (count - 1) // 2 + count * self.seed) * ODD & MASK

    # -- written and verified, in a thread

    def fill(self, addresses: dict[str, int]) -> None:
        piece = np.arange(PIECE_WORDS, dtype=np.uint64) * np.uint64(ODD)
        first = 0
        for spec in self.specs:
            words = _array(addresses[spec.name], spec.shape[0], writable=True)
            for start in range(0, len(words), PIECE_WORDS):
                part = words[start : start + PIECE_WORDS]
                offset = np.uint64((first + start + self.seed) * ODD & MASK)
                np.add(piece[: len(part)], offset, out=part)
            first += spec.shape[0]

    def verify(self, mapped: Mapped) -> str:
        """Read everything: why it is not what it should be, or nothing."""
        if mapped.layout.identity != self.identity or mapped.layout.meta != self.meta:
            return f"it is {mapped.layout.identity}, not {self.identity}"
        addresses = mapped.addresses()
        total = 0
        for place in mapped.layout.tensors:
            words = _array(addresses[place.name], place.shape[0])
            total += int(np.sum(words, dtype=np.uint64))
        found = f"{total & MASK:016x}"
        return "" if found == self.meta[SUM] else f"its words add up to {found}, not {self.meta[SUM]}"

    # -- read by every step

    def use(self, mapped: Mapped | None) -> None:
        """From now on steps read what is mapped here; None: nothing is."""
        if self._head is not None:
            self._head.release()
        address = mapped.addresses()[HEAD] if mapped is not None else 0
        self._head = view(address, HEAD_WORDS * WORD_BYTES).cast("Q") if mapped is not None else None

    def right(self) -> bool:
        """Read the next word of the head."""
        assert self._head is not None, "no weights are mapped"
        at = self._at
        self._at = (at + 1) % HEAD_WORDS
        return bool(self._head[at] == self._right[at])


def _specs(words: int) -> list[TensorSpec]:
    body = words - HEAD_WORDS
    each = body // BODY_TENSORS
    sizes = {HEAD: HEAD_WORDS} | {f"layers.{layer}": each for layer in range(BODY_TENSORS)}
    sizes[f"layers.{BODY_TENSORS - 1}"] += body - each * BODY_TENSORS
    return [TensorSpec(name, (size,), (1,), "uint64", size * WORD_BYTES) for name, size in sizes.items()]


def _array(address: int, words: int, *, writable: bool = False) -> NDArray[np.uint64]:
    return np.frombuffer(view(address, words * WORD_BYTES, writable=writable), np.uint64)
