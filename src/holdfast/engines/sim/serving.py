"""A sim engine's streams: the paged scheduler, and what only a simulation has. No timers, no I/O; time comes in.

A prefill takes no time here, so its stream is held back for as long as it would take, and all that ends with a fault
(streams cut, streams that fail after some tokens) is done to the scheduler from outside, as its users would. Always
true: tokens do not depend on who runs beside them, nor on the pace; they do depend on pages and weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from holdfast.core.errors import Code
from holdfast.core.requests import Failure, GenerateRequest, Output
from holdfast.engines.paged.blocks import Blocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.paged.sequences import Stream
from holdfast.engines.paged.settings import SchedulerSettings
from holdfast.engines.sim.computer import SimComputer
from holdfast.engines.sim.faults import Faults
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, load
from holdfast.spec.engines import SimSettings

FAILURE = Failure(Code.ENGINE_SHUTDOWN, "the engine failed on command (faults error_after, error_every, error_token)")


def scheduler_settings(settings: SimSettings) -> SchedulerSettings:
    """A step takes all prompts whole: what a prefill costs is said by `ttft_ms`, not by its length."""
    return SchedulerSettings(
        load().size,
        frozenset({EOS_TOKEN_ID}),
        settings.context_tokens_max,
        settings.concurrency,
        settings.queue,
        settings.kv_blocks * settings.block_size + settings.concurrency,
    )


class Serving:
    """`prefill_s` draws how long the prefill of a stream without any known KV takes."""

    def __init__(
        self,
        settings: SimSettings,
        blocks: Blocks,
        computer: SimComputer,
        prefill_s: Callable[[], float],
        faults: Faults,
    ) -> None:
        self.scheduler = Scheduler(scheduler_settings(settings), blocks, self._started)
        self.blocks = blocks
        self.computer = computer
        self._poison = settings.poison_token
        self._prefill_s = prefill_s
        self._ready_s: dict[Stream, float] = {}  # of the running streams in prefill: when it is over
        self._faults = faults
        self._taken = 0  # streams, since they fail by number
        # Faults: the length of its text at which a stream fails, or vanishes.
        self._fails_at: dict[Stream, int] = {}
        self._cut_at: dict[Stream, int] = {}
        self.lost: list[int] = []  # vanished, and nobody was told
        self._now_s = 0.0
        self.stalled = False  # the last step had nothing to do, whoever runs: they wait for blocks

    @property
    def prefilling(self) -> bool:
        """Whether some running stream has made no token since it started to run."""
        return bool(self._ready_s)

    @property
    def decoding(self) -> int:
        return len(self.scheduler.running) - len(self._ready_s)

    def next_ready(self) -> float:
        """When the first prefill is over; inf without any."""
        return min(self._ready_s.values(), default=math.inf)

    def submit(self, number: int, request: GenerateRequest, now: float) -> None:
        """Take a request, or raise HoldfastError and change nothing."""
        self.scheduler.submit(number, request)
        stream = self.scheduler.find(number)
        if stream is not None:
            self._doom(stream)
        self.admit(now)

    def cancel(self, number: int, now: float) -> None:
        """Forget a stream; unknown numbers are ignored."""
        self.scheduler.cancel(number)
        self.admit(now)

    def withdraw(self, number: int) -> bool:
        """Forget a stream that has never run; whether there was one."""
        return self.scheduler.cancel(number, unbegun=True)

    def admit(self, now: float) -> None:
        """After streams went, or blocks came back: whoever can, starts."""
        self._now_s = now
        self.scheduler.admit()
        if self._ready_s:
            self._ready_s = {stream: ready for stream, ready in self._ready_s.items() if stream.held}

    def _started(self, stream: Stream) -> None:
        stream.held = True
        self._ready_s[stream] = self._now_s + self._prefill_s() * stream.missing / len(stream.tokens)

    # -- steps

    def step(self, now: float) -> list[Output]:
        """A token for every running stream whose prefill is over."""
        self._now_s = now
        outputs = self._failures(now) if self._fails_at else []
        if self._cut_at:
            self.lost += self._end(self._cut_at, now)
        for stream, ready in list(self._ready_s.items()):
            if ready <= now:
                stream.held = False
        plan = self.scheduler.plan()
        self.stalled = plan is None
        if plan is not None:
            outputs += self.scheduler.retire(plan, *self.computer.compute(plan))
        self.admit(now)
        return outputs

    def poisoned(self, now: float) -> bool:
        """Whether a stream whose prefill is over now has the token that kills."""
        return any(ready <= now and self._poison in stream.request.tokens for stream, ready in self._ready_s.items())

    # -- faults

    def _doom(self, stream: Stream) -> None:
        """What is to become of a new stream."""
        faults, self._taken = self._faults, self._taken + 1
        if faults.zero_tokens:
            self.scheduler.cancel(stream.number)
            self.scheduler.early.append(Output(stream.number, [], "stop"))
        elif faults.error_every and self._taken % faults.error_every == 0:
            self._fails_at[stream] = len(stream.tokens) + 1
        elif faults.error_token in stream.request.tokens:
            self._fails_at[stream] = len(stream.tokens)
        elif faults.truncate_tokens:
            self._cut_at[stream] = len(stream.tokens) + faults.truncate_tokens

    def take_lost(self) -> list[int]:
        lost, self.lost = self.lost, []
        return lost

    def cut(self, now: float) -> list[int]:
        """Lose every running stream without a word; answers which."""
        lost = list(self.scheduler.running)
        for number in lost:
            self.scheduler.cancel(number)
        self.admit(now)
        return lost

    def fail_after(self, tokens: int) -> None:
        """Every running stream fails once it has made so many more tokens."""
        for stream in self.scheduler.running.values():
            self._fails_at[stream] = len(stream.tokens) + tokens

    def recover(self, now: float) -> None:
        """Faults are over: nobody fails any more, and a prefill begun at a slow pace ends at the right one."""
        self._fails_at.clear()
        self._cut_at.clear()
        for stream, ready in self._ready_s.items():
            self._ready_s[stream] = min(ready, now + self._prefill_s())

    def _failures(self, now: float) -> list[Output]:
        return [Output(number, [], failure=FAILURE) for number in self._end(self._fails_at, now)]

    def _end(self, at: dict[Stream, int], now: float) -> list[int]:
        """Forget the streams whose text is that long; which."""
        for stream in [stream for stream in at if stream.gone]:
            del at[stream]
        ended = [
            stream.number
            for stream, length in at.items()
            if stream.runs and self._ready_s.get(stream, now) <= now and len(stream.tokens) >= length
        ]
        for number in ended:
            self.scheduler.cancel(number)
        return ended
