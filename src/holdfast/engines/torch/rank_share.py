"""One rank's share of a model: what it is told to hold, and the computer over it. The same for leader and others.

Always true: all ranks of an engine have the same settings, number of blocks and arithmetic; only the place and the
rank's number differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from holdfast.engines.place import Place
from holdfast.engines.torch.checkpoint import Checkpoint
from holdfast.engines.torch.linear import AllReduce
from holdfast.engines.torch.model import Model, arithmetic_for, bind
from holdfast.engines.torch.paged import kv_view
from holdfast.engines.torch.settings import TorchSettings
from holdfast.engines.torch.stepper import threads_for
from holdfast.memory.kv.geometry import Geometry
from holdfast.memory.torch_tensors import storage_at, tensor_in


@dataclass(frozen=True, slots=True)
class RankWork:
    checkpoint: Checkpoint
    settings: TorchSettings
    place: Place
    geometry: Geometry
    positions_max: int  # of a text
    dtype: torch.dtype

    def model(self, tensors: Mapping[str, torch.Tensor], all_reduce: AllReduce | None) -> Model:
        config, ranks = self.checkpoint.config, self.geometry.rank_count
        return bind(
            tensors,
            config,
            positions_max=self.positions_max,
            arithmetic=arithmetic_for(config, self.settings.exact, ranks),
            ranks=ranks,
            all_reduce=all_reduce,
        )

    def kv(self, address: int, size: int, device: torch.device) -> torch.Tensor:
        """All blocks of a mapped range, the pool's and the private ones. Whoever unmaps it lets go of this first."""
        flat = tensor_in(storage_at(address, size, device, self), self.dtype, 0, (size // self.dtype.itemsize,), (1,))
        shape = self.geometry
        return kv_view(flat, shape.layers, shape.kv_heads, shape.head_size, shape.block_tokens)


def share_of_one(settings: TorchSettings, ranks: int) -> TorchSettings:
    """Of `ranks`: as many as there are vaults, and cores shared out where nobody said how many threads each has."""
    if settings.ranks not in (1, ranks):
        raise ValueError(f"ranks is {settings.ranks}, but there are vaults for {ranks}; give each rank its own")
    threads = settings.threads if ranks == 1 or settings.threads else max(1, threads_for(0) // ranks)
    return replace(settings, ranks=ranks, threads=threads)
