"""What lies where in the weights' slabs: tensors, slabs, and the hash that names them.

Always true: every tensor lies inside one slab; the layout hash covers structure *and* content identity, so two sets of
weights with the same shapes but other values never look alike to a remap.
"""

from __future__ import annotations

import hashlib

import msgspec

# An 8B model has ~300 tensors, a large mixture of experts some ten thousand; metadata must stay small in the vault.
TENSORS_MAX = 100_000
SLABS_MAX = 4096
NAME_BYTES_MAX = 512
DIMENSIONS_MAX = 16


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
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
    tensors: tuple[TensorPlace, ...]
    meta: dict[str, str] = {}
    # When it was written, in unix milliseconds: grows with every fresh load, wherever the vault and its keeper go.
    load: int = 0

    def hash(self) -> str:
        """32 hex digits over everything but the load: the same weights, loaded again, are the same weights."""
        same = _encode((self.identity, self.slab_sizes, self.tensors, self.meta))
        return hashlib.blake2b(same, digest_size=16).hexdigest()

    def problem(self) -> str | None:
        """Why this layout cannot be committed, or None."""
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

    def _misplaced(self, tensor: TensorPlace) -> str | None:
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


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
