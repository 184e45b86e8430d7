"""The thread in which an engine computes, and the event loop's side of it.

Always true:
- Steps and errands run in this thread, one after the other.
- An error ends the process, since nothing computed after it can be trusted.
- `budget_ms` is set before a step is computed and stays until the step's results are there. It is lowered only after
  `steps` has grown. So a reader that reads `budget_ms` before `steps` never pairs an old step with a new budget.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from holdfast.core.requests import Sampling
from holdfast.engines.contract import EngineEvents, Progress, p99_ms
from holdfast.engines.host.engine import HostedEngine
from holdfast.engines.paged.step_budget import ERRAND_MS_MAX, STEP_MS_MAX, PlannedStep, StepBudget
from holdfast.kv.pool import KvUse

RECENT_STEPS = 256  # enough for a p99 to mean a few steps
CONGESTED_S = 0.002  # a congested receiver drains a socket buffer in about this time
ENDS_S = STEP_MS_MAX / 1000
PINGS_MAX = 1024  # unanswered pings: a worker has at most one per connection, and at most 256 connections
# Short, so that the event loop runs while the step thread runs Python between two matrix products.
SWITCH_INTERVAL_S = 0.0005

T = TypeVar("T")


class StepThread(ABC):
    """A thread that makes an engine's steps. It calls `failed` with an error's text, in this thread; `failed` must not
    block."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._work = threading.Event()
        self._over = False
        self._acts: deque[Callable[[], None]] = deque()  # requests and cancels, in order of arrival
        self._errands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # canaries and the like: one or two
        self._pings: deque[Callable[[], None]] = deque(maxlen=PINGS_MAX)
        self.steps = 0
        self.budget_ms = 0.0  # for all steps in flight
        self._budget = StepBudget()
        self._landed_s = 0.0
        self.recent_s: list[float] = []
        # A daemon: a hung device must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def thread(self) -> int:
        return self._thread.native_id or 0

    def poke(self) -> None:
        self._work.set()

    def act(self, act: Callable[[], None]) -> None:
        """Call `act` before the next step."""
        self._acts.append(act)
        self.poke()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` (an errand) between two steps. Library handles and worker threads belong to the thread that
        computes first, so checks and warm-up must run here."""
        future: Future[T] = Future()
        self._errands.append((work, future))
        self.poke()
        return future

    def ping(self, answer: Callable[[], None]) -> None:
        """Call `answer` between two steps. Unlike an errand it delays nothing and does not wait for steps in flight."""
        self._pings.append(answer)
        self.poke()

    def stop(self) -> None:
        self._over = True
        self.poke()
        if self._thread.is_alive():
            self._thread.join(ENDS_S)
        for _, future in self._errands:
            future.cancel()

    # -- in the thread

    def note_request(self, sampling: Sampling) -> None:
        """Note a request that is about to run: kernels may compile for it."""
        self._budget.note_request(sampling)

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _turn(self) -> bool:
        """Make a step or run an errand; return False if there is nothing to do."""

    @abstractmethod
    def _budget_in_flight_ms(self) -> float: ...

    def _run(self) -> None:
        try:
            self._prepare()
            while True:
                self._work.clear()  # before the queues are read: later work sets it again
                over = self._over  # before the acts: acts queued before `stop` still run
                for calls in (self._pings, self._acts):
                    while calls:
                        calls.popleft()()
                if over:
                    return
                if not self._turn():
                    self._work.wait()
        except (Exception, SystemExit) as error:  # the thread's root: no step can follow any error
            self._failed(f"{type(error).__name__}: {error}")

    def _run_errand(self) -> None:
        work, future = self._errands.popleft()
        if future.set_running_or_notify_cancel():
            self.budget_ms, began_s = ERRAND_MS_MAX, time.perf_counter()
            try:
                future.set_result(work())
            except (Exception, SystemExit) as error:  # the caller gets it
                future.set_exception(error)
            finally:
                self.budget_ms = self._budget.errand_took((time.perf_counter() - began_s) * 1000)

    def _landed(self, plan: PlannedStep, began_s: float) -> None:
        now_s = time.perf_counter()
        took_s = now_s - max(began_s, self._landed_s)
        self._landed_s = now_s
        self.recent_s = [*self.recent_s[1 - RECENT_STEPS :], took_s]
        self._budget.took(plan, took_s * 1000)
        self.steps += 1
        self.budget_ms = self._budget_in_flight_ms()


class SteppedEngine(HostedEngine):
    """A hosted engine with a thread for its steps."""

    _stepper: StepThread
    _loop: asyncio.AbstractEventLoop | None = None  # from `load` to `stop`
    _events: EngineEvents

    async def load(self, events: EngineEvents) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop, self._events = asyncio.get_running_loop(), events
        self._stepper.start()

    def ping(self, answer: Callable[[], None]) -> None:
        self._stepper.ping(lambda: self._in_loop(answer))

    def room(self) -> None:
        self._stepper.poke()

    def _progress(self, running: int, waiting: int, kv: KvUse) -> Progress:
        stepper = self._stepper
        budget_ms = stepper.budget_ms  # before `steps`: see the module docstring
        return Progress(
            steps=stepper.steps,
            running=running,
            waiting=waiting,
            step_ms_p99=p99_ms(stepper.recent_s),
            budget_ms=budget_ms,
            thread=(os.getpid(), stepper.thread) if stepper.thread else None,
            kv=kv,
        )

    async def _in_step_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._stepper.run(work))

    # -- from the step thread

    def _in_loop(self, act: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(act)

    def _step_failed(self, why: str) -> None:
        self._events.fatal(f"a step failed: {why}")
