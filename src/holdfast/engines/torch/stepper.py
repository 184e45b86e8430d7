"""The thread that makes steps: plan, launch, wait, retire, hand over; again, while there is work.

Always true: the books (scheduler, blocks, index) change only under `lock`, and no lock is held while the device is
waited for; steps retire in their order, at most `ahead` of them are launched beside the one that is waited for; what a
step completed is published before its tokens leave this thread; an error of the device ends the process, since nothing
that was computed after it can be believed. What a step made waits in `made` until the loop takes it, so that a cancel
can still take a stream's share out of it. `budget_ms` is declared before a step is launched and holds until it has
landed; it falls only after `steps` has grown, so whoever reads it first and `steps` next never sees an old step with a
new step's budget.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from holdfast.core.requests import Output, Sampling
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.paged.step_budget import ERRAND_MS_MAX, STEP_MS_MAX, StepBudget
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.launched import Launched

RECENT_STEPS = 256  # enough for a p99 to mean a few steps
CONGESTED_S = 0.002  # a congested receiver drains a socket buffer in about this time
ENDS_S = STEP_MS_MAX / 1000
PINGS_MAX = 1024  # unanswered ones: a worker has one for each of its connections at most, and 256 of these
FIRST_STEPS = 6  # the canary's, those of the streams that come back, and a plain one to compare with

log = logging.getLogger("holdfast.engine")
T = TypeVar("T")


def threads_for(wanted: int) -> int:
    """How many a product may use; 0: all cores but one, which serving and a starting standby need."""
    return wanted or max(1, (os.cpu_count() or 2) - 1)


def use_threads(count: int, device: torch.device | None = None) -> None:
    """OpenMP counts them per calling thread, and so is the current GPU: each thread that computes says it itself."""
    torch.set_num_threads(count)
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that is launched."""

    scheduler: Scheduler
    plan: StepPlan
    launched: Launched
    began_s: float
    budget_ms: float


class FirstSteps:
    """The first steps after a wake, for the log: how many positions, how long to launch, when over. A later one costs a
    comparison."""

    def __init__(self, woken_s: float) -> None:
        self._woken_s = woken_s
        self._launched: list[tuple[int, float, float]] = []
        self._landed: list[float] = []

    def launched(self, positions: int, began_s: float, ended_s: float) -> None:
        if len(self._launched) < FIRST_STEPS:
            self._launched.append((positions, began_s, ended_s))

    def landed(self, now_s: float) -> None:
        if len(self._landed) < FIRST_STEPS:
            self._landed.append(now_s)
            if len(self._landed) == FIRST_STEPS:
                log.info("first steps after the wake: %s", "; ".join(self.words()))

    def words(self) -> list[str]:
        told = []
        for (positions, began_s, ended_s), landed_s in zip(self._launched, self._landed, strict=False):
            begun_ms, over_ms = ((each_s - self._woken_s) * 1000 for each_s in (began_s, landed_s))
            launch_ms = (ended_s - began_s) * 1000
            told.append(f"{positions} positions at {begun_ms:.1f} ms, launched in {launch_ms:.1f}, over {over_ms:.1f}")
        return told


class Stepper:
    """`deliver` hears that there are outputs more in `made` (and says False to ease off), `failed` an error's words.
    Neither may wait: they are called in this thread, the first of them under `lock`."""

    def __init__(
        self,
        deliver: Callable[[], bool],
        failed: Callable[[str], None],
        threads: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self._deliver = deliver
        self._failed = failed
        self._threads = threads
        self._device = device
        self.lock = threading.Lock()
        self._work = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._over = False
        self.scheduler: Scheduler | None = None
        self._computer: Computer | None = None
        self._alone: Scheduler | None = None
        self._alone_due = False
        self._flights: deque[_Flight] = deque()  # the computer's `ahead` and one, at most
        self._landed_s = 0.0
        self._first = FirstSteps(0.0)
        self._errands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # canaries and the like: one or two
        self._pings: deque[Callable[[], None]] = deque(maxlen=PINGS_MAX)
        # Outputs by step, for the loop to take one by one: it bounds them, by easing off and by what it lets run.
        self.made: deque[list[Output]] = deque()
        self.steps = 0
        self.budget_ms = 0.0  # for all that is in flight
        self._budget = StepBudget()
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
            self._first = FirstSteps(time.perf_counter())

    def serve_alone(self, scheduler: Scheduler) -> Scheduler:
        """With `lock` held. Its steps are never mixed with the others', with which they take turns, until it has
        nothing left to do."""
        self._alone, self._alone_due = scheduler, True
        return scheduler

    def poke(self) -> None:
        """There may be work."""
        self._work.set()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do this between two steps: a thread has its own library handles and workers, made by whoever computes first,
        so what is tried and warmed up must be tried here."""
        future: Future[T] = Future()
        self._errands.append((work, future))
        self.poke()
        return future

    def ping(self, answer: Callable[[], None]) -> None:
        """Call this between two steps. Unlike an errand it holds nothing up and waits for no step in flight."""
        self._pings.append(answer)
        self.poke()

    def rest(self) -> list[int]:
        """No step after the one under way; the streams that were left."""
        with self.lock:
            scheduler, self.scheduler, self._alone = self.scheduler, None, None
            if scheduler is not None:
                self._tell(scheduler.take_early())
        if not self._idle.wait(ENDS_S):
            raise TimeoutError(f"a step did not end within {ENDS_S:g} s")
        self._computer = None
        return scheduler.clear() if scheduler is not None else []

    def cancel(self, stream: int) -> None:
        """Nothing more of it: no step, and nothing that is made and not yet taken."""
        with self.lock:
            for scheduler in (self.scheduler, self._alone):
                if scheduler is not None:
                    scheduler.cancel(stream)
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
        for _, future in self._errands:
            future.cancel()

    def _run(self) -> None:
        try:
            use_threads(self._threads, self._device)
            while True:
                self._work.clear()  # before the look at all that sets it: what comes later sets it again
                if self._over:
                    return
                while self._pings:
                    self._pings.popleft()()
                if not (self._step() or self._run_errand()):
                    self._work.wait()
        except Exception as error:  # the thread's root: whatever it was, no step can follow it
            self._failed(f"{type(error).__name__}: {error}")

    def _step(self) -> bool:
        """Launch a step, if there is one, and land the oldest once enough are on their way; False: nothing to do."""
        with self.lock:
            scheduler, computer = self.scheduler, self._computer
            alone = self._alone if self._alone_due else None
            serves = computer is not None and alone is None and not self._errands
            plan = scheduler.plan() if scheduler is not None and serves else None
            if scheduler is not None:
                self._tell(scheduler.take_early())
            if plan is not None:
                self._idle.clear()
        if scheduler is not None and computer is not None and plan is not None:
            self._flights.append(self._launch(scheduler, plan, computer))
            if len(self._flights) <= computer.ahead:
                return True
        if not self._flights:
            return computer is not None and self._step_alone(computer)
        if not self._land(self._flights.popleft()):
            time.sleep(CONGESTED_S)
        self._alone_due = True
        return True

    def _step_alone(self, computer: Computer) -> bool:
        """No other step is in flight. False: nobody wants one."""
        with self.lock:
            alone, self._alone_due = self._alone, False
            plan = alone.plan() if alone is not None else None
            if plan is None:
                self._alone = None
            else:
                self._idle.clear()
        if alone is None or plan is None:
            return alone is not None  # it is over: the others' turn
        self._land(self._launch(alone, plan, computer))
        return True

    def meets(self, sampling: Sampling) -> None:
        """A request is about to be computed: kernels may compile for it. Called under the lock."""
        self._budget.meets(sampling)

    def _launch(self, scheduler: Scheduler, plan: StepPlan, computer: Computer) -> _Flight:
        budget_ms = self._budget.of(plan)
        self.budget_ms = max(budget_ms, self._budget_in_flight())
        began_s = time.perf_counter()
        launched = computer.launch(plan)
        self._first.launched(plan.token_count, began_s, time.perf_counter())
        return _Flight(scheduler, plan, launched, began_s, budget_ms)

    def _budget_in_flight(self) -> float:
        return max((flight.budget_ms for flight in self._flights), default=0.0)

    def _run_errand(self) -> bool:
        if not self._errands:
            return False
        work, future = self._errands.popleft()
        if future.set_running_or_notify_cancel():
            self.budget_ms, began_s = ERRAND_MS_MAX, time.perf_counter()
            try:
                future.set_result(work())
            except Exception as error:  # whoever asked hears it
                future.set_exception(error)
            finally:
                self.budget_ms = self._budget.errand_took((time.perf_counter() - began_s) * 1000)
        return True

    def _land(self, flight: _Flight) -> bool:
        """Whether the receiver keeps up."""
        tokens, logprobs = flight.launched.result()
        with self.lock:
            now_s = time.perf_counter()
            took_s = now_s - max(flight.began_s, self._landed_s)
            self._landed_s = now_s
            self._first.landed(now_s)
            self.steps += 1
            self.recent_s = [*self.recent_s[1 - RECENT_STEPS :], took_s]
            self._budget.took(flight.plan, took_s * 1000)
            self.budget_ms = self._budget_in_flight()
            willing = self._tell(flight.scheduler.retire(flight.plan, tokens, logprobs))
            if not self._flights:
                self._idle.set()
        return willing

    def _tell(self, outputs: list[Output]) -> bool:
        if not outputs:
            return True
        self.made.append(outputs)
        return self._deliver()
