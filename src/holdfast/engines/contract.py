"""What a worker asks of an engine, and what an engine tells its worker.

Always true of every engine: a step's outputs for all streams are handed over in one call; a stream's last
output has `finish` or `failure` set, and nothing follows it; after `cancel` nothing more is said of that stream;
the next token depends only on the request (its tokens, seed and sampling), so a resumed stream continues as
the unbroken one would, where `deterministic` is true. An engine may be several processes behind this object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import Event
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.core.requests import GenerateRequest, Output
from holdfast.kv.pool import KvUse
from holdfast.kv.resumes import Resumes


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine declares of itself, once it is loaded: nobody tries it out."""

    deterministic: bool  # a resumed stream continues exactly as the unbroken one would
    shadow: bool = False  # it is a `ShadowEngine`: its memory is in a vault
    # What its answers may be compared with: only those of equal build, dtype and kind of device.
    build: str = ""  # which engine, and of which version what it computes with
    dtype: str = ""  # "exact": its answers do not round
    device: str = "cpu"  # its kind
    vocabulary: int = 0  # token ids are below it; 0: it does not say
    weights: str = ""  # whose they are: equal for engines that read the same memory; empty: its own


@dataclass(frozen=True, slots=True)
class Limits:
    """How much an engine takes at once."""

    concurrency: int
    queue: int
    context_tokens_max: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot that another thread may take at any time."""

    steps: int  # steps finished since the start
    running: int  # streams an engine step would advance now
    waiting: int  # admitted, not yet running
    step_ms_p99: float  # over recent steps, 0 before the first
    budget_ms: float  # how long the current step may take by its own account (prefill, compilation)
    thread: tuple[int, int] | None  # (pid, tid) of the thread that makes steps, in whichever process; None: not known
    kv: KvUse = field(default_factory=KvUse)  # of the pool it owns
    tokens: int = 0  # made since the start by those that ran, canaries too, as its worker counts them
    load: int = 1  # of the weights it reads: grows with every fresh load of them


def p99_ms(recent_s: Iterable[float]) -> float:
    """The 99th percentile of some steps' seconds, as `Progress` tells it."""
    steps = sorted(recent_s)
    return steps[(len(steps) * 99 - 1) // 100] * 1000 if steps else 0.0


class EngineEvents(ABC):
    """What an engine tells whoever runs it, in the event loop (`fatal`: from any thread). The last four are told by
    engines with their memory in a vault only."""

    @abstractmethod
    def outputs(self, outputs: list[Output]) -> bool:
        """One step's. False: a receiver is congested, and an engine that can ease off, should."""

    @abstractmethod
    def closed(self, streams: list[int]) -> None:
        """These ended inside the engine without a last output."""

    @abstractmethod
    def fatal(self, why: str) -> None:
        """What no step can mend (a sticky device error, a lost rank): the process exits at once."""

    def disproved(self, why: str) -> None:
        """What `prove` started went wrong, twice: nothing that this engine says may be believed, and it says no more
        until `serve_on`."""
        return

    def owner_gone(self, epoch: int) -> None:
        """The vault saw the owner of this epoch go: the election is worth a look."""
        return

    def memory(self, why: str) -> None:
        """Why the memory cannot be vouched for now; "" once it was verified (again)."""
        return

    def loading(self, why: str) -> None:
        """A wake turns out to need a load: why. It takes as long as `load` may."""
        return


class Engine(Protocol):
    """One model, making tokens."""

    @property
    def limits(self) -> Limits: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def load(self, events: EngineEvents) -> None:
        """Have everything that steps need; `events` hears all that is said from now on. An engine that stands by
        takes work after `wake`, any other one from here. TimeoutError, OSError, DeviceError, VaultRefused and
        StaleMemoryLayoutError are fatal to the process."""

    def submit(self, stream: int, request: GenerateRequest) -> None:
        """Take a request under a number of the caller's, 1 or more; raise HoldfastError (WorkerOverloaded,
        ResourceExhausted, InvalidRequest) if it cannot be taken. Never blocks. A request of `CANARY_TIER` has a place
        of its own, beyond `limits`, and nobody else's."""

    def cancel(self, stream: int) -> None:
        """Forget a stream; unknown numbers are ignored."""

    def withdraw(self, stream: int) -> bool:
        """Forget a stream that has not begun to run, as `cancel` does; False: it runs, ran before, or is not known, and
        nothing changed. Never blocks."""

    def progress(self) -> Progress: ...

    def ping(self, answer: Callable[[], None]) -> None:
        """Have whoever makes steps call this, through the event loop, between two of them: at once where there is no
        work, and not before it goes on where it is stuck. No forward pass."""

    async def verify(self) -> str:
        """Read all weights: what is wrong with them, or nothing. Work goes on meanwhile."""

    async def renew(self) -> None:
        """Load the weights anew from where they came, whatever they are now: `load` in its progress grows. It has no
        streams, and one that stands by does so meanwhile. Raises as `load` does."""

    async def stop(self) -> None:
        """Stop stepping and free everything; streams still running get no further output."""


@dataclass(frozen=True, slots=True)
class Woken:
    """What a waking engine found. `marks`: when, on the monotonic clock in seconds, by name ("fence", "adopted")."""

    blocks: int  # whole KV blocks taken over
    reason: str = ""  # why none were believed; empty: what was whole is ours
    marks: Mapping[str, float] = field(default_factory=dict)


class ShadowEngine(Engine, Protocol):
    """An engine whose weights and KV live in a vault, so that another can go on where it ended.

    `load`, then any number of (`wake`, `prove`, …, `rest`). Before `wake` it writes private memory only; between `load`
    and `wake` everything is mapped and warm (unless it was made to sleep unmapped), so that a wake makes no driver
    call, no allocation, no import (fact 4a).
    """

    gpu_fence: Event  # set while no earlier owner's queued work can land any more; cleared by `wake`

    @property
    def last_epoch(self) -> int:
        """The newest epoch the vault has told of, 0 before any."""

    @property
    def resumes(self) -> Resumes:
        """What became of the streams that came back since the last wake."""

    @property
    def proven(self) -> bool:
        """What was taken over has shown itself to be right: the next adopter may believe it."""

    @property
    def proving(self) -> bool:
        """It is about to be shown: streams that come back are in the same steps."""

    async def check(self) -> str:
        """Answer a known question beside the shared pool, in private memory: what is to blame for a wrong answer, or
        nothing."""

    async def let_go(self) -> None:
        """While it stands by: nothing of the vault's is mapped any more, so that it may be moved; what was captured and
        compiled stays, and so do the addresses."""

    async def stand_up(self) -> str:
        """What was let go of is there again, and the canary says so: what is to blame for a wrong answer, or nothing.
        Raises as `load` does."""

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        """Own the pool under `epoch`: returns past the CPU fence, ready for work. Raises as `load` does; the caller
        bounds it. `pass_fds` go to processes it starts."""

    def prove(self) -> None:
        """Begin to show that what was taken over is right. Never blocks, and delays nobody: a known question rides with
        the others' steps. Until its first token was right nobody's leave the engine. A wrong answer is asked for once
        more, alone where it could depend on others, and everything waits for it; a second one is `disproved`."""

    def serve_on(self) -> None:
        """After `disproved`, where no other engine can take over: send what was made, and all that follows."""

    async def rest(self, *, believed: bool = True) -> None:
        """A planned handover: drain the device, drop write access, tell the vault; stand by again. Not `believed`: what
        it computed is nothing to go on from, and the next owner starts with an empty pool."""
