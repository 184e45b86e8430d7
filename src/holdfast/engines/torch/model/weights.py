"""Writes a checkpoint's parameters to vault memory, verifies them, and binds tensors to them.

Always true: a checksum of every parameter is stored beside the parameters, written last, so that an engine that maps
them can verify them. Tensors are views of the mapped memory, made by `use`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.engines.torch.files.checkpoint import Checkpoint, OnProgress
from holdfast.engines.torch.model.parameters import load, parameters
from holdfast.memory.client.weights import MappedWeights
from holdfast.memory.layout import TensorSpec
from holdfast.memory.torch.tensors import dtype_name, storage_at, tensor_in, word_sum

SUMS = "sums"


class TorchWeights:
    """The `WeightsPlan` of `engines.host.loading` for one rank of a model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: OnProgress,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._checkpoint = checkpoint
        self._parameters = parameters(checkpoint.config, rank, ranks)
        self._dtype, self._device, self._progress = dtype, device, progress
        share = f", rank {rank} of {ranks}" if ranks > 1 else ""
        self.identity = f"{checkpoint.identity}, {dtype_name(dtype)}{share}"
        self.specs = [_spec(parameter.name, parameter.shape, dtype) for parameter in self._parameters]
        self.specs.append(_spec(SUMS, (len(self._parameters),), torch.int64))
        self.meta = {"source": checkpoint.source[:200]}
        self.tensors: dict[str, torch.Tensor] = {}
        self._last: tuple[Mapping[str, int], dict[str, torch.Tensor]] = ({}, {})  # where they were, and they

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.specs)

    def fill(self, addresses: dict[str, int]) -> None:
        tensors = self._views(addresses)
        load(self._checkpoint, self._parameters, tensors, self._progress)
        tensors[SUMS].copy_(self._sums(tensors))

    def verify(self, mapped: MappedWeights) -> str:
        if mapped.layout.identity != self.identity:
            return f"it is {mapped.layout.identity}, not {self.identity}"
        tensors = self._views(mapped.addresses())
        wrong = (self._sums(tensors) != tensors[SUMS].cpu()).nonzero().flatten().tolist()
        return f"{self._parameters[wrong[0]].name} is not what was written" if wrong else ""

    def use(self, mapped: MappedWeights | None) -> None:
        """Bind tensors to what is mapped: the same ones at the same addresses, so what they are part of stays good."""
        if mapped is None:
            self.tensors = {}
            return
        addresses = mapped.addresses()
        if addresses != self._last[0]:
            self._last = addresses, self._views(addresses)
        self.tensors = self._last[1]

    def _views(self, addresses: Mapping[str, int]) -> dict[str, torch.Tensor]:
        views = {}
        for spec in self.specs:
            storage = storage_at(addresses[spec.name], spec.size_bytes, self._device, self)
            dtype = torch.int64 if spec.name == SUMS else self._dtype
            views[spec.name] = tensor_in(storage, dtype, 0, spec.shape, spec.stride)
        return views

    def _sums(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([word_sum(tensors[each.name]).cpu() for each in self._parameters])


def _spec(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    like = torch.empty(shape, dtype=dtype, device="meta")
    return TensorSpec(name, shape, like.stride(), dtype_name(dtype), like.nbytes)
