"""Background tasks of an owner. All tasks outside of an `asyncio.TaskGroup` are started here.

Always true: a running task is referenced (the event loop has only a weak reference); a task that fails is logged at
once, with its owner's name and its own; stopping a task waits for its end, within a bound. The running loop creates the
tasks, so a loop with virtual time works too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

# A cancelled task may revoke a lease, close a connection or a file, each bounded by 5 s. A task that takes longer is
# stuck, and its owner's end must not wait for it.
STOP_S = 15.0


class Tasks:
    """The background tasks of one owner. `failed` is called once for each task that ended with an exception."""

    def __init__(self, owner: str, failed: Callable[[BaseException], None] | None = None) -> None:
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
        """Cancel all running tasks and wait for their end; new ones may be started afterwards."""
        await stop(self._owner, self._running - {asyncio.current_task()})

    @contextlib.asynccontextmanager
    async def still(self, then: Callable[[], Coroutine[Any, Any, Any]], name: str) -> AsyncIterator[None]:
        """Stop all tasks before the body, and start `then` after it, even if the body raises."""
        await self.stop()
        try:
            yield
        finally:
            self.spawn(then(), name)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s failed", self._owner, task.get_name(), exc_info=error)
            if self._failed is not None:
                self._failed(error)


async def stop(owner: str, tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait up to `STOP_S` for their end; log those that are stuck."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        _, stuck = await asyncio.wait(running, timeout=STOP_S)
        for task in stuck:
            log.error("%s: %s did not end within %g s of being cancelled", owner, task.get_name(), STOP_S)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, T], name: str) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` as a task during the body, which may read its result; stop it at the end of the body."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        yield task
    finally:
        await stop("beside", (task,))


async def first(events: Iterable[Coroutine[Any, Any, Any]], futures: Iterable[asyncio.Future[Any]] = ()) -> None:
    """Wait until one of them is done, then cancel the coroutines; the futures are left as they are."""
    loop = asyncio.get_running_loop()
    waits = [loop.create_task(event) for event in events]
    try:
        await asyncio.wait([*waits, *futures], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def done_within(work: Awaitable[Any], bound_s: float | None) -> bool:
    """Await `work` for at most `bound_s` (None: no bound); return False if it was cancelled at the bound."""
    try:
        async with asyncio.timeout(bound_s):
            await work
    except TimeoutError:
        return False
    return True


async def true_within(condition: Callable[[], object], bound_s: float, every_s: float) -> bool:
    """Check the condition every `every_s`; return True as soon as it holds, False if it does not within `bound_s`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + bound_s
    while not condition():
        if (left_s := deadline_s - loop.time()) <= 0:
            return False
        await asyncio.sleep(min(every_s, left_s))
    return True


async def done_before(over: asyncio.Event, work: Coroutine[Any, Any, None], name: str) -> bool:
    """Run `work` until it ends or `over` is set, then stop it; return whether it ended, and raise what it raised."""
    async with beside(work, name) as task:
        await first((over.wait(),), (task,))
    if task.cancelled():
        return False
    task.result()
    return True
