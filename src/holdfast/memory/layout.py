"""The layout of the weights: where each tensor lies in the slabs, the layout's hash, and the plan that places them.
Pure.

Always true:
- Every tensor lies inside one slab; tensors that share bytes lie in the same slab.
- Tensors overlap only if their specs say so.
- The layout hash covers structure *and* content identity, so a remap never confuses two sets of weights that have the
  same shapes but other values.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

# An 8B model has ~300 tensors, a large mixture of experts some ten thousand. Bounds the vault's metadata.
TENSORS_MAX = 100_000
SLABS_MAX = 4096
NAME_BYTES_MAX = 512
DIMENSIONS_MAX = 16
# Tensor cores and vectorised loads need aligned starts; none needs more than 512.
ALIGNMENT = 512

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class TensorLocation(msgspec.Struct, frozen=True, array_like=True):
    """A tensor inside a slab; shape and stride in elements."""

    name: str
    slab: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    size_bytes: int  # from its first to its last byte


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """One set of weights: `identity` names the content (a revision or content hash, with quantisation and dtype)."""

    identity: str
    slab_sizes: tuple[int, ...]
    tensors: tuple[TensorLocation, ...]
    meta: dict[str, str] = {}
    # When it was written, in unix milliseconds: grows with every new load, also across restarts of vault and keeper.
    load: int = 0

    def hash(self) -> str:
        """Return 32 hex digits over all fields except `load`, so that the same weights, loaded again, have the same
        hash."""
        same = _encode((self.identity, self.slab_sizes, self.tensors, self.meta))
        return hashlib.blake2b(same, digest_size=16).hexdigest()

    def problem(self) -> str | None:
        """Return why this layout cannot be committed, or None."""
        if not self.identity:
            return "layout has no content identity"
        if len(self.slab_sizes) > SLABS_MAX:
            return f"layout has {len(self.slab_sizes)} slabs, at most {SLABS_MAX} are kept"
        if len(self.tensors) > TENSORS_MAX:
            return f"layout has {len(self.tensors)} tensors, at most {TENSORS_MAX} are kept"
        seen: set[str] = set()
        for tensor in self.tensors:
            wrong = self._misplaced(tensor)
            if tensor.name in seen:
                wrong = "its name is there twice"
            if wrong:
                return f"tensor {tensor.name[:100]!r}: {wrong}"
            seen.add(tensor.name)
        return None

    def _misplaced(self, tensor: TensorLocation) -> str | None:
        if not tensor.name or len(tensor.name.encode()) > NAME_BYTES_MAX:
            return f"its name must have 1 to {NAME_BYTES_MAX} bytes"
        if len(tensor.shape) > DIMENSIONS_MAX or len(tensor.shape) != len(tensor.stride):
            return f"shape and stride must have the same number of dimensions, at most {DIMENSIONS_MAX}"
        if min((*tensor.shape, *tensor.stride, tensor.offset, tensor.size_bytes)) < 0:
            return "negative numbers in its place"
        if not 0 <= tensor.slab < len(self.slab_sizes):
            return f"slab {tensor.slab} does not exist"
        if tensor.offset + tensor.size_bytes > self.slab_sizes[tensor.slab]:
            return f"it ends beyond its slab of {self.slab_sizes[tensor.slab]} bytes"
        return None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be placed; shape and stride in elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    size_bytes: int
    # Tensors with the same `shared` lie in one piece: each starts `shared_at` bytes into it (tied weights: 0).
    shared: str = ""
    shared_at: int = 0


def plan(
    specs: list[TensorSpec], slab_bytes: int, granularity: int, identity: str, meta: dict[str, str] | None = None
) -> Layout:
    """Place tensors in slabs, in order. A tensor larger than a slab gets its own; the last slab is cut to fit."""
    locations: list[TensorLocation] = []
    sizes: list[int] = []
    extents: dict[str, int] = {}  # bytes of each shared piece
    for spec in specs:
        if spec.shared:
            extents[spec.shared] = max(extents.get(spec.shared, 0), spec.shared_at + spec.size_bytes)
    starts: dict[str, tuple[int, int]] = {}  # of each shared piece: slab, offset
    used = slab_bytes  # no slab yet
    for spec in specs:
        if spec.shared not in starts:
            size = extents[spec.shared] if spec.shared else spec.size_bytes
            start = _up(used, ALIGNMENT)
            if start + size > max(slab_bytes, sizes[-1] if sizes else 0) or not sizes:
                if sizes:
                    sizes[-1] = _up(max(used, 1), granularity)
                sizes.append(max(slab_bytes, size))
                start = 0
            used = start + size
            at = (len(sizes) - 1, start)
            if spec.shared:
                starts[spec.shared] = at
        else:
            at = starts[spec.shared]
        slab, offset = at[0], at[1] + spec.shared_at
        locations.append(TensorLocation(spec.name, slab, offset, spec.shape, spec.stride, spec.dtype, spec.size_bytes))
    if sizes:
        sizes[-1] = _up(max(used, 1), granularity)
    return Layout(identity, tuple(sizes), tuple(locations), meta or {})


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
