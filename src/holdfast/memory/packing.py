"""Where tensors go: a plan of slabs from a list of sizes. Pure."""

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


def plan(
    specs: list[TensorSpec], slab_bytes: int, granularity: int, identity: str, meta: dict[str, str] | None = None
) -> Layout:
    """Fill slabs in order; a tensor larger than a slab gets one of its own size; the last slab is fitted."""
    places: list[TensorPlace] = []
    sizes: list[int] = []
    used = slab_bytes  # no slab yet
    for spec in specs:
        start = _up(used, ALIGNMENT)
        if start + spec.size_bytes > max(slab_bytes, sizes[-1] if sizes else 0) or not sizes:
            if sizes:
                sizes[-1] = _up(max(used, 1), granularity)
            sizes.append(max(slab_bytes, spec.size_bytes))
            start = 0
        places.append(
            TensorPlace(spec.name, len(sizes) - 1, start, spec.shape, spec.stride, spec.dtype, spec.size_bytes)
        )
        used = start + spec.size_bytes
    if sizes:
        sizes[-1] = _up(max(used, 1), granularity)
    return Layout(identity, tuple(sizes), tuple(places), meta or {})


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
