"""Defines what one rank, the leader or another, holds of a model and computes of a step, and joins ranks as a group.

Always true: all ranks of an engine have the same settings, number of blocks and arithmetic; only the place and the
rank's number differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed as _distributed

from holdfast.engines.torch.files.checkpoint import Checkpoint, FileCheckpoint, RandomCheckpoint
from holdfast.engines.torch.model.attention import kv_view
from holdfast.engines.torch.model.decoder import BoundModel, arithmetic_for, bind
from holdfast.engines.torch.model.linear import AllReduce, tree_sum
from holdfast.engines.torch.stepper import threads_for
from holdfast.kv.geometry import Geometry
from holdfast.memory.torch.tensors import storage_at, tensor_in
from holdfast.spec.engines import FailoverSettings, TorchSettings


@dataclass(frozen=True, slots=True)
class RankWork:
    checkpoint: Checkpoint
    settings: TorchSettings
    failover: FailoverSettings
    geometry: Geometry
    positions_max: int  # of a text

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.geometry.dtype)
        return found

    def model(self, tensors: Mapping[str, torch.Tensor], all_reduce: AllReduce | None) -> BoundModel:
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
        """Return all blocks of a mapped range, private ones too. The caller drops them before the range is unmapped."""
        flat = tensor_in(storage_at(address, size, device, self), self.dtype, 0, (size // self.dtype.itemsize,), (1,))
        shape = self.geometry
        return kv_view(flat, shape.layers, shape.kv_heads, shape.head_size, shape.block_tokens)


class _WorkMessage(msgspec.Struct, frozen=True):
    """A `RankWork` between processes: plain data, which can be read and do nothing else."""

    settings: TorchSettings
    failover: FailoverSettings = msgspec.field(name="place")
    geometry: Geometry  # with the weights' identity, as the leader knows them
    positions_max: int
    files: FileCheckpoint | None = None
    random: RandomCheckpoint | None = None


def encode_work(work: RankWork) -> bytes:
    """Encode the work for a rank's process, without the model's text, which only the leader needs."""
    checkpoint = replace(work.checkpoint, tokenizer_json=b"", chat_template=None)
    kind = {"files" if isinstance(checkpoint, FileCheckpoint) else "random": checkpoint}
    words = _WorkMessage(work.settings, work.failover, work.geometry, work.positions_max, **kind)  # type: ignore[arg-type]
    return msgspec.json.encode(words, enc_hook=str)  # paths are the only thing that JSON does not know


def decode_work(data: bytes) -> RankWork:
    """Decode the work; ValueError if it does not name the leader's weights."""
    words = msgspec.json.decode(data, type=_WorkMessage, dec_hook=lambda kind, value: kind(value))
    checkpoint = words.files or words.random
    if checkpoint is None or checkpoint.identity != words.geometry.weights:
        raise ValueError(f"these are not the leader's weights, {words.geometry.weights}")
    return RankWork(checkpoint, words.settings, words.failover, words.geometry, words.positions_max)


def share_of_one(settings: TorchSettings, ranks: int) -> TorchSettings:
    """Return the settings for `ranks` ranks, one per vault; cores are shared out unless `threads` is set."""
    if settings.ranks not in (1, ranks):
        raise ValueError(f"ranks is {settings.ranks}, but there are vaults for {ranks}; give each rank its own")
    threads = settings.threads if ranks == 1 or settings.threads else max(1, threads_for(0) // ranks)
    return msgspec.structs.replace(settings, ranks=ranks, threads=threads)


class SharePiece(msgspec.Struct, frozen=True, array_like=True):
    """A step's segment (`batch.Segment`) as it is sent to a rank."""

    tokens: list[int]
    start: int
    blocks: list[int]


class Compute(msgspec.Struct, frozen=True, array_like=True):
    """One step over the pool, or over the private blocks behind it (a canary's)."""

    private: bool
    pieces: list[SharePiece]


dist: Any = _distributed  # its stubs leave out what the groups themselves are made of
COLLECTIVE_S = 60.0  # the longest step there may be: within it every rank has come to the same sum
HERE = "127.0.0.1"  # the ranks of an engine are on one machine


class RankGroup:
    """One rank's end of the group that sums the ranks' results. `gathers`: each rank gathers all parts and sums them.

    Always true: every rank makes the same calls in the same order. Under `exact`, and always on a CPU, a sum is a tree
    in the order of ranks (linear.py): gathering two small tensors takes half the time of gloo's sum. A dead peer is an
    error at once, a stuck one after `COLLECTIVE_S`.
    """

    def __init__(self, sums: Any, ranks: int, gathers: bool) -> None:
        self.ranks = ranks
        self._sums, self._gathers = sums, gathers

    @classmethod
    def join(cls, folder: Path, work: RankWork, device: torch.device) -> RankGroup:
        """Join all other ranks through a folder that other users cannot read. Blocks, so not for an event loop."""
        rank, ranks = work.geometry.rank, work.geometry.rank_count
        store = dist.FileStore(str(folder / "store"), ranks)
        if device.type == "cpu":
            kind, options = dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=HERE)]
        else:
            torch.cuda.set_device(device)
            kind, options = dist.ProcessGroupNCCL, dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=COLLECTIVE_S)
        return cls(kind(store, rank, ranks, options), ranks, device.type == "cpu" or work.settings.exact)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        if not self._gathers:
            self._sums.allreduce([partial]).wait()
            return partial
        parts = [torch.empty_like(partial) for _ in range(self.ranks)]
        self._sums.allgather([parts], [partial.contiguous()]).wait()
        return tree_sum(parts)
