"""Where tensors go: a plan of slabs from a list of sizes. Pure.

Always true: tensors overlap only where their specs say that they share bytes; what shares bytes lies in one slab.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.memory.layout import Layout, TensorPlace

# Tensor cores and vectorised loads want aligned starts; 512 is more than any of them asks for.
ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be placed; shape and stride in elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    size_bytes: int
    # Tensors that name the same `shared` keep their distances: each starts `shared_at` bytes into it (tied weights: 0).
    shared: str = ""
    shared_at: int = 0


def plan(
    specs: list[TensorSpec], slab_bytes: int, granularity: int, identity: str, meta: dict[str, str] | None = None
) -> Layout:
    """Fill slabs in order; a tensor larger than a slab gets one of its own size; the last slab is fitted."""
    places: list[TensorPlace] = []
    sizes: list[int] = []
    extents = _extents(specs)
    starts: dict[str, tuple[int, int]] = {}  # of what is shared: slab, offset
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
        places.append(_placed(spec, *at))
    if sizes:
        sizes[-1] = _up(max(used, 1), granularity)
    return Layout(identity, tuple(sizes), tuple(places), meta or {})


def _extents(specs: list[TensorSpec]) -> dict[str, int]:
    """How many bytes each shared piece has."""
    extents: dict[str, int] = {}
    for spec in specs:
        if spec.shared:
            extents[spec.shared] = max(extents.get(spec.shared, 0), spec.shared_at + spec.size_bytes)
    return extents


def _placed(spec: TensorSpec, slab: int, start: int) -> TensorPlace:
    offset = start + spec.shared_at
    return TensorPlace(spec.name, slab, offset, spec.shape, spec.stride, spec.dtype, spec.size_bytes)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
