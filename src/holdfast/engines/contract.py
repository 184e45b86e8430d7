"""What a worker asks of an engine.

Always true of every engine: a step's outputs for all streams are handed over in one call; a stream's last
output has `finish` or `failure` set, and nothing follows it; after `cancel` nothing more is said of that stream;
the next token depends only on the request (its tokens, seed and sampling), so a resumed stream continues as
the unbroken one would, where `deterministic` is true. An engine may be several processes behind this object.
"""

from __future__ import annotations

from asyncio import Event
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.core.requests import GenerateRequest, Output
from holdfast.kv.resumes import Resumes
from holdfast.kv.usage import KvUse

# Takes one step's outputs. Answers False when a receiver is congested: an engine that can ease off, should.
StepSink = Callable[[list[Output]], bool]

# Takes streams that ended inside the engine without a last output (its own bookkeeping lost them).
ClosedSink = Callable[[list[int]], None]

# Takes what no step can mend (a sticky device error, a lost rank): the process exits at once.
FatalSink = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot that another thread may take at any time."""

    steps: int  # steps finished since the start
    running: int  # streams an engine step would advance now
    waiting: int  # admitted, not yet running
    step_ms_p99: float  # over recent steps, 0 before the first
    budget_ms: float  # how long the current step may take by its own account (prefill, compilation)
    thread: int  # the native id of the thread that makes steps
    kv: KvUse = field(default_factory=KvUse)  # of the pool it owns


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


@dataclass(frozen=True, slots=True)
class Canary:
    """A request whose answer is known: greedy, short, and the same on every engine of these weights."""

    request: GenerateRequest
    tokens: tuple[int, ...]
    known_from: str = ""  # the file the answer is written down in; empty: it follows from the weights

    @property
    def suspects(self) -> str:
        """What is to blame for a wrong answer."""
        if not self.known_from:
            return "these weights or this device make other tokens"
        return f"{self.known_from} has another for such an engine; the weights, the device or that file is damaged"


@dataclass(frozen=True, slots=True)
class Woken:
    """What a waking engine found. `marks`: when, on the monotonic clock in seconds, by name ("fence", "adopted")."""

    blocks: int  # whole KV blocks taken over
    reason: str = ""  # why none were believed; empty: what was whole is ours
    marks: Mapping[str, float] = field(default_factory=dict)


class ShadowEngine(Engine, Protocol):
    """An engine whose weights and KV live in a vault, so that another can go on where it ended.

    `load`, then `start`, then any number of (`wake`, …, `rest`). Before `wake` it writes private memory only; between
    `load` and `wake` everything is mapped and warm (unless it was made to sleep unmapped), so that a wake makes
    no driver call, no allocation, no import (fact 4a).
    """

    canary: Canary
    gpu_fence: Event  # set while no earlier owner's queued work can land any more; cleared by `wake`
    on_fatal: FatalSink
    on_owner_gone: Callable[[int], None]  # the vault saw the owner of this epoch go: the election is worth a look
    on_memory: Callable[[str], None]  # why the memory cannot be vouched for now; "" once it was verified (again)
    on_loading: Callable[[str], None]  # a wake turns out to need a load: why. It takes as long as `load` may

    @property
    def last_epoch(self) -> int:
        """The newest epoch the vault has told of, 0 before any."""

    @property
    def resumes(self) -> Resumes:
        """What became of the streams that came back since the last wake."""

    async def load(self) -> None:
        """Have the weights mapped, loading them if that falls to this engine; warm up. TimeoutError, OSError,
        DeviceError, VaultRefused and StaleMemoryLayoutError are fatal to the process."""

    async def check(self) -> bool:
        """Run the canary beside the shared pool, in private memory; whether its answer was right."""

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        """Own the pool under `epoch`: returns past the CPU fence, ready for work. Raises as `load` does; the caller
        bounds it. `pass_fds` go to processes it starts."""

    def canary_passed(self) -> None:
        """A canary that read adopted KV's pool was right: the next adopter may believe it again."""

    async def rest(self) -> None:
        """A planned handover: drain the device, drop write access, tell the vault; stand by again."""
