"""The sim engine implements the contract of `engines.contract` over the paged scheduler, paced by the event loop's
timers.

Always true: at most one timer is armed, and none when no stream runs. A step is one synchronous pass that ends in one
call of the sink. A token that ends a stream (end of turn or a stop token id) IS the last id of the output's tokens: the
frontend decides whether to show it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Callable

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.engines.contract import Capabilities, EngineEvents, Limits, Progress, p99_ms
from holdfast.engines.host.proving import CANARY
from holdfast.engines.paged.blocks import Blocks, PrivateBlocks
from holdfast.engines.sim.computer import TOKEN_BYTES, SimComputer
from holdfast.engines.sim.faults import VAULT_FAULTS, Fault, Faults
from holdfast.engines.sim.serving import Serving
from holdfast.engines.sim.vocabulary import LanguageVariant, load
from holdfast.kv.pool import KvUse
from holdfast.spec.engines import SimSettings

EASE_OFF_S = 0.001  # a congested receiver drains a socket buffer in about this time
RECENT_STEPS = 512  # enough for a p99 to mean five steps
SLOW_BASE_S = 0.001  # what a step counts as at full speed, when a fault multiplies it
PINGS_MAX = 1024  # unanswered ones: a worker has one for each of its connections at most, and 256 of these


class SimEngine:
    """A deterministic engine without a model. `rng` only varies the pace; tokens never depend on it."""

    def __init__(self, settings: SimSettings, rng: random.Random) -> None:
        self.settings = settings
        self.vocabulary = load(LanguageVariant.of(settings))
        self.faults = Faults.with_one(settings.fault)
        self._rng = rng
        self._serving: Serving | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: EngineEvents
        self._timer: asyncio.Handle | None = None
        self._due = 0.0  # when the armed timer's step should start
        self._since = 0.0  # when the step in the making began
        self._flushing = False
        self._stepping = False  # inside the sink
        self._thread: tuple[int, int] | None = None
        self._steps = 0
        self._load = 1
        self._recent_s = deque[float](maxlen=RECENT_STEPS)
        self._pings = deque[Callable[[], None]](maxlen=PINGS_MAX)

    def __repr__(self) -> str:
        serving = self._serving
        streams = f"{serving.scheduler!r}, {serving.blocks.use().held} blocks" if serving is not None else "at rest"
        return f"<SimEngine {streams}, {self._steps} steps, faults {self.faults.status()}>"

    @property
    def limits(self) -> Limits:
        settings = self.settings
        return Limits(settings.concurrency, settings.queue, settings.context_tokens_max)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(deterministic=True, build="sim", dtype="exact", vocabulary=self.vocabulary.size)

    async def load(self, events: EngineEvents) -> None:
        self._loop, self._events = asyncio.get_running_loop(), events
        self._thread = os.getpid(), threading.get_native_id()
        await self.faults.while_loading()
        self._serve_alone()

    def _serve_alone(self) -> None:
        """Serve from private pages: without a vault there is no wake."""
        settings = self.settings
        blocks = PrivateBlocks(range(settings.kv_blocks), settings.block_size)
        self._serve(blocks, memoryview(bytearray(settings.kv_blocks * settings.block_size * TOKEN_BYTES)))

    def _serve(self, blocks: Blocks, pages: memoryview, weights_right: Callable[[], bool] = lambda: True) -> None:
        computer = SimComputer(self.vocabulary, pages, self.settings.block_size, self.faults, weights_right)
        self._serving = Serving(self.settings, blocks, computer, self._prefill_s, self.faults)

    def _end_serving(self) -> list[int]:
        """Stop making steps and touching pages; return the unfinished streams."""
        self._disarm()
        serving, self._serving = self._serving, None
        if serving is None:
            return []
        left = serving.scheduler.clear()
        serving.computer.close()
        return left

    async def verify(self) -> str:
        return "they are its own, and nobody wrote down what they must be"

    async def renew(self) -> None:
        """Make its words and its pages again: all it says and computes follows from them."""
        self._end_serving()
        self._load += 1
        await self.faults.while_loading()
        self._serve_alone()

    async def stop(self) -> None:
        self._loop = None
        self._end_serving()

    def submit(self, stream: int, request: GenerateRequest) -> None:
        loop, serving = self._loop, self._serving
        if loop is None or serving is None:
            raise HoldfastError(Code.ENGINE_SHUTDOWN, f"the engine {'is not started' if loop is None else 'stands by'}")
        serving.submit(stream, self.faults.as_read(request, proof=stream == CANARY), loop.time())
        self._flush_soon()
        self._rearm()

    def cancel(self, stream: int) -> None:
        if self._loop is not None and self._serving is not None:
            self._serving.cancel(stream, self._loop.time())
            self._rearm()

    def withdraw(self, stream: int) -> bool:
        return self._serving is not None and self._serving.withdraw(stream)

    def progress(self) -> Progress:
        serving = self._serving
        # Twice the slowest prefill: it is a bound on an honest step, not an estimate of it.
        budget_s = 2 * self._scaled_s(self.settings.ttft_ms) * (1 + self.settings.jitter)
        return Progress(
            steps=self._steps,
            running=len(serving.scheduler.running) if serving is not None else 0,
            waiting=len(serving.scheduler.waiting) if serving is not None else 0,
            step_ms_p99=p99_ms(self._recent_s),
            budget_ms=budget_s * 1000 if serving is not None and serving.prefilling else 0.0,
            thread=self._thread,
            kv=serving.blocks.use() if serving is not None else KvUse(),
            load=self._load,
        )

    def ping(self, answer: Callable[[], None]) -> None:
        """Answer when the current step is over, which is when its timer fires."""
        self._pings.append(answer)
        if self._timer is None and self._loop is not None:
            self._loop.call_soon(self._answer_pings)

    def _answer_pings(self) -> None:
        assert self._loop is not None
        while self._pings and not self.faults.wedged:
            answer, late_s = self._pings.popleft(), self.faults.late_pongs_ms / 1000
            self._loop.call_later(late_s, answer) if late_s else answer()

    # Pace

    def _scaled_s(self, ms: float) -> float:
        return ms / 1000 * self.faults.slow_factor

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + self.settings.jitter * self._rng.uniform(-1, 1)) if seconds else 0.0

    def _prefill_s(self) -> float:
        return self._jittered(self._scaled_s(self.settings.ttft_ms))

    def _interval_s(self) -> float:
        factor = self.faults.slow_factor
        if self.settings.tpot_ms == 0 and factor > 1:
            return SLOW_BASE_S * factor
        return self._jittered(self._scaled_s(self.settings.tpot_ms))

    # Timers

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._pings and self._loop is not None:  # no step's end answers them now
                self._loop.call_soon(self._answer_pings)

    def _rearm(self) -> None:
        """Set the timer after streams came or went: a current step keeps its time, an idle engine waits for a
        prefill."""
        serving = self._serving
        if self._stepping:  # the sink cancels or submits: the step's end arms the timer
            return
        if serving is None or not serving.scheduler.running or self.faults.wedged:
            self._disarm()
        elif self._timer is None or not serving.decoding or serving.stalled:
            self._arm_at(0.0 if serving.decoding else serving.next_ready())

    def _arm_at(self, due: float) -> None:
        """Start the next step at `due`, or now if that time has passed."""
        assert self._loop is not None
        self._disarm()
        self._due = self._since = max(due, self._loop.time())
        self._timer = self._loop.call_at(self._due, self._step)

    def _arm_after(self, serving: Serving, finished: float, congested: bool) -> None:
        if serving.decoding and not serving.stalled:
            self._arm_next(finished, congested)
        elif serving.prefilling:  # else all that run wait for blocks: what brings some arms the timer
            self._arm_at(serving.next_ready())

    def _arm_next(self, finished: float, congested: bool) -> None:
        """Start the next step an interval after this one was due; one that is late already starts at once."""
        assert self._loop is not None
        self._since = finished
        self._due = max(self._due + self._interval_s(), finished + (EASE_OFF_S if congested else 0.0))
        if self._due > finished:
            self._timer = self._loop.call_at(self._due, self._step)
        else:
            self._timer = self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._timer = None
        loop, serving = self._loop, self._serving
        if loop is None or serving is None or self.faults.wedged:
            return
        # A timer may fire a clock tick early; the streams it is for are due all the same.
        now = max(loop.time(), self._due)
        if self.settings.poison_token >= 0 and serving.poisoned(now):
            os.kill(os.getpid(), signal.SIGKILL)
        outputs = serving.step(now)
        if serving.lost:
            self._events.closed(serving.lost)
            serving.lost = []
        self._stepping = True
        try:
            congested = bool(outputs) and not self._events.outputs(outputs)
        finally:
            self._stepping = False
        finished = loop.time()
        if outputs:
            self._recent_s.append(finished - self._since)
            self._steps += 1
        if self._serving is serving and not self.faults.wedged:  # by the sink
            self._arm_after(serving, finished, congested)
        self._answer_pings()

    def _flush_soon(self) -> None:
        early = self._serving is not None and self._serving.scheduler.early
        if early and not self._flushing and not self.faults.wedged:
            assert self._loop is not None
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Hand over the last outputs of requests that needed no further token."""
        self._flushing = False
        if self._serving is None or self.faults.wedged:
            return
        outputs = self._serving.scheduler.take_early()
        if outputs:
            self._events.outputs(outputs)

    # Faults

    def inject(self, fault: Fault) -> None:
        """Carry out a fault; raise HoldfastError if this engine cannot."""
        if self._loop is None:
            raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine is not started")
        serving = self._serving
        match fault.kind:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                self._events.closed(serving.cut(self._loop.time()) if serving is not None else [])
            case "error_after":
                if serving is not None:
                    serving.fail_after(int(fault.value))
            case "reset":
                self.faults.reset()
            case "late_beats":
                self.faults.delay_beats(fault.value / 1000)
            case "clear":
                self._recover()
            case "device_error":
                self._events.fatal("a device error that stays (fault device_error)")
            case kind if kind in VAULT_FAULTS:
                self._inject_in_vault(fault)
            case _:
                self.faults.switch(fault)
        self._flush_soon()
        self._rearm()

    def _inject_in_vault(self, fault: Fault) -> None:
        raise HoldfastError(Code.INVALID_REQUEST, f"fault {fault.kind}: this engine has no memory in a vault")

    def _recover(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self.faults.clear()
        self._loop.call_soon(self._answer_pings)
        if self._serving is None:
            return
        self._serving.recover(now)
        if self._timer is not None:  # it may be set for much later, at the slow pace
            self._disarm()
            self._due = min(self._due, now)
            self._arm_after(self._serving, now, congested=False)
