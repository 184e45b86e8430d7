"""The sim engine: the contract of `engines.contract` over the scheduler, paced by the event loop's timers.

Always true: at most one timer is armed, and none when nothing runs; a step is one synchronous pass that ends in one
call of the sink. A token that ends a stream (end of turn or a stop token id) IS in the output's tokens, as the last id:
the frontend decides whether to show it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.engines.contract import ClosedSink, FatalSink, Limits, Progress, StepSink
from holdfast.engines.sim.blocks import CountedBlocks
from holdfast.engines.sim.faults import SHADOW, Fault, Faults
from holdfast.engines.sim.scheduler import Scheduler
from holdfast.engines.sim.settings import SimSettings
from holdfast.engines.sim.vocabulary import load

EASE_OFF_S = 0.001  # a congested receiver drains a socket buffer in about this time
RECENT_STEPS = 512  # enough for a p99 to mean five steps
SLOW_BASE_S = 0.001  # what a step counts as at full speed, when a fault multiplies it


class SimEngine:
    """A deterministic engine without a model. `rng` only moves the pace; tokens never depend on it."""

    def __init__(self, settings: SimSettings, rng: random.Random) -> None:
        self.settings = settings
        self.faults = Faults()
        self.on_fatal: FatalSink = lambda why: os.kill(os.getpid(), signal.SIGKILL)
        self._rng = rng
        blocks = CountedBlocks(settings.kv_blocks, settings.block_size)
        self._scheduler = Scheduler(load(), settings, self._prefill_s, blocks)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sink: StepSink = lambda outputs: True
        self._closed: ClosedSink = lambda streams: None
        self._timer: asyncio.Handle | None = None
        self._due = 0.0  # when the armed timer's step should start
        self._since = 0.0  # when the step in the making began
        self._flushing = False
        self._stepping = False  # inside the sink
        self._thread = 0
        self._steps = 0
        self._recent_s = [0.0] * RECENT_STEPS  # a ring; slots beyond `_steps` are unused
        self._p99 = (0, 0.0)  # (steps when computed, milliseconds)

    def __repr__(self) -> str:
        s = self._scheduler
        return (
            f"<SimEngine {len(s.running)} running, {len(s.waiting)} waiting, {s.blocks_used} blocks, "
            f"{self._steps} steps, faults {self.faults.status()}>"
        )

    @property
    def limits(self) -> Limits:
        return self.settings.limits

    @property
    def deterministic(self) -> bool:
        return True

    async def start(self, sink: StepSink, closed: ClosedSink) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_native_id()
        self._sink, self._closed = sink, closed

    async def stop(self) -> None:
        self._loop = None
        self._disarm()
        self._scheduler.clear()

    def submit(self, stream: int, request: GenerateRequest) -> None:
        loop = self._loop
        if loop is None or not self._serving():
            raise HoldfastError(Code.ENGINE_SHUTDOWN, f"the engine {'is not started' if loop is None else 'stands by'}")
        self._scheduler.submit(stream, request, loop.time())
        self._flush_soon()
        self._rearm()

    def _serving(self) -> bool:
        return True

    def cancel(self, stream: int) -> None:
        if self._loop is not None:
            self._scheduler.cancel(stream, self._loop.time())
            self._rearm()

    def progress(self) -> Progress:
        scheduler = self._scheduler
        # Twice the slowest prefill: it is a bound on an honest step, not an estimate of it.
        budget_s = 2 * self._scaled_s(self.settings.ttft_ms) * (1 + self.settings.jitter)
        return Progress(
            steps=self._steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            step_ms_p99=self._step_ms_p99(),
            budget_ms=budget_s * 1000 if scheduler.prefilling else 0.0,
            thread=self._thread,
            kv=scheduler.blocks.use(),
        )

    def _step_ms_p99(self) -> float:
        steps = self._steps
        if self._p99[0] != steps:
            recent = sorted(self._recent_s[: min(steps, RECENT_STEPS)])
            self._p99 = (steps, recent[(len(recent) * 99 - 1) // 100] * 1000)
        return self._p99[1]

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

    def _rearm(self) -> None:
        """After streams came or went: a step in the making keeps its time, an idle engine waits for a prefill."""
        scheduler = self._scheduler
        if self._stepping:  # the sink cancels or submits: the step's end arms the timer
            return
        if not scheduler.running or self.faults.wedged:
            self._disarm()
        elif self._timer is None or (not scheduler.decoding and scheduler.next_ready() < self._due):
            self._arm_idle()

    def _arm_idle(self) -> None:
        """The next step starts when the first prefill is over: no grid to wait for."""
        assert self._loop is not None
        self._disarm()
        self._due = self._since = max(self._scheduler.next_ready(), self._loop.time())
        self._timer = self._loop.call_at(self._due, self._step)

    def _arm_after(self, finished: float, congested: bool) -> None:
        if self._scheduler.decoding:
            self._arm_next(finished, congested)
        elif self._scheduler.running:
            self._arm_idle()

    def _arm_next(self, finished: float, congested: bool) -> None:
        """The next step starts an interval after this one was due; one that is late already starts at once."""
        assert self._loop is not None
        self._since = finished
        self._due = max(self._due + self._interval_s(), finished + (EASE_OFF_S if congested else 0.0))
        if self._due > finished:
            self._timer = self._loop.call_at(self._due, self._step)
        else:
            self._timer = self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._timer = None
        loop = self._loop
        if loop is None or self.faults.wedged:
            return
        # A timer may fire a clock tick early; the streams it is for are due all the same.
        now = max(loop.time(), self._due)
        if self.settings.poison_token >= 0 and self._scheduler.poisoned(now):
            os.kill(os.getpid(), signal.SIGKILL)
        outputs = self._scheduler.step(now)
        self._stepping = True
        try:
            congested = bool(outputs) and not self._sink(outputs)
        finally:
            self._stepping = False
        finished = loop.time()
        if outputs:
            self._recent_s[self._steps % RECENT_STEPS] = finished - self._since
            self._steps += 1
        if self._loop is None or self.faults.wedged:  # by the sink
            return
        self._arm_after(finished, congested)

    def _flush_soon(self) -> None:
        if self._scheduler.early and not self._flushing and not self.faults.wedged:
            assert self._loop is not None
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Hand over the last outputs of requests that had nothing left to make."""
        self._flushing = False
        if self._loop is None or self.faults.wedged:
            return
        outputs, self._scheduler.early = self._scheduler.early, []
        if outputs:
            self._sink(outputs)

    # Faults

    def inject(self, fault: Fault) -> None:
        """Carry out a fault; HoldfastError if it cannot be done here."""
        if self._loop is None:
            raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine is not started")
        match fault.kind:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                self._closed(self._scheduler.cut(self._loop.time()))
            case "error_after":
                self._scheduler.fail_after(int(fault.value))
            case "reset":
                self._reset()
            case "clear":
                self._recover()
            case "device_error":
                self.on_fatal("a device error that stays (fault device_error)")
            case kind if kind in SHADOW:
                self._inject_shadow(fault)
            case _:
                self.faults.switch(fault)
        self._scheduler.wrong_tokens = self.faults.wrong_tokens
        self._scheduler.logprob_drift = self.faults.logprob_drift
        self._flush_soon()
        self._rearm()

    def _inject_shadow(self, fault: Fault) -> None:
        raise HoldfastError(Code.INVALID_REQUEST, f"fault {fault.kind}: this engine has no memory in a vault")

    def _recover(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self.faults.clear()
        self._scheduler.recover(now)
        if self._timer is not None:  # it may be set for much later, at the slow pace
            self._disarm()
            self._due = min(self._due, now)
            self._arm_after(now, congested=False)

    def _reset(self) -> None:
        if self.faults.on_reset is None:
            raise HoldfastError(Code.INVALID_REQUEST, "fault reset: no worker has installed a reset hook")
        self.faults.on_reset()
