"""vLLM's worker with its memory in a vault: what `--worker-cls` names.

It is vLLM's own worker for this platform but for four things: its model is built as `ModelBuild` is asked to, its KV
cache lies in `KvHome`, on a CPU linear layers keep their weights where they are seen, and on a GPU memory is taken
ahead. One engine lives in one process, so what the worker needs is left for it here (`let_in`) before vLLM makes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from vllm.platforms import current_platform

from holdfast.engines.vllm.hollow import Scratch, hollow_load, refuse_leftovers
from holdfast.engines.vllm.hooks import check_config
from holdfast.engines.vllm.kv_home import KvHome
from holdfast.engines.vllm.options import ROOM
from holdfast.engines.vllm.ranks.leader import Leader
from holdfast.engines.vllm.weights import ModelBuild
from holdfast.memory.torch.ahead import pin_ahead, take_ahead

AHEAD_BYTES = 256 * 1024**2  # what steps work in that bring streams back: a block of each, and their logits


@dataclass(slots=True)
class Rooms:
    """What the worker of this process finds ready."""

    build: ModelBuild
    scratch: Scratch
    kv: KvHome
    leader: Leader | None = None  # of several ranks, in the leader's process


_rooms: list[Rooms] = []


@contextlib.contextmanager
def let_in(rooms: Rooms) -> Iterator[None]:
    """While vLLM makes its engine."""
    _rooms.append(rooms)
    try:
        yield
    finally:
        _rooms.pop()


def rooms_here() -> Rooms:
    return _rooms[-1]


def _base() -> Any:
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


class VaultWorker(_base()):  # type: ignore[misc]
    """Stock in everything that it computes."""

    def load_model(self, **options: Any) -> None:
        self._rooms = rooms_here()
        if current_platform.is_cpu():
            # Else weights vanish into handles of the library, each process's own.
            import vllm._custom_ops as ops

            ops._supports_onednn = False
        self._rooms.build.build(lambda hollow: self._load(hollow, options))
        refuse_leftovers(self.model_runner.get_model(), self._rooms.scratch)
        self._rooms.scratch.give_back()
        if not current_platform.is_cpu():
            torch.cuda.empty_cache()  # where the weights lay before they were moved

    def _load(self, hollow: bool, options: dict[str, Any]) -> nn.Module:
        # A model that was built before has left its layers there under the same names.
        self.vllm_config.compilation_config.static_forward_context.clear()
        config, scratch = self.vllm_config.load_config, self._rooms.scratch
        with hollow_load(config, scratch) if hollow else contextlib.nullcontext():
            super().load_model(**options)
        model: nn.Module = self.model_runner.get_model()
        return model

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        check_config(self.vllm_config, kv_cache_config, direct=self._rooms.kv.direct)
        self._kv_config = kv_cache_config
        super().initialize_from_config(kv_cache_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        kept = [layers[name].kv_cache for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        # A layer with a state has several.
        self._rooms.kv.made(view for one in kept for view in ([one] if isinstance(one, torch.Tensor) else one))
        # For the scheduler, which vLLM makes next from the same configuration.
        self.vllm_config.additional_config[ROOM] = asdict(self._rooms.kv.plan)

    def compile_or_warm_up_model(self) -> Any:
        took = super().compile_or_warm_up_model()
        if not current_platform.is_cpu():
            # Behind vLLM's own, which gives back what it worked in.
            pin_ahead()
            take_ahead(self.device, AHEAD_BYTES)
        return took

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache":
            return self._rooms.kv.backing(self._kv_config)
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return context
