"""A sim engine's streams: the paged scheduler, with simulated prefills and faults. No timers, no I/O; time is an
argument.

A prefill takes no time here, so its stream is held back for as long as a real one would take. Faults (streams cut,
streams that fail after some tokens) cancel streams of the scheduler from outside, as its users would.

Always true: tokens depend on pages and weights, never on other streams or the pace.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from holdfast.core.errors import Code
from holdfast.core.requests import Failure, GenerateRequest, Output
from holdfast.engines.paged.blocks import Blocks
from holdfast.engines.paged.scheduler import Scheduler, SchedulerSettings
from holdfast.engines.paged.sequences import PagedStream
from holdfast.engines.sim.computer import SimComputer
from holdfast.engines.sim.faults import Faults
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, load
from holdfast.spec.engines import SimSettings

FAILURE = Failure(Code.ENGINE_SHUTDOWN, "the engine failed on command (faults error_after, error_every, error_token)")


def scheduler_settings(settings: SimSettings) -> SchedulerSettings:
    """Return settings with which a step takes all prompts whole: a prefill costs `ttft_ms`, whatever its length."""
    return SchedulerSettings(
        load().size,
        frozenset({EOS_TOKEN_ID}),
        settings.context_tokens_max,
        settings.concurrency,
        settings.queue,
        settings.kv_blocks * settings.block_size + settings.concurrency,
    )


class Serving:
    """The streams of one sim engine. `prefill_s` draws the duration of a prefill without any known KV."""

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
        self._ready_s: dict[PagedStream, float] = {}  # of the running streams in prefill: when it is over
        self._faults = faults
        self._taken = 0  # streams, since they fail by number
        # Faults: the length of its text at which a stream fails, or vanishes.
        self._fails_at: dict[PagedStream, int] = {}
        self._cut_at: dict[PagedStream, int] = {}
        self.lost: list[int] = []  # vanished without a word to their clients
        self._now_s = 0.0
        self.stalled = False  # the last step had nothing to do, though streams run: they wait for blocks

    @property
    def prefilling(self) -> bool:
        """Return True if some running stream has made no token since it started to run."""
        return bool(self._ready_s)

    @property
    def decoding(self) -> int:
        return len(self.scheduler.running) - len(self._ready_s)

    def next_ready(self) -> float:
        """Return when the first prefill is over; inf without any."""
        return min(self._ready_s.values(), default=math.inf)

    def submit(self, number: int, request: GenerateRequest, now: float) -> None:
        """Queue a request, or raise HoldfastError and change nothing."""
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
        """Forget a stream that has never run; return True if there was one."""
        return self.scheduler.cancel(number, unbegun=True)

    def admit(self, now: float) -> None:
        """Start streams that can run, after others ended or blocks came free."""
        self._now_s = now
        self.scheduler.admit()
        if self._ready_s:
            self._ready_s = {stream: ready for stream, ready in self._ready_s.items() if stream.held}

    def _started(self, stream: PagedStream) -> None:
        stream.held = True
        self._ready_s[stream] = self._now_s + self._prefill_s() * stream.missing / len(stream.tokens)

    # -- steps

    def step(self, now: float) -> list[Output]:
        """Return a token for every running stream with its prefill done."""
        self._now_s = now
        outputs = [Output(number, [], failure=FAILURE) for number in self._end(self._fails_at, now)]
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
        """Return True if a stream with its prefill done has the token that kills."""
        return any(ready <= now and self._poison in stream.request.tokens for stream, ready in self._ready_s.items())

    # -- faults

    def _doom(self, stream: PagedStream) -> None:
        """Apply the faults for a new stream."""
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

    def cut(self, now: float) -> list[int]:
        """Drop every running stream without a last output, and return them."""
        lost = list(self.scheduler.running)
        for number in lost:
            self.scheduler.cancel(number)
        self.admit(now)
        return lost

    def fail_after(self, tokens: int) -> None:
        for stream in self.scheduler.running.values():
            self._fails_at[stream] = len(stream.tokens) + tokens

    def recover(self, now: float) -> None:
        """Note that faults are over: no stream fails any more, and a prefill begun at a slow pace ends at the right
        one."""
        self._fails_at.clear()
        self._cut_at.clear()
        for stream, ready in self._ready_s.items():
            self._ready_s[stream] = min(ready, now + self._prefill_s())

    def _end(self, at: dict[PagedStream, int], now: float) -> list[int]:
        """Cancel the streams that have reached their length in `at`, and return them."""
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
