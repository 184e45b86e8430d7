"""What a worker asks of an engine.

Always true of every engine: a step's outputs for all streams are handed over in one call; a stream's last
output has `finish` or `failure` set, and nothing follows it; after `cancel` nothing more is said of that stream;
the next token depends only on the request (its tokens, seed and sampling), so a resumed stream continues as
the unbroken one would, where `deterministic` is true. An engine may be several processes behind this object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.requests import GenerateRequest, Output

# Takes one step's outputs. Answers False when a receiver is congested: an engine that can ease off, should.
StepSink = Callable[[list[Output]], bool]

# Takes streams that ended inside the engine without a last output (its own bookkeeping lost them).
ClosedSink = Callable[[list[int]], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot that another thread may take at any time."""

    steps: int  # steps finished since the start
    running: int  # streams an engine step would advance now
    waiting: int  # admitted, not yet running
    step_ms_p99: float  # over recent steps, 0 before the first
    budget_ms: float  # how long the current step may take by its own account (prefill, compilation)
    thread: int  # the native id of the thread that makes steps


@dataclass(frozen=True, slots=True)
class Limits:
    """How much an engine takes at once."""

    concurrency: int
    queue: int
    context_tokens_max: int


class Engine(Protocol):
    """One model, loaded, making tokens."""

    @property
    def limits(self) -> Limits: ...

    @property
    def deterministic(self) -> bool: ...

    async def start(self, sink: StepSink, closed: ClosedSink) -> None:
        """Load, then make steps until `stop`."""

    def submit(self, stream: int, request: GenerateRequest) -> None:
        """Take a request under a number of the caller's; raise HoldfastError (WorkerOverloaded,
        ResourceExhausted, InvalidRequest) if it cannot be taken. Never blocks."""

    def cancel(self, stream: int) -> None:
        """Forget a stream; unknown numbers are ignored."""

    def progress(self) -> Progress: ...

    async def stop(self) -> None:
        """Stop stepping and free everything; streams still running get no further output."""
