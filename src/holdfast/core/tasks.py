"""Tasks that run beside their owner. Everything that is started outside of an `asyncio.TaskGroup` is started here.

Always true: a task is referred to for as long as it runs (the event loop itself refers to it weakly only); one that
fails is logged under its owner's and its own name at once; one that is stopped is waited for, within a bound. Tasks are
made by the running loop, so whoever brings a loop of virtual time runs them on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

# A task that was cancelled revokes a lease, says goodbye or closes a file: the longest of these is bounded by 5 s. One
# that takes longer is stuck, and its owner's own end must not wait for it.
STOP_S = 15.0


def _to_nobody(error: BaseException) -> None:
    """The log has it; nobody else has to act on it."""


class Tasks:
    """What one owner runs beside itself. `failed` is called once for each task that ended by an error of its own."""

    def __init__(self, owner: str, failed: Callable[[BaseException], None] = _to_nobody) -> None:
        self._owner = owner
        self._failed = failed
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def __repr__(self) -> str:
        return f"{self._owner}: {', '.join(sorted(task.get_name() for task in self._running)) or 'nothing runs'}"

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """Cancel all that runs and wait for its end; new tasks may be started afterwards."""
        await stop(self._owner, self._running - {asyncio.current_task()})

    @contextlib.asynccontextmanager
    async def still(self, then: Callable[[], Coroutine[Any, Any, Any]], name: str) -> AsyncIterator[None]:
        """Nothing of it runs inside but what is started there; `then` does afterwards, however it ends."""
        await self.stop()
        try:
            yield
        finally:
            self.spawn(then(), name)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s failed", self._owner, task.get_name(), exc_info=error)
            self._failed(error)


async def stop(owner: str, tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them and wait for their end, but not for one that is stuck: the log names it."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        _, stuck = await asyncio.wait(running, timeout=STOP_S)
        for task in stuck:
            log.error("%s: %s did not end within %g s of being cancelled", owner, task.get_name(), STOP_S)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, T], name: str) -> AsyncIterator[asyncio.Task[T]]:
    """Run it beside the body, which looks at its result; what has not ended with the body is stopped."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        yield task
    finally:
        await stop("beside", (task,))


async def first(events: Iterable[Coroutine[Any, Any, Any]], futures: Iterable[asyncio.Future[Any]] = ()) -> None:
    """Wait until one of them is done; what was given as a coroutine is let go."""
    loop = asyncio.get_running_loop()
    waits = [loop.create_task(event) for event in events]
    try:
        await asyncio.wait([*waits, *futures], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def set_within(event: asyncio.Event, bound_s: float | None) -> None:
    """Returns when the event is set, or the time is over; None: it takes as long as it takes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(bound_s):
            await event.wait()


async def done_before(over: asyncio.Event, work: Coroutine[Any, Any, None], name: str) -> bool:
    """Whether it was done, or raised, before `over`; else it is cancelled and waited for."""
    async with beside(work, name) as task:
        await first((over.wait(),), (task,))
    if task.cancelled():
        return False
    task.result()
    return True
