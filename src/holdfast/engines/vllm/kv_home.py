"""The address range of vLLM's KV cache: it never moves, and a pool's pages or scratch memory are mapped there.

vLLM makes its cache once, by `torch.zeros`, and its captured graphs contain the addresses. So Holdfast gives it tensors
over a fixed range and does not zero them: existing content survives. vLLM's warm-up writes real blocks, so scratch is
mapped until it ends; then the pool is mapped.

Always true: the range is as long as vLLM asks for, and every byte of its cache is in it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from holdfast.core.errors import Refused, UserError
from holdfast.engines.paged.blocks import blocks_for
from holdfast.engines.vllm.canary import private_blocks
from holdfast.engines.vllm.hollow import ScratchMemory
from holdfast.engines.vllm.hooks import installed
from holdfast.kv.geometry import Geometry
from holdfast.memory.client.pool import Home
from holdfast.memory.torch.tensors import dtype_name, storage_at, tensor_in

ALIGNMENT = 512
SLOTS = 8  # engines at one pool, each with private blocks: more than ever run at the same time


@dataclass(frozen=True, slots=True)
class KvHomePlan:
    """The division of vLLM's blocks. Block 0 is vLLM's null block. The last ones are private: some for each standby,
    for its canary. All others are the pool's."""

    shared: int
    private_first: int
    private_count: int

    @classmethod
    def of(cls, blocks: int, each: int, slots: int, slot: int) -> KvHomePlan:
        if slot >= slots:
            raise UserError(f"an engine of vLLM has an ENGINE_ID of 0 to {slots - 1}, got {slot}")
        shared = blocks - 1 - each * slots
        if shared < 1:
            taken = 1 + each * slots
            raise Refused(f"the KV pool has {blocks} blocks, of which {taken} are spoken for: use more --kv-gib")
        return cls(shared, 1 + shared + each * slot, each)


def parts_of(view: torch.Tensor, blocks: int, first: int, count: int) -> list[tuple[int, int]]:
    """Return the address and size of each contiguous part of some blocks of a layer's cache. The block dimension is the
    outermost one with `blocks` entries, or a multiple if the kernel uses smaller blocks."""
    dimensions = [(size, stride * view.element_size()) for size, stride in zip(view.shape, view.stride(), strict=True)]
    size, stride = max((each for each in dimensions if each[0] % blocks == 0), key=lambda each: each[1])
    block = size // blocks * stride
    outer = [range(0, many * step, step) for many, step in dimensions if step > stride]
    return [(view.data_ptr() + sum(steps) + first * block, count * block) for steps in itertools.product(*outer)]


def in_granules(parts: Iterable[tuple[int, int]], start: int, granule: int) -> tuple[tuple[int, int], ...]:
    """Return the granules that these parts touch, as (offset from `start`, size), sorted and disjoint."""
    runs: list[tuple[int, int]] = []
    for address, size in sorted(parts):
        begin, end = (address - start) // granule * granule, _up(address - start + size, granule)
        if runs and begin <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((begin, end))
    return tuple((begin, end - begin) for begin, end in runs)


def layout_of(views: Sequence[torch.Tensor], start: int) -> str:
    """Return a name for the layers' memory layout from `start` on. It does not follow from vLLM's options alone:
    environment variables and installed packages decide on the backend too."""
    said = [(str(each.dtype), each.data_ptr() - start, tuple(each.shape), each.stride()) for each in views]
    return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()


class Backing(TorchFunctionMode):
    """While entered, makes `torch.zeros` of the cache's sizes return memory at a fixed address, not zeroed."""

    def __init__(self, home: Home, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self._sizes, self._device = list(sizes), device
        self._at = home.address

    @property
    def left(self) -> list[int]:
        return self._sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.zeros and self._sizes and args[:1] == (self._sizes[0],) and given.get("dtype") is torch.int8:
            return self._next()
        return func(*args, **given)

    def _next(self) -> torch.Tensor:
        size = self._sizes.pop(0)
        storage = storage_at(self._at, size, self._device, self)
        self._at += _up(size, ALIGNMENT)
        return tensor_in(storage, torch.int8, 0, (size,), (1,))


@dataclass(slots=True)
class KvHome:
    """The address range of one engine's KV cache, made when vLLM knows the cache's shape."""

    device: torch.device
    ground: ScratchMemory
    slot: int  # this engine's number among those at the pool
    direct: bool  # no engine adopts its blocks, so any kind will do; its first ones are private until there is a pool
    home: Home | None = None
    config: Any = None  # vLLM's KVCacheConfig
    _layout: str = ""
    _backing: Backing | None = field(default=None, repr=False)

    def backing(self, kv_cache_config: Any) -> Backing:
        """Return the context to enter while vLLM makes its cache."""
        self.config = kv_cache_config
        tensors = kv_cache_config.kv_cache_tensors
        if all(hasattr(tensor, "layers") or tensor.block_stride for tensor in tensors):
            tensors = tensors[:1]  # all are views of one
        sizes = [tensor.size for tensor in tensors]
        size = _up(sum(_up(size, ALIGNMENT) for size in sizes), self.ground.device.granularity)
        self.home = Home(self.ground.reserve(size), size)
        self._backing = Backing(self.home, sizes, self.device)
        return self._backing

    def made(self, views: Iterable[torch.Tensor]) -> None:
        """Note the layers of the cache that vLLM made: while there is no pool, this engine's private blocks have their
        own memory."""
        if self.home is None or self._backing is None or self._backing.left:
            raise UserError("this vLLM makes its KV cache in another way than is known here; it cannot be served")
        plan, views = self.plan, list(views)
        self._layout = layout_of(views, self.home.address)
        private = plan.private_first, plan.private_count
        parts = [part for view in views for part in parts_of(view, self.config.num_blocks, *private)]
        self.home = replace(self.home, own=in_granules(parts, self.home.address, self.ground.device.granularity))

    @property
    def block_tokens(self) -> int:
        return int(self.config.kv_cache_groups[0].kv_cache_spec.block_size)

    def stream_blocks_max(self, context_tokens: int) -> int:
        """Return the blocks that a single stream can have; with direct KV, vLLM's scheduler ensures that any text
        fits."""
        return blocks_for(context_tokens, self.block_tokens) if self.direct else self.plan.shared

    @property
    def plan(self) -> KvHomePlan:
        if self.direct:
            sizes = [group.kv_cache_spec.block_size for group in self.config.kv_cache_groups]
            return KvHomePlan(self.config.num_blocks - 1, 1, sum(1 + private_blocks(size) for size in sizes))
        return KvHomePlan.of(self.config.num_blocks, private_blocks(self.block_tokens), SLOTS, self.slot)

    def geometry(self, weights: str, *, rank: int = 0, ranks: int = 1) -> Geometry:
        """Return the pool's geometry; its `layout` covers all that shapes a page and has no field."""
        assert self.home is not None, "vLLM has made its cache"
        layout = f"vllm {installed()}, {self.config.num_blocks} blocks in {self.home.size} bytes, {self._layout}"
        if self.direct:  # no engine adopts it, and only vLLM knows its pages
            return Geometry(weights, "uint8", self.block_tokens, 1, 1, 1, self.plan.shared, rank, ranks, layout=layout)
        (group,) = self.config.kv_cache_groups
        spec = group.kv_cache_spec
        return Geometry(
            weights=weights,
            dtype=dtype_name(spec.dtype),
            block_tokens=spec.block_size,
            layers=len(group.layer_names),
            kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            block_count=self.plan.shared,
            rank=rank,
            rank_count=ranks,
            layout=layout,
        )


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
