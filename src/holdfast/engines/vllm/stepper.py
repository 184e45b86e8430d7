"""The thread in which vLLM lives: it makes vLLM's engine, gives it requests, and makes its steps one after the other.

Always true: nothing of vLLM's is touched in another thread, but for the blocks' books under their lock; what a step
made is handed over before the next begins; an error ends the process, since nothing that was computed after it can be
believed. `budget_ms` is declared before a step is computed and holds until it has landed; it falls only after `steps`
has grown.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.core.requests import Sampling
from holdfast.engines.paged.step_budget import ERRAND_MS_MAX, STEP_MS_MAX, StepBudget

RECENT_STEPS = 256  # enough for a p99 to mean a few steps
CONGESTED_S = 0.002  # a congested receiver drains a socket buffer in about this time
ROOMLESS_S = 0.001  # until it is looked again whether there is room, where nothing could be planned
# A dead engine's streams come back in a burst, within a few milliseconds: nobody else for so long is its end.
BURST_S, BURST_S_MAX = 0.002, 0.02
ENDS_S = STEP_MS_MAX / 1000
PINGS_MAX = 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """What a step of vLLM's computes, as the budget reads it."""

    token_count: int
    segments: range


class Stepper:
    """`deliver` takes a step's outputs (and says False to ease off), `failed` an error's words. Neither may wait: they
    are called in this thread."""

    def __init__(self, deliver: Callable[[list[Any]], bool], failed: Callable[[str], None]) -> None:
        self._deliver = deliver
        self._failed = failed
        self._core: Any = None  # vLLM's EngineCore
        self.after_step: Callable[[], None] = lambda: None
        self._work = threading.Event()
        self._over = False
        self._gathers = False
        self._nothing_ran = False  # in the last step
        self._acts: deque[Callable[[], None]] = deque()  # requests and cancels, in their order
        self._errands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._pings: deque[Callable[[], None]] = deque(maxlen=PINGS_MAX)
        self.steps = 0
        self.budget_ms = 0.0
        self._budget = StepBudget()
        self._plans: deque[Step] = deque()  # of steps in flight
        self._landed_s = 0.0
        self.recent_s: list[float] = []
        # A daemon: a hung device must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def thread(self) -> int:
        return self._thread.native_id or 0

    def serve(self, core: Any) -> None:
        """From now on make steps of this engine's, or of none; called in this thread."""
        self._core = core

    def gather(self) -> None:
        """Before the next step wait for all who come with its first stream: a step for that one alone would keep the
        others waiting."""
        self._gathers = True

    def act(self, act: Callable[[], None]) -> None:
        """Do this before the next step."""
        self._acts.append(act)
        self._work.set()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do this before any other step; what is in flight is its to land (`drain`)."""
        future: Future[T] = Future()
        self._errands.append((work, future))
        self._work.set()
        return future

    def ping(self, answer: Callable[[], None]) -> None:
        self._pings.append(answer)
        self._work.set()

    def stop(self) -> None:
        self._over = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(ENDS_S)
        for _, future in self._errands:
            future.cancel()

    # -- in the thread

    def meets(self, sampling: Sampling) -> None:
        """A request is about to be computed: kernels may compile for it."""
        self._budget.meets(sampling)

    def planned(self, tokens: int, streams: int) -> None:
        """vLLM has planned a step, and computes it next."""
        plan = Step(tokens, range(streams))
        self._plans.append(plan)
        self.budget_ms = max(self.budget_ms, self._budget.of(plan))

    def drain(self) -> None:
        """Make the steps there are; what they tell is nobody's any more."""
        while self.has_work():
            self._step()

    def has_work(self) -> bool:
        core = self._core
        return core is not None and bool(core.scheduler.has_requests() or core.batch_queue)

    def step(self) -> list[Any]:
        """One step's outputs, of all streams; none, if vLLM only planned ahead."""
        return self._step()

    def _run(self) -> None:
        try:
            while True:
                self._work.clear()  # before the look at all that sets it: what comes later sets it again
                over = self._over  # before the acts: those told before the end are done
                while self._pings:
                    self._pings.popleft()()
                while self._acts:
                    self._acts.popleft()()
                if over:
                    return
                if self._errands:
                    self._run_errand()
                elif self._gathers and self.has_work():
                    self._gather()
                elif self.has_work():
                    self._serve_step()
                else:
                    self._work.wait()
        except (Exception, SystemExit) as error:  # the thread's root: whatever it was, no step can follow it
            self._failed(f"{type(error).__name__}: {error}")

    def _serve_step(self) -> None:
        outputs = self._step()
        if outputs and not self._deliver(outputs):
            time.sleep(CONGESTED_S)
        elif self._nothing_ran and not outputs:
            self._work.wait(ROOMLESS_S)

    def _gather(self) -> None:
        self._gathers = False
        end_s = time.perf_counter() + BURST_S_MAX
        while self._work.wait(BURST_S) and time.perf_counter() < end_s:
            self._work.clear()
            while self._acts:
                self._acts.popleft()()

    def _step(self) -> list[Any]:
        flights, began_s = len(self._plans), time.perf_counter()
        made, executed = self._core.step_fn()
        self._nothing_ran = not executed
        self._core.post_step(model_executed=executed)
        self.after_step()
        if made is None and len(self._plans) > flights:
            return []  # planned ahead, nothing landed
        if self._plans:
            self._landed(self._plans.popleft(), began_s)
        return [each for group in (made or {}).values() for each in group.outputs]

    def _landed(self, plan: Step, began_s: float) -> None:
        now_s = time.perf_counter()
        took_s = now_s - max(began_s, self._landed_s)
        self._landed_s = now_s
        self.recent_s = [*self.recent_s[1 - RECENT_STEPS :], took_s]
        self._budget.took(plan, took_s * 1000)
        self.steps += 1
        self.budget_ms = max((self._budget.of(each) for each in self._plans), default=0.0)

    def _run_errand(self) -> None:
        work, future = self._errands.popleft()
        if future.set_running_or_notify_cancel():
            self.budget_ms, began_s = ERRAND_MS_MAX, time.perf_counter()
            try:
                future.set_result(work())
            except (Exception, SystemExit) as error:  # whoever asked hears it
                future.set_exception(error)
            finally:
                self.budget_ms = self._budget.errand_took((time.perf_counter() - began_s) * 1000)
