"""The thread that makes steps: plan, launch, wait, retire, hand over; again, while there is work.

Always true:
- The scheduler, blocks and index change only under `lock`, and no lock is held during a wait for the device.
- Steps retire in order; at most `ahead` steps are launched besides the one that is waited for.
- Blocks that a step completed are published before its tokens leave this thread.
- A step's outputs wait in `made` until the event loop takes them, so that a cancel can still remove a stream's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from holdfast.core.requests import Output
from holdfast.engines.host.step_thread import CONGESTED_S, ENDS_S, StepThread
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.launched import LaunchedStep

FIRST_STEPS = 6  # the canary's, those of resumed streams, and a plain one to compare with

log = logging.getLogger("holdfast.engine")


def threads_for(wanted: int) -> int:
    """Return how many threads a product may use; 0: all cores but one, which serving and a starting standby need."""
    return wanted or max(1, (os.cpu_count() or 2) - 1)


def use_threads(count: int, device: torch.device | None = None) -> None:
    """Set the threads and the GPU of the calling thread: OpenMP and CUDA keep both per thread."""
    torch.set_num_threads(count)
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step."""

    scheduler: Scheduler
    plan: StepPlan
    launched: LaunchedStep
    began_s: float
    budget_ms: float


class FirstSteps:
    """The first steps after a wake, for the log: number of positions, time to launch, time of the end."""

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
                log.info("first steps after the wake: %s", "; ".join(self._texts()))

    def _texts(self) -> Iterator[str]:
        for (positions, began_s, ended_s), landed_s in zip(self._launched, self._landed, strict=False):
            begun_ms, over_ms = ((each_s - self._woken_s) * 1000 for each_s in (began_s, landed_s))
            launch_ms = (ended_s - began_s) * 1000
            yield f"{positions} positions at {begun_ms:.1f} ms, launched in {launch_ms:.1f}, over {over_ms:.1f}"


class TorchStepThread(StepThread):
    """The torch engine's step thread. It calls `deliver` when there are more outputs in `made`, in this thread under
    `lock`; `deliver` must not block, and returns False to slow down."""

    def __init__(
        self,
        deliver: Callable[[], bool],
        failed: Callable[[str], None],
        threads: int = 1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(failed)
        self._deliver = deliver
        self._threads = threads
        self._device = device
        self.lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self.scheduler: Scheduler | None = None
        self._computer: Computer | None = None
        self._alone: Scheduler | None = None
        self._alone_due = False
        self._flights: deque[_Flight] = deque()  # the computer's `ahead` and one, at most
        self._first = FirstSteps(0.0)
        # Outputs by step, which the event loop takes one by one. It bounds them: it slows steps and limits streams.
        self.made: deque[list[Output]] = deque()

    def serve(self, scheduler: Scheduler, computer: Computer) -> None:
        with self.lock:
            self.scheduler, self._computer = scheduler, computer
            self._first = FirstSteps(time.perf_counter())

    def serve_alone(self, scheduler: Scheduler) -> Scheduler:
        """Serve a second scheduler until it has no work left: its steps alternate with the others' and are never
        batched with them. Called with `lock` held."""
        self._alone, self._alone_due = scheduler, True
        return scheduler

    def drain(self) -> list[int]:
        """Wait for the current step, start no other, and return the unfinished streams."""
        with self.lock:
            scheduler, self.scheduler, self._alone = self.scheduler, None, None
            if scheduler is not None:
                self._hand_over(scheduler.take_early())
        if not self._idle.wait(ENDS_S):
            raise TimeoutError(f"a step did not end within {ENDS_S:g} s")
        self._computer = None
        return scheduler.clear() if scheduler is not None else []

    def cancel(self, stream: int) -> None:
        """Drop a stream and its outputs that the event loop has not taken yet."""
        with self.lock:
            for scheduler in (self.scheduler, self._alone):
                if scheduler is not None:
                    scheduler.cancel(stream)
            for outputs in self.made:
                outputs[:] = [output for output in outputs if output.stream != stream]
        self.poke()  # another stream may wait for its blocks

    def stop(self) -> None:
        with self.lock:
            self.scheduler = None
        super().stop()

    # -- in the thread

    def _prepare(self) -> None:
        use_threads(self._threads, self._device)

    def _turn(self) -> bool:
        if self._step():
            return True
        if self._errands:
            self._run_errand()
            return True
        return False

    def _step(self) -> bool:
        """Launch a step, if there is one; wait for the oldest if enough are in flight. Return False if there is nothing
        to do."""
        with self.lock:
            scheduler, computer = self.scheduler, self._computer
            alone = self._alone if self._alone_due else None
            serves = computer is not None and alone is None and not self._errands
            plan = scheduler.plan() if scheduler is not None and serves else None
            if scheduler is not None:
                self._hand_over(scheduler.take_early())
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
        """Make a step of the separate scheduler, with no other in flight; return False if no stream wants one."""
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

    def _launch(self, scheduler: Scheduler, plan: StepPlan, computer: Computer) -> _Flight:
        budget_ms = self._budget.of(plan)
        self.budget_ms = max(budget_ms, self._budget_in_flight_ms())
        began_s = time.perf_counter()
        launched = computer.launch(plan)
        self._first.launched(plan.token_count, began_s, time.perf_counter())
        return _Flight(scheduler, plan, launched, began_s, budget_ms)

    def _budget_in_flight_ms(self) -> float:
        return max((flight.budget_ms for flight in self._flights), default=0.0)

    def _land(self, flight: _Flight) -> bool:
        """Hand over a step's results; return True if the receiver keeps up."""
        tokens, logprobs = flight.launched.result()
        with self.lock:
            self._landed(flight.plan, flight.began_s)
            self._first.landed(self._landed_s)
            willing = self._hand_over(flight.scheduler.retire(flight.plan, tokens, logprobs))
            if not self._flights:
                self._idle.set()
        return willing

    def _hand_over(self, outputs: list[Output]) -> bool:
        if not outputs:
            return True
        self.made.append(outputs)
        return self._deliver()
