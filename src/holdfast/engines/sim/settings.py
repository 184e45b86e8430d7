"""The sim engine's settings: its pace, and how much it pretends to hold."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engines.contract import Limits

REVISION = "sim-language-1"  # which language it speaks: another one is another set of weights

@dataclass(frozen=True, slots=True)
class SimSettings:
    """Every field has a default that behaves like a small GPU engine."""

    ttft_ms: float = 50.0  # from a request's start of running to its first token, idle engine; in milliseconds
    tpot_ms: float = 20.0  # one step, a token for every running stream, in milliseconds; 0: full speed
    jitter: float = 0.10  # both of the above vary by up to this share, either way
    concurrency: int = 256  # streams that run at once
    queue: int = 256  # streams that may wait beyond those; more are refused as WorkerOverloaded
    block_size: int = 16  # tokens in one KV block
    kv_blocks: int = 65_536  # blocks in all; when they run out, the youngest stream waits
    context_tokens_max: int = 32_768  # prompt and answer together; an answer that reaches it ends with "length"
    vault_gib: float = 0.0625  # weights and KV pages in a vault, if there is one; the weights take what the pool leaves
    ranks: int = 1  # processes of the engine that map the device, itself counted
    poison_token: int = -1  # a request that has this token kills the engine when it runs; -1: none does

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "queue", "vault_gib"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("concurrency", "block_size", "kv_blocks", "context_tokens_max", "ranks"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.poison_token < -1:
            raise ValueError(f"poison_token must be a token id, or -1 for none, got {self.poison_token}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be at least 0 and less than 1, got {self.jitter}")

    @property
    def limits(self) -> Limits:
        return Limits(self.concurrency, self.queue, self.context_tokens_max)
