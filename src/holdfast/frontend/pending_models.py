"""Holds requests for models that have no worker set here yet: one queue per model, until its first worker has come.

Always true:
- A queue is bounded and keeps the first in line (`routing.tiers`). All queues together are bounded too, in requests and
  in bytes.
- No request waits longer than its limit, or for a model that is no longer wanted.
- A request that leaves is removed from its queue at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.core.errors import Code
from holdfast.frontend.api.errors import ApiError, of_failure, too_busy
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.notes import NOTE_S
from holdfast.frontend.request_tracker import TrackedRequest
from holdfast.routing.degradation import pushed_out
from holdfast.routing.tiers import TierQueue
from holdfast.spec.waits import HoldSettings
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import RequestState, WaitStatus, WorkerSet
from holdfast.streams.hold_policy import NO_WORKER_QUEUE_FULL, HoldPolicy, no_longer_wanted, no_worker
from holdfast.streams.stats import DispatchStats
from holdfast.wire.http.connection import HttpConnection

# Waiting requests of all models together: some 20 MiB of tasks and connections.
WAITING_MAX = 4096
# Their bodies, as `held_bytes` counts them: eight of the largest bodies that are text.
WAITING_BYTES_MAX = 256 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for its model."""

    tracked: TrackedRequest
    model: str
    connection: HttpConnection
    wanted: bool = False  # whether its model was wanted at the last look
    pushed: ApiError | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class PendingModels:
    """The requests that wait for a worker set."""

    directory: ModelDirectory
    settings: HoldSettings
    stats: DispatchStats
    clock: Callable[[], float]
    held_bytes: int = 0  # of all waiting requests
    on_starved: Callable[[], None] = lambda: None  # called when another request begins to wait
    _lines: dict[str, TierQueue[_Waiter]] = field(default_factory=dict)  # by model, none empty
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def wake_all(self) -> None:
        """Wake all waiters: a worker has come, other models are wanted, or the reason for waiting has changed."""
        for line in self._lines.values():
            for one in line:
                one.item.woken.set()

    async def wait(
        self,
        tracked: TrackedRequest,
        connection: HttpConnection,
        parsed: ParsedRequest,
        find: Callable[[ParsedRequest], WorkerSet | None],
    ) -> WorkerSet:
        """Return the set that `find` finds, at once or after a wait. Raise ApiError if the request may not wait
        (longer)."""
        if (workers := find(parsed)) is not None:
            return workers
        waiter = _Waiter(tracked, parsed.model, connection)
        tracked.waited = True
        if parsed.stream:
            tracked.wait_notes(connection)
        self._enter(waiter)
        try:
            while True:
                await self._look_up(waiter)
                if (workers := find(parsed)) is not None:
                    return workers
        finally:
            self._leave(waiter)

    async def _look_up(self, waiter: _Waiter) -> None:
        """Wait until the waiter is woken; raise ApiError if it may not wait any longer."""
        waiter.woken.clear()
        waiter.wanted, missing = self.directory.wants(waiter.model), self.directory.missing(waiter.model)
        if waiter.wanted and missing.unplaceable and not waiter.connection.streaming:
            raise no_first_worker(waiter.model, f"none can be started: {missing.why}")
        wait_s = HoldPolicy.first_worker_wait_s(self.settings, wanted=waiter.wanted, missing=missing)
        try:
            async with asyncio.timeout_at(waiter.tracked.began_s + wait_s):
                await waiter.woken.wait()
        except TimeoutError:
            why = f"{missing.why}; " if missing.why else ""
            raise no_first_worker(waiter.model, f"{why}none has come up within {wait_s:g} s") from None
        if waiter.pushed is not None:
            raise waiter.pushed
        if waiter.wanted and not self.directory.knows(waiter.model):
            raise of_failure(Code.MODEL_UNAVAILABLE, no_longer_wanted(waiter.model), "model")

    def _enter(self, waiter: _Waiter) -> None:
        if self._count >= WAITING_MAX or self.held_bytes + waiter.tracked.held_bytes > WAITING_BYTES_MAX:
            self._count_refused(Code.RESOURCE_EXHAUSTED)
            raise too_busy("too many requests wait for models without a worker", "lobby_full")
        line = self._lines.get(waiter.model)
        if line is None:
            line = self._lines[waiter.model] = TierQueue(self.settings.fresh_max, lambda one: one.connection.streaming)
        leaves = line.join(waiter, waiter.tracked.tier, waiter.tracked.began_s)
        if leaves is waiter:
            self._drop_if_empty(waiter.model)
            self._count_refused(Code.NO_WORKER)
            code, message, retry_after_s = no_worker(NO_WORKER_QUEUE_FULL, retry_after_s=self.settings.hold_s)
            raise of_failure(code, message, retry_after_s=retry_after_s)
        self._count += 1
        self.held_bytes += waiter.tracked.held_bytes
        self.on_starved()
        if leaves is not None:
            self._push_out(leaves)

    def _count_refused(self, code: Code) -> None:
        self.stats.refused[code] = self.stats.refused.get(code, 0) + 1

    def _push_out(self, waiter: _Waiter) -> None:
        tier = waiter.tracked.tier
        shed = pushed_out(tier, self.settings.shed_retry_s)
        self.stats.shed[tier.label, shed.reason] += 1
        waiter.pushed = of_failure(Code.PUSHED_OUT, shed.message, retry_after_s=shed.retry_after_s)
        waiter.woken.set()

    def _leave(self, waiter: _Waiter) -> None:
        self._count -= 1
        self.held_bytes -= waiter.tracked.held_bytes
        if (line := self._lines.get(waiter.model)) is not None:
            line.leave(waiter)
            self._drop_if_empty(waiter.model)

    def _drop_if_empty(self, model: str) -> None:
        if not len(self._lines[model]):
            del self._lines[model]

    # -- looking

    def waiting(self) -> Iterator[tuple[TrackedRequest, WaitStatus]]:
        """Yield all waiting requests, model by model."""
        for model in list(self._lines):
            for waiter, waiting in self._line(model):
                yield waiter.tracked, waiting

    def _line(self, model: str) -> Iterator[tuple[_Waiter, WaitStatus]]:
        wanted, why = self.directory.wants(model), self.directory.missing(model).why
        for place, one in enumerate(self._lines[model], 1):
            yield one.item, WaitStatus(RequestState.PROVISIONING, place, one.since_s, wanted, why)

    def demand(self) -> dict[str, tuple[int, float]]:
        """Return for each model how many requests wait, and since when the first of them does."""
        return {model: (len(line), min(one.since_s for one in line)) for model, line in self._lines.items()}

    async def remind(self) -> None:
        """Tell waiting clients their state and position every second, until cancelled."""
        while True:
            await asyncio.sleep(NOTE_S)
            now_s = self.clock()
            for model in list(self._lines):
                for waiter, waiting in self._line(model):
                    if waiter.tracked.notes is not None:
                        waiter.tracked.notes.tell(waiting, now_s)


def no_first_worker(model: str, why: str) -> ApiError:
    """Return the 503 for a known model without a worker: worth a retry, unlike a 404. For streams whose set has lost
    its workers see `streams.hold_policy`."""
    code, message, retry_after_s = no_worker(why, model=model)
    return of_failure(code, message, "model", retry_after_s)
