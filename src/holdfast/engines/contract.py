"""The contract between a worker and its engine: the calls a worker makes, and the events an engine sends.

Always true of every engine:
- One call of `outputs` hands over a step's outputs for all streams.
- A stream's last output has `finish` or `failure` set. The engine sends nothing for a stream after that, or after
  `cancel`.
- If `deterministic` is true, the next token depends only on the request (tokens, seed, sampling). So a resumed stream
  continues exactly as the unbroken one would.

An engine may be several processes behind this object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import Event
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.core.requests import GenerateRequest, Output
from holdfast.kv.pool import KvUse, Resumes
from holdfast.memory.client.calls import StaleMemoryLayoutError, VaultRefused
from holdfast.memory.devices import DeviceError

# The errors that a load, a wake or a planned handover may raise; any other error is our own bug.
FATAL_ERRORS = (TimeoutError, OSError, DeviceError, VaultRefused, StaleMemoryLayoutError)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The properties an engine declares after it was loaded; they are not tested."""

    deterministic: bool  # a resumed stream continues exactly as the unbroken one would
    failover: bool = False  # it is a `FailoverEngine`: its memory is in a vault
    # Answers may only be compared between engines of equal build, dtype and device kind.
    build: str = ""  # the engine and the versions of its libraries
    dtype: str = ""  # "exact": its answers do not round
    device: str = "cpu"  # the kind of device
    vocabulary: int = 0  # token ids are below it; 0: unknown
    weights: str = ""  # name of the memory that holds the weights, equal for engines that share it; empty: private


@dataclass(frozen=True, slots=True)
class Limits:
    concurrency: int
    queue: int
    context_tokens_max: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot of an engine's progress; any thread may take one at any time."""

    steps: int  # steps finished since the start
    running: int  # streams an engine step would advance now
    waiting: int  # streams admitted, not yet running
    step_ms_p99: float  # over recent steps, 0 before the first
    budget_ms: float  # how long the engine expects the current step to take at most (prefill, compilation)
    thread: tuple[int, int] | None  # (pid, tid) of the thread that makes steps; None: unknown
    kv: KvUse = field(default_factory=KvUse)  # use of the pool it owns
    tokens: int = 0  # made since the start, canaries included, as its worker counts them
    load: int = 1  # number of the weights' load: grows whenever they are loaded again


def p99_ms(recent_s: Iterable[float]) -> float:
    """Return the 99th percentile of step durations, in milliseconds."""
    steps = sorted(recent_s)
    return steps[(len(steps) * 99 - 1) // 100] * 1000 if steps else 0.0


class EngineEvents(ABC):
    """The events an engine sends to its worker, in the event loop (`fatal`: from any thread). Only engines with their
    memory in a vault send the last four."""

    @abstractmethod
    def outputs(self, outputs: list[Output]) -> bool:
        """Accept one step's outputs. Return False if a receiver is congested: the engine should slow down if it can."""

    @abstractmethod
    def closed(self, streams: list[int]) -> None:
        """Note that these streams ended inside the engine without a last output."""

    @abstractmethod
    def fatal(self, why: str) -> None:
        """Report a failure that no step can repair (a sticky device error, a lost rank): the process exits at once."""

    def disproved(self, why: str) -> None:
        """Report that the canary of `prove` was answered wrongly twice: this engine's answers cannot be trusted, and it
        sends none until `serve_on`."""
        return

    def owner_gone(self, epoch: int) -> None:
        """Report that the vault saw the owner of this epoch end: the worker should check the election now."""
        return

    def memory(self, why: str) -> None:
        """Report why the memory may be damaged; "" when it was verified (again)."""
        return

    def loading(self, why: str) -> None:
        """Report why a wake must load weights: it may then take as long as `load`."""
        return


class Engine(Protocol):
    """An engine, which generates tokens with one model."""

    @property
    def limits(self) -> Limits: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def load(self, events: EngineEvents) -> None:
        """Load everything that steps need, and send events to `events` from now on. A `FailoverEngine` takes work after
        `wake`, any other engine after this. TimeoutError, OSError, DeviceError, VaultRefused and StaleMemoryLayoutError
        are fatal to the process."""

    def submit(self, stream: int, request: GenerateRequest) -> None:
        """Accept a request as stream number `stream` (1 or more, chosen by the caller). Raise HoldfastError
        (WorkerOverloaded, ResourceExhausted, InvalidRequest) if it is refused. Never blocks. Requests of `CANARY_TIER`,
        and only these, have one slot beyond `limits`."""

    def cancel(self, stream: int) -> None:
        """Forget a stream; unknown numbers are ignored."""

    def withdraw(self, stream: int) -> bool:
        """Cancel a stream that has not begun to run. Return False, and change nothing, if it runs, ran before or is
        unknown. Never blocks."""

    def progress(self) -> Progress: ...

    def ping(self, answer: Callable[[], None]) -> None:
        """Have the step thread call `answer`, through the event loop, between two steps: at once if there is no work,
        and not while it is stuck. Needs no forward pass."""

    async def verify(self) -> str:
        """Read all weights; return what is wrong with them, or "". Steps go on meanwhile."""

    async def renew(self) -> None:
        """Load the weights again from their source, damaged or not; `load` in its progress grows. The engine has no
        streams meanwhile; a standby stays a standby. Raises as `load` does."""

    async def stop(self) -> None:
        """Stop stepping and free everything; streams still running get no further output."""


@dataclass(frozen=True, slots=True)
class Woken:
    """The result of a wake. `marks`: monotonic times in seconds, by name ("fence", "adopted")."""

    blocks: int  # whole KV blocks taken over
    reason: str = ""  # why no block was taken over; empty: all whole blocks were
    marks: Mapping[str, float] = field(default_factory=dict)


class FailoverEngine(Engine, Protocol):
    """An engine with weights and KV in a vault, so that another engine can continue its streams.

    Call `load`, then any number of times `wake`, `prove`, …, `become_standby`. Before `wake` it writes private memory
    only. Between `load` and `wake` everything is mapped and warm, unless it stands by unmapped. So a wake makes no
    driver call, no allocation and no import (fact 4a).
    """

    gpu_fence: Event  # set when no queued GPU work of an earlier owner can still write; cleared by `wake`

    @property
    def last_epoch(self) -> int:
        """Return the newest epoch the vault has reported, 0 before any."""

    @property
    def resumes(self) -> Resumes:
        """Return the outcomes of the streams resumed since the last wake."""

    @property
    def proven(self) -> bool:
        """Return True if the adopted KV was proven right, so that the next owner may adopt it too."""

    @property
    def proving(self) -> bool:
        """Return True while that proof is under way; resumed streams run in the same steps."""

    async def check(self) -> str:
        """Answer the canary in private memory, outside the shared pool; return the likely cause of a wrong answer, or
        ""."""

    async def unmap(self) -> None:
        """Unmap all memory of the vault while standing by, so that the vault may move it. Captured graphs, compiled
        code and reserved addresses stay."""

    async def remap(self) -> str:
        """Map the memory again and answer the canary; return the likely cause of a wrong answer, or "". Raises as
        `load` does."""

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        """Become the owner of the pool under `epoch`; return past the CPU fence, ready for work. Raises as `load` does;
        the caller sets the time limit. Processes that it starts inherit `pass_fds`."""

    def prove(self) -> None:
        """Begin to prove that the adopted KV is right: the canary runs in the same steps as the streams. Never blocks.

        - No token leaves the engine before the canary's first token was right.
        - After a wrong answer the canary runs once more, alone if its answer could depend on the batch, and all output
          waits for it.
        - After a second wrong answer the engine reports `disproved`."""

    def serve_on(self) -> None:
        """Send the held output, and all later output, after `disproved`: no other engine can take over."""

    async def become_standby(self, *, believed: bool = True) -> None:
        """Hand over as planned: drain the device, drop write access, tell the vault, stand by again. If not `believed`,
        the KV that this engine computed is distrusted, and the next owner starts with an empty pool."""
