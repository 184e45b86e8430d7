"""One rank's share of a model: what it is told to hold, and the computer over it. The same for leader and others.

Always true: all ranks of an engine have the same settings, number of blocks and arithmetic; only the place and the
rank's number differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import torch

from holdfast.engines.torch.files.checkpoint import Checkpoint, FileCheckpoint, RandomCheckpoint
from holdfast.engines.torch.model.attention import kv_view
from holdfast.engines.torch.model.bound import Model, arithmetic_for, bind
from holdfast.engines.torch.model.linear import AllReduce
from holdfast.engines.torch.stepper import threads_for
from holdfast.kv.geometry import Geometry
from holdfast.memory.torch.tensors import storage_at, tensor_in
from holdfast.spec.engines import Place, TorchSettings


@dataclass(frozen=True, slots=True)
class RankWork:
    checkpoint: Checkpoint
    settings: TorchSettings
    place: Place
    geometry: Geometry
    positions_max: int  # of a text

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.geometry.dtype)
        return found

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


class _Words(msgspec.Struct, frozen=True):
    """A `RankWork` between processes: plain data, which can be read and do nothing else."""

    settings: TorchSettings
    place: Place
    geometry: Geometry  # with the weights' identity, as the leader knows them
    positions_max: int
    files: FileCheckpoint | None = None
    random: RandomCheckpoint | None = None


def written(work: RankWork) -> bytes:
    """For a rank's process. Without the model's words, which only the leader speaks."""
    checkpoint = replace(work.checkpoint, tokenizer_json=b"", chat_template=None)
    kind = {"files" if isinstance(checkpoint, FileCheckpoint) else "random": checkpoint}
    words = _Words(work.settings, work.place, work.geometry, work.positions_max, **kind)  # type: ignore[arg-type]
    return msgspec.json.encode(words, enc_hook=str)  # paths are the only thing that JSON does not know


def read(data: bytes) -> RankWork:
    """ValueError if it would not be the leader's weights."""
    words = msgspec.json.decode(data, type=_Words, dec_hook=lambda kind, value: kind(value))
    checkpoint = words.files or words.random
    if checkpoint is None or checkpoint.identity != words.geometry.weights:
        raise ValueError(f"these are not the leader's weights, {words.geometry.weights}")
    return RankWork(checkpoint, words.settings, words.place, words.geometry, words.positions_max)


def share_of_one(settings: TorchSettings, ranks: int) -> TorchSettings:
    """Of `ranks`: as many as there are vaults, and cores shared out where nobody said how many threads each has."""
    if settings.ranks not in (1, ranks):
        raise ValueError(f"ranks is {settings.ranks}, but there are vaults for {ranks}; give each rank its own")
    threads = settings.threads if ranks == 1 or settings.threads else max(1, threads_for(0) // ranks)
    return msgspec.structs.replace(settings, ranks=ranks, threads=threads)
