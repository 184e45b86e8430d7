"""A model without values: vLLM builds it as ever, and its parameters lie in scratch until they are bound to a vault's.

So an engine that stands by beside another never needs the weights a second time. Parameters are made by `torch.empty`;
those of some size get addresses where nothing is kept, and nobody writes random values there, as vLLM's dummy loader
would.

Always true: what is not bound to a vault's memory afterwards never lay in scratch (`refuse_leftovers`).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from holdfast.core.errors import UserError
from holdfast.engines.vllm.ground import Ground
from holdfast.memory.torch.tensors import storage_at, tensor_in

LEAST_BYTES = 1024 * 1024  # what is smaller is no matter
REGION_BYTES = 1024**3
ALIGNMENT = 512
_DUMMIES = "vllm.model_executor.model_loader.dummy_loader"
_INITIALISERS = ("initialize_dummy_weights", "initialize_single_dummy_weight")  # by vLLM's version


@dataclass(slots=True)
class Scratch:
    """Addresses for a hollow model."""

    device: torch.device
    ground: Ground
    _regions: list[tuple[int, int]] = field(default_factory=list)
    _used: int = REGION_BYTES  # of the last one

    def take(self, size: int) -> int:
        size = -(-size // ALIGNMENT) * ALIGNMENT
        if not self._regions or self._used + size > self._regions[-1][1]:
            room = -(-size // REGION_BYTES) * REGION_BYTES
            self._regions.append((self.ground.reserve(room), room))
            self._used = 0
        at = self._regions[-1][0] + self._used
        self._used += size
        return at

    def holds(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at < start + size for start, size in self._regions)

    def give_back(self) -> None:
        for start, size in self._regions:
            self.ground.free(start, size)
        self._regions.clear()


class _Hollow(TorchFunctionMode):
    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self._scratch = scratch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.empty and self._is_ours(given.get("device")):
            # What it would be like, without its memory.
            like = func(*args, **{**given, "device": "meta", "pin_memory": False})
            if like.numel() * like.element_size() >= LEAST_BYTES:
                return self._over_scratch(like)
        return func(*args, **given)

    def _is_ours(self, device: object) -> bool:
        named = torch.device(device) if isinstance(device, str) else device
        return isinstance(named, torch.device) and named.type == self._scratch.device.type

    def _over_scratch(self, like: torch.Tensor) -> torch.Tensor:
        size = like.numel() * like.element_size()
        storage = storage_at(self._scratch.take(size), size, self._scratch.device, self._scratch)
        return tensor_in(storage, like.dtype, 0, tuple(like.shape), tuple(like.stride()))


@contextlib.contextmanager
def hollow_load(load_config: Any, scratch: Scratch) -> Iterator[None]:
    """Whatever vLLM loads meanwhile has no values."""
    dummies = importlib.import_module(_DUMMIES)
    before = {name: getattr(dummies, name) for name in _INITIALISERS if hasattr(dummies, name)}
    load_format, load_config.load_format = load_config.load_format, "dummy"
    for name in before:
        setattr(dummies, name, _leave_as_it_is)
    try:
        with _Hollow(scratch):
            yield
    finally:
        load_config.load_format = load_format
        for name, function in before.items():
            setattr(dummies, name, function)


def refuse_leftovers(model: nn.Module, scratch: Scratch) -> None:
    """Once the model is bound: nothing of it may still lie in scratch."""
    kept = [*model.named_parameters(), *model.named_buffers()]
    kept += [
        (f"{prefix}.{name}", value)
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    for name, tensor in kept:
        if tensor.numel() and scratch.holds(tensor):
            raise UserError(f"{name} of this model is kept by vLLM where it cannot be shared: it cannot be served")


def _leave_as_it_is(*_: object, **__: object) -> None:
    return
