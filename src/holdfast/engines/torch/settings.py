"""The torch engine's settings: what it may use, and how exact it is."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engines.contract import Limits


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Every field has a default that suits a small model on a CPU."""

    exact: bool = False  # arithmetic that does not depend on batch and chunking; slower (docs/engine.md)
    kv_gib: float = 0.5  # KV pool; as many whole blocks as fit
    block_tokens: int = 16  # tokens in one KV block
    context_tokens_max: int = 0  # prompt and answer together; 0: what the model was made for, if the pool reaches
    concurrency: int = 32  # streams that run at once
    queue: int = 256  # streams that may wait beyond those; more are refused as WorkerOverloaded
    step_tokens_max: int = 128  # positions one step computes: how long a prompt may hold up running streams
    threads: int = 0  # of torch on a CPU; 0: all cores but one, which serving and a starting standby need

    def __post_init__(self) -> None:
        for name in ("context_tokens_max", "queue", "threads"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("block_tokens", "concurrency"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not self.kv_gib > 0:
            raise ValueError(f"kv_gib must be over 0, got {self.kv_gib}")
        if self.step_tokens_max <= self.concurrency:
            raise ValueError(f"step_tokens_max must be over concurrency {self.concurrency}, got {self.step_tokens_max}")

    def limits(self, context_tokens_max: int) -> Limits:
        return Limits(self.concurrency, self.queue, context_tokens_max)
