"""The geometry of a KV pool, and the keys that identify the contents of its blocks.

Two processes may share KV pages only if every field of `Geometry` is equal: otherwise they would misread the bytes. So
the hash covers all fields, the index header repeats them, and every sum in the index is keyed with them. A block's
*key* identifies its content: a hash chain over all tokens up to the block's end. The chain starts from the geometry
without the rank, so all ranks of one engine give a block the same key.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b

KEY_BYTES = 16  # so that an index entry is one cache line of 64 bytes
# An index of 2**24 entries takes 1 GiB; a larger count is a bug in the caller.
BLOCK_COUNT_MAX = 2**24
ITEM_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "uint8": 8}


@dataclass(frozen=True)
class Geometry:
    """Shape and identity of one rank's KV pool. `layout`: order of a page's axes; `rope`: position encoding."""

    weights: str  # content identity of the weights
    dtype: str
    block_tokens: int
    layers: int
    kv_heads: int  # of this rank
    head_size: int
    block_count: int  # blocks of the shared pool; an engine's private blocks come after them and are not counted
    rank: int = 0
    rank_count: int = 1
    rope: str = ""
    layout: str = ""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "layers", "kv_heads", "head_size", "block_count", "rank_count"):
            if getattr(self, name) < 1:
                raise ValueError(f"a KV pool needs {name} of at least 1, got {getattr(self, name)}")
        if self.block_count > BLOCK_COUNT_MAX:
            raise ValueError(f"a KV pool has at most {BLOCK_COUNT_MAX} blocks, got {self.block_count}; use larger ones")
        if not 0 <= self.rank < self.rank_count:
            raise ValueError(f"rank {self.rank} is not one of {self.rank_count}")
        if self.dtype not in ITEM_BITS:
            raise ValueError(f"unknown KV dtype {self.dtype!r}; one of {', '.join(ITEM_BITS)}")

    @cached_property
    def text(self) -> bytes:
        """Return all fields as JSON with sorted keys. It is hashed, and stored readable in the index header."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def hash(self) -> bytes:
        return blake2b(self.text, digest_size=16, person=b"kv-geometry").digest()

    @cached_property
    def sum_key(self) -> int:
        """Return the seed of the entries' sums, so that an entry of another geometry never has a correct sum."""
        return int.from_bytes(blake2b(self.hash, digest_size=8, person=b"kv-sum").digest(), "little")

    @property
    def block_bytes(self) -> int:
        """Return the size of one block's keys and values over all layers on this rank (scale tensors not counted)."""
        items = 2 * self.layers * self.kv_heads * self.head_size * self.block_tokens
        return items * ITEM_BITS[self.dtype] // 8

    def root(self) -> bytes:
        """Return the parent key of a sequence's first block."""
        fields = {name: value for name, value in asdict(self).items() if name != "rank"}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return blake2b(text, digest_size=KEY_BYTES, person=b"kv-root").digest()


def block_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return the keys of all *full* blocks of a sequence, first block first."""
    packed = memoryview(array("I", tokens)).cast("B")
    step = block_tokens * 4
    keys: list[bytes] = []
    parent = root
    for start in range(0, len(packed) - step + 1, step):
        parent = blake2b(parent + packed[start : start + step], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys
