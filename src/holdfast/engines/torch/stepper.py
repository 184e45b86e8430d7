"""The thread that makes steps: plan, compute, draw, retire, hand over; again, while there is work.

Always true: one step at a time, and its books (scheduler, blocks, index) change only under `lock`, never while the
device computes; what a step completed is published before its tokens leave this thread; an error of the device ends
the process, since nothing that was computed after it can be believed. What a step made waits in `made` until the
loop takes it, so that a cancel can still take a stream's share out of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from holdfast.core.requests import Output, TokenLogprobs
from holdfast.engines.torch.batch import step_batch
from holdfast.engines.torch.model import Model, forward, logits
from holdfast.engines.torch.noise import token_words
from holdfast.engines.torch.sampling import SamplingRows, draw, rows_for, told_logprobs
from holdfast.engines.torch.scheduler import Scheduler
from holdfast.engines.torch.sequences import StepPlan

RECENT_STEPS = 256  # enough for a p99 to mean a few steps
CONGESTED_S = 0.002  # a congested receiver drains a socket buffer in about this time
# A step with a prompt in it may take so long before it counts as stuck: seconds on a CPU, at most.
PREFILL_BUDGET_MS = 60_000.0
ENDS_S = 60.0  # the longest step there may be


def threads_for(wanted: int) -> int:
    """How many a product may use; 0: all cores but one, which serving and a starting standby need."""
    return wanted or max(1, (os.cpu_count() or 2) - 1)


def use_threads(count: int) -> None:
    """OpenMP counts them per calling thread, so each that computes says it itself."""
    torch.set_num_threads(count)


class Computer:
    """Steps of one model over one range of KV pages."""

    def __init__(self, model: Model, kv: torch.Tensor, block_tokens: int) -> None:
        self._model = model
        self._kv = kv
        self._block_tokens = block_tokens
        self._words = token_words(model.config.vocabulary, kv.device)
        self._rows: SamplingRows | None = None

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> tuple[dict[int, int], dict[int, TokenLogprobs]]:
        """The tokens drawn, by stream, and logprobs for those who asked."""
        model = self._model
        batch = step_batch(plan.segments, self._block_tokens, self._kv.dtype, self._kv.device, exact=model.exact)
        hidden = forward(model, batch, self._kv)
        drawing = plan.drawing
        if not drawing:
            return {}, {}
        if len(drawing) < len(plan.segments):
            places = [place for place, segment in enumerate(plan.segments) if segment.wants_token]
            hidden = hidden.index_select(0, torch.tensor(places, device=hidden.device))
        rows = self._rows = rows_for(drawing, self._words, self._rows)
        drawn = draw(logits(model, hidden), rows)
        rows.advance(drawn.tokens)
        numbers = [segment.stream for segment in drawing]
        return dict(zip(numbers, drawn.tokens.tolist(), strict=True)), told_logprobs(drawn, rows)


class Stepper:
    """`deliver` hears that there are outputs more in `made` (and says False to ease off), `failed` an error's words.
    Neither may wait: they are called in this thread, the first of them under `lock`."""

    def __init__(self, deliver: Callable[[], bool], failed: Callable[[str], None], threads: int = 1) -> None:
        self._deliver = deliver
        self._failed = failed
        self._threads = threads
        self.lock = threading.Lock()
        self._work = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._over = False
        self.scheduler: Scheduler | None = None
        self._computer: Computer | None = None
        # Outputs by step, for the loop to take one by one: it bounds them, by easing off and by what it lets run.
        self.made: deque[list[Output]] = deque()
        self.steps = 0
        self.prefilling = False
        self.recent_s: list[float] = []
        # A daemon: a hung device must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def thread(self) -> int:
        return self._thread.native_id or 0

    def serve(self, scheduler: Scheduler, computer: Computer) -> None:
        with self.lock:
            self.scheduler, self._computer = scheduler, computer

    def poke(self) -> None:
        """There may be work."""
        self._work.set()

    def rest(self) -> list[int]:
        """No step after the one under way; the streams that were left."""
        with self.lock:
            scheduler, self.scheduler = self.scheduler, None
            if scheduler is not None:
                self._tell(scheduler.take_early())
        if not self._idle.wait(ENDS_S):
            raise TimeoutError(f"a step did not end within {ENDS_S:g} s")
        self._computer = None
        return scheduler.clear() if scheduler is not None else []

    def cancel(self, stream: int) -> None:
        """Nothing more of it: no step, and nothing that is made and not yet taken."""
        with self.lock:
            if self.scheduler is not None:
                self.scheduler.cancel(stream)
            for outputs in self.made:
                outputs[:] = [output for output in outputs if output.stream != stream]
        self.poke()  # what it held may be what another waits for

    def stop(self) -> None:
        self._over = True
        with self.lock:
            self.scheduler = None
        self.poke()
        if self._thread.is_alive():
            self._thread.join(ENDS_S)

    def _run(self) -> None:
        try:
            use_threads(self._threads)
            while not self._over:
                self._work.clear()
                if not self._step():
                    self._work.wait()
        except Exception as error:  # the thread's root: whatever it was, no step can follow it
            self._failed(f"{type(error).__name__}: {error}")

    def _step(self) -> bool:
        """One step; False: nothing to do."""
        with self.lock:
            scheduler, computer = self.scheduler, self._computer
            if scheduler is None or computer is None:
                return False
            plan = scheduler.plan()
            self.prefilling = plan is not None and scheduler.prefilling
            if plan is not None:
                self._idle.clear()
            self._tell(scheduler.take_early())
        if plan is None:
            return False
        try:
            willing = self._compute(scheduler, computer, plan)
        finally:
            self._idle.set()
        if not willing:
            time.sleep(CONGESTED_S)
        return True

    def _compute(self, scheduler: Scheduler, computer: Computer, plan: StepPlan) -> bool:
        """Whether the receiver keeps up."""
        began_s = time.perf_counter()
        tokens, logprobs = computer.compute(plan)
        with self.lock:
            outputs = scheduler.retire(plan, tokens, logprobs)
            self.steps += 1
            self.recent_s = [*self.recent_s[1 - RECENT_STEPS :], time.perf_counter() - began_s]
            return self._tell(outputs)

    def _tell(self, outputs: list[Output]) -> bool:
        if not outputs:
            return True
        self.made.append(outputs)
        return self._deliver()
