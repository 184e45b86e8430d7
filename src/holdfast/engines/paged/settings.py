"""How much a paged engine takes at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How much is taken at once."""

    vocabulary: int  # token ids are below this
    eos_token_ids: frozenset[int]  # end a stream unless it ignores them
    context_tokens_max: int  # prompt and answer together; an answer that reaches it ends with "length"
    concurrency: int = 64  # streams that run at once
    queue: int = 256  # streams that may wait beyond those; more are refused as WorkerOverloaded
    step_tokens_max: int = 512  # positions one step computes: bounds how long a prompt holds up the running streams
    lookahead: int = 0  # steps that may be in flight while the next is planned; 1 hides the host's work from a GPU

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context_tokens_max", "concurrency"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("queue", "lookahead"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not self.step_tokens_max > self.concurrency:  # else decodes alone could fill every step, and no prompt moves
            raise ValueError(f"step_tokens_max must be over the concurrency of {self.concurrency}")
