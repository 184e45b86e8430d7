"""Computes how much of a device's memory vLLM's engines need, before any of them starts. Pure.

    workers x (weights + the larger of KV pool and weights + engines x own) + margin

Weights and pool exist once, in the vault. vLLM loads the weights into its own memory before they are moved there: the
first engine has them twice, while there is no pool yet. An engine's own memory, which a standby has too, is an
estimate: only vLLM knows it, after it has tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import TransientError, UserError
from holdfast.engines.vllm.reserved_options import value_of
from holdfast.spec.engines import GIB, VllmSettings

MIB = 1024**2
# Libraries and what they keep; 0.6 GiB were seen on a CPU with a tiny model. On a GPU the context comes to it, with the
# kernels that are loaded and the room that they work in.
LIBRARIES_BYTES = 768 * MIB
GPU_LIBRARIES_BYTES = 1536 * MIB
GRAPHS_BYTES = 512 * MIB  # some 50 sizes of steps, as vLLM captures them
# Positions that one step computes by default: vLLM's own, for a server on a large GPU and elsewhere.
GPU_STEP_TOKENS = 8192
STEP_TOKENS = 2048
# A step's rows of a layer's widths that live at once, and copies of its logits (in fp32).
HIDDEN_COPIES, INNER_COPIES, LOGITS_COPIES = 4, 2, 4
MARGIN_BYTES = GIB // 2
_MENDS = "use a smaller --kv-gib, fewer --standbys or --workers, or a smaller model"


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """The terms of the memory sum, in bytes."""

    where: str  # the memory's name
    has_bytes: int  # 0: not known
    workers: int  # that share it
    engines: int  # of each worker: 1 + standbys
    weights_bytes: int
    pool_bytes: int
    own_bytes: int  # of one engine
    margin_bytes: int = MARGIN_BYTES

    @property
    def needed_bytes(self) -> int:
        shared = self.weights_bytes + max(self.weights_bytes, self.pool_bytes)
        return self.workers * (shared + self.engines * self.own_bytes) + self.margin_bytes

    def text(self) -> str:
        each = f"{self.workers} workers, each with " if self.workers > 1 else ""
        of_all = f" of {gib(self.has_bytes)}" if self.has_bytes else ""
        return (
            f"{each}weights {gib(self.weights_bytes)} (while the first engine loads, twice), KV pool "
            f"{gib(self.pool_bytes)}, {self.engines} engines x about {gib(self.own_bytes)} of their own, a margin of "
            f"{gib(self.margin_bytes)}: {gib(self.needed_bytes)}{of_all} of {self.where}"
        )

    def check(self, free_bytes: int | None = None) -> None:
        """Raise UserError with the sum if it does not fit. `free_bytes`: what is unused now, where that counts."""
        if self.has_bytes and self.needed_bytes > self.has_bytes:
            raise UserError(f"--engine vllm does not fit: {self.text()}; {_MENDS}")
        if free_bytes is not None and self.needed_bytes > free_bytes:
            free = f"{gib(free_bytes)} are free now; stop what uses the rest, or {_MENDS}"
            raise TransientError(f"--engine vllm does not fit: {self.text()}, and {free}")


def vllm_plan(
    config: Mapping[str, Any], weights_bytes: int, settings: VllmSettings, *, is_gpu: bool, **where: Any
) -> VllmPlan:
    """Return the plan. `config` is the model's config.json, or the part of it that makes text; `where`: its first
    fields."""
    settings = settings.for_device(is_gpu)
    said = value_of(settings.options, "max_num_batched_tokens")
    tokens = int(said) if said.isdigit() else GPU_STEP_TOKENS if is_gpu else STEP_TOKENS
    widths = HIDDEN_COPIES * _number(config, "hidden_size") + INNER_COPIES * _number(config, "intermediate_size")
    logits = LOGITS_COPIES * (settings.concurrency + 1) * _number(config, "vocab_size") * 4
    own = GPU_LIBRARIES_BYTES if is_gpu else LIBRARIES_BYTES
    if is_gpu and not value_of(settings.options, "enforce_eager"):
        own += GRAPHS_BYTES
    return VllmPlan(
        weights_bytes=weights_bytes,
        pool_bytes=int(settings.kv_gib * GIB),
        own_bytes=own + tokens * widths * (2 if is_gpu else 4) + logits,
        **where,
    )


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else 0


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
