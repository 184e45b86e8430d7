"""The thread in which vLLM lives: it makes vLLM's engine, gives it requests, and makes its steps one after the other.

Always true: no other thread touches vLLM, except the blocks' bookkeeping under its lock. A step's outputs are handed
over before the next step begins.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.engines.host.step_thread import CONGESTED_S, StepThread

ROOMLESS_S = 0.001  # until the next try, if there was no room to plan a step
# A dead engine's streams are resumed in a burst, within a few milliseconds: a pause of this length ends the burst.
BURST_S, BURST_S_MAX = 0.002, 0.02


@dataclass(frozen=True, slots=True)
class Step:
    """One of vLLM's steps, as `StepBudget` reads it."""

    token_count: int
    segments: range


class VllmStepThread(StepThread):
    """The step thread of vLLM. It calls `deliver` with a step's outputs, in this thread; `deliver` must not block, and
    returns False to slow down."""

    def __init__(self, deliver: Callable[[list[Any]], bool], failed: Callable[[str], None]) -> None:
        super().__init__(failed)
        self._deliver = deliver
        self._core: Any = None  # vLLM's EngineCore
        self.after_step: Callable[[], None] = lambda: None
        self._gathers = False
        self._nothing_ran = False  # in the last step
        self._plans: deque[Step] = deque()  # of steps in flight

    def gather(self) -> None:
        """Before the next step, wait for all streams of a burst: a step for the first one alone would delay the
        others."""
        self._gathers = True

    # -- in the thread

    def serve(self, core: Any) -> None:
        """Make steps of this engine from now on (None: of no engine)."""
        self._core = core

    def planned(self, tokens: int, streams: int) -> None:
        """Note that vLLM has planned a step, and computes it next."""
        plan = Step(tokens, range(streams))
        self._plans.append(plan)
        self.budget_ms = max(self.budget_ms, self._budget.of(plan))

    def drain(self) -> None:
        """Make the remaining steps, and drop their outputs."""
        while self.has_work():
            self.step()

    def has_work(self) -> bool:
        core = self._core
        return core is not None and bool(core.scheduler.has_requests() or core.batch_queue)

    def step(self) -> list[Any]:
        """Return one step's outputs, of all streams; none, if vLLM only planned ahead."""
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

    def _prepare(self) -> None:
        return

    def _turn(self) -> bool:
        if self._errands:  # the errand waits for the steps in flight (`drain`)
            self._run_errand()
        elif not self.has_work():
            return False
        elif self._gathers:
            self._gather()
        else:
            outputs = self.step()
            if outputs and not self._deliver(outputs):
                time.sleep(CONGESTED_S)
            elif self._nothing_ran and not outputs:
                self._work.wait(ROOMLESS_S)
        return True

    def _gather(self) -> None:
        self._gathers = False
        end_s = time.perf_counter() + BURST_S_MAX
        while self._work.wait(BURST_S) and time.perf_counter() < end_s:
            self._work.clear()
            while self._acts:
                self._acts.popleft()()

    def _budget_in_flight_ms(self) -> float:
        return max((self._budget.of(each) for each in self._plans), default=0.0)
