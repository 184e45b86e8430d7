"""The torch engine's settings: what it may use, and how exact it is.

Always true: a setting that was left to the device (0) is a number once `for_device` has been asked, but for `kv_gib` on
a GPU, which the memory plan works out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.engines.contract import Limits

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Every field has a default that suits a small model on a CPU; where 0 is "by device", see `for_device`."""

    exact: bool = False  # arithmetic that does not depend on batch and chunking; slower (docs/engine.md)
    kv_gib: float = 0.5  # KV pool of one rank; as many whole blocks as fit; 0: by device
    block_tokens: int = 16  # tokens in one KV block
    context_tokens_max: int = 0  # prompt and answer together; 0: what the model was made for, if the pool reaches
    concurrency: int = 32  # streams that run at once; 0: by device
    queue: int = 256  # streams that may wait beyond those; more are refused as WorkerOverloaded
    step_tokens_max: int = 128  # positions one step computes: how long prompts hold others up; 0: by device
    threads: int = 0  # of torch on a CPU; 0: all cores but one, which serving and a starting standby need
    ranks: int = 1  # processes that share the model, each with a device of its own

    def __post_init__(self) -> None:
        for name in ("kv_gib", "context_tokens_max", "concurrency", "queue", "step_tokens_max", "threads"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("block_tokens", "ranks"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.step_tokens_max and self.step_tokens_max <= self.concurrency:
            raise ValueError(f"step_tokens_max must be over concurrency {self.concurrency}, got {self.step_tokens_max}")

    def for_device(self, is_gpu: bool) -> TorchSettings:
        """With what was left to the device. A GPU takes more streams than a CPU at the same time for each, and a
        prompt's chunk of 2,048 there is what 128 are here: some tens of milliseconds, in which others wait."""
        concurrency = self.concurrency or (64 if is_gpu else 32)
        step_tokens = self.step_tokens_max or max(2048 if is_gpu else 128, 2 * concurrency)
        kv_gib = self.kv_gib or (0.0 if is_gpu else 0.5)
        return replace(self, concurrency=concurrency, step_tokens_max=step_tokens, kv_gib=kv_gib)

    def limits(self, context_tokens_max: int) -> Limits:
        return Limits(self.concurrency, self.queue, context_tokens_max)
