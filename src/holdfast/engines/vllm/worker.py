"""vLLM's worker with its memory in a vault, which `--worker-cls` names.

It is vLLM's worker for this platform, with four changes:
- `ModelBuild` decides how its model is built.
- Its KV cache lies in `KvHome`.
- On a CPU, linear layers keep their weights in plain tensors.
- On a GPU, it allocates memory for steps in advance.

A process has one engine, so `making_worker` stores here what the worker needs, before vLLM makes it.
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
from holdfast.engines.vllm.ranks.leader import VllmLeader
from holdfast.engines.vllm.weights import ModelBuild
from holdfast.memory.torch.ahead import pin_ahead, take_ahead

AHEAD_BYTES = 256 * 1024**2  # workspace of steps that resume streams: a block of each, and their logits


@dataclass(slots=True)
class WorkerParts:
    build: ModelBuild
    scratch: Scratch
    kv: KvHome
    leader: VllmLeader | None = None  # of several ranks, in the leader's process


_parts: list[WorkerParts] = []


@contextlib.contextmanager
def making_worker(parts: WorkerParts) -> Iterator[None]:
    """Provide these parts while vLLM makes its engine."""
    _parts.append(parts)
    try:
        yield
    finally:
        _parts.pop()


def parts_being_made() -> WorkerParts:
    return _parts[-1]


def _base() -> Any:
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


class VaultWorker(_base()):  # type: ignore[misc]
    """vLLM's worker in a vault's memory; it computes exactly as vLLM's own."""

    def load_model(self, **options: Any) -> None:
        self._parts = parts_being_made()
        if current_platform.is_cpu():
            # Otherwise the weights would move into private handles of the library, one per process.
            import vllm._custom_ops as ops

            ops._supports_onednn = False
        self._parts.build.build(lambda hollow: self._load(hollow, options))
        refuse_leftovers(self.model_runner.get_model(), self._parts.scratch)
        self._parts.scratch.give_back()
        if not current_platform.is_cpu():
            torch.cuda.empty_cache()  # frees the weights' memory from before they were moved

    def _load(self, hollow: bool, options: dict[str, Any]) -> nn.Module:
        # A model that was built before has left its layers there under the same names.
        self.vllm_config.compilation_config.static_forward_context.clear()
        config, scratch = self.vllm_config.load_config, self._parts.scratch
        with hollow_load(config, scratch) if hollow else contextlib.nullcontext():
            super().load_model(**options)
        model: nn.Module = self.model_runner.get_model()
        return model

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        check_config(self.vllm_config, kv_cache_config, direct=self._parts.kv.direct)
        self._kv_config = kv_cache_config
        super().initialize_from_config(kv_cache_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        kept = [layers[name].kv_cache for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        # A layer with a state has several.
        self._parts.kv.made(view for one in kept for view in ([one] if isinstance(one, torch.Tensor) else one))
        # For the scheduler, which vLLM makes next from the same configuration.
        self.vllm_config.additional_config[ROOM] = asdict(self._parts.kv.plan)

    def compile_or_warm_up_model(self) -> Any:
        took = super().compile_or_warm_up_model()
        if not current_platform.is_cpu():
            # Behind vLLM's own, which gives back what it worked in.
            pin_ahead()
            take_ahead(self.device, AHEAD_BYTES)
        return took

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache":
            return self._parts.kv.backing(self._kv_config)
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return context
