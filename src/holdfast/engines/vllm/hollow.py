"""Builds a model without values: vLLM builds it as usual, and its parameters lie in scratch memory until they are bound
to a vault's.

So a standby never needs a second copy of the weights. vLLM makes parameters by `torch.empty`; the larger ones get
scratch addresses, which store nothing. No random values are written there, unlike with vLLM's dummy loader.

Always true: every tensor that lay in scratch was bound to the vault's memory afterwards (`refuse_leftovers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from holdfast.core.errors import UserError
from holdfast.memory.devices.contract import Device
from holdfast.memory.torch.tensors import storage_at, tensor_in

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScratchMemory:
    """Reserves addresses with scratch memory: the step thread asks, and the event loop, which owns memory, reserves."""

    device: Device
    loop: asyncio.AbstractEventLoop

    def reserve(self, size: int) -> int:
        return self._ask(lambda: self._reserve(size))

    def free(self, address: int, size: int) -> None:
        self._ask(lambda: self._free(address, size))

    def _reserve(self, size: int) -> int:
        address = self.device.reserve(size)
        self.device.scratch(address, size)
        return address

    def _free(self, address: int, size: int) -> None:
        self.device.unmap(address, size)
        self.device.release(address, size)

    def _ask(self, work: Callable[[], T]) -> T:
        async def do() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(do(), self.loop).result()


LEAST_BYTES = 1024 * 1024  # what is smaller is no matter
REGION_BYTES = 1024**3
ALIGNMENT = 512
_DUMMIES = "vllm.model_executor.model_loader.dummy_loader"
_INITIALISERS = ("initialize_dummy_weights", "initialize_single_dummy_weight")  # by vLLM's version


@dataclass(slots=True)
class Scratch:
    device: torch.device
    ground: ScratchMemory
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
            size = like.numel() * like.element_size()
            if size >= LEAST_BYTES:
                storage = storage_at(self._scratch.take(size), size, self._scratch.device, self._scratch)
                return tensor_in(storage, like.dtype, 0, tuple(like.shape), tuple(like.stride()))
        return func(*args, **given)

    def _is_ours(self, device: object) -> bool:
        named = torch.device(device) if isinstance(device, str) else device
        return isinstance(named, torch.device) and named.type == self._scratch.device.type


@contextlib.contextmanager
def hollow_load(load_config: Any, scratch: Scratch) -> Iterator[None]:
    """Let whatever vLLM loads meanwhile have no values."""
    dummies = importlib.import_module(_DUMMIES)
    before = {name: getattr(dummies, name) for name in _INITIALISERS if hasattr(dummies, name)}
    load_format, load_config.load_format = load_config.load_format, "dummy"
    for name in before:
        setattr(dummies, name, lambda *_, **__: None)
    try:
        with _Hollow(scratch):
            yield
    finally:
        load_config.load_format = load_format
        for name, function in before.items():
            setattr(dummies, name, function)


def refuse_leftovers(model: nn.Module, scratch: Scratch) -> None:
    """Raise if a part of the bound model still lies in scratch."""
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
