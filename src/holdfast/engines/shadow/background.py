"""Tasks that run beside an engine's work, stopped together; one that fails is told, never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Background:
    """`failed` is called once for each task that ended by an error of its own."""

    failed: Callable[[BaseException], None]
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task beside the engine failed", exc_info=error)
            self.failed(error)
