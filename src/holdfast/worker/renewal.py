"""Weights in doubt: they are compared with what was written, and loaded anew where they are not that.

A worker whose answers were wrong is quarantined with its weights. Where they are damaged, a fresh load under a larger
number brings it back. Where they are as they were written, the process or its device computes wrongly and no load would
help: control is told, acquits the weights and has the standby take over.

Always true: what is right is loaded anew only for who asks for that by name; one renewal is under way at a time, and
whoever asks meanwhile waits for the same one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from holdfast.core.errors import UserError
from holdfast.core.tasks import Tasks
from holdfast.engines.contract import Engine

log = logging.getLogger("holdfast.worker")

# A lever's answer comes within its bound (60 s), whether a load is over by then or not.
ANSWER_S = 50.0
RIGHT = (
    "the weights are as they were written: if its answers are wrong, its process or its device computes wrongly; "
    "restart the engine, and if the next process is wrong too, replace the device"
)


class Renewal:
    """`renew` has the engine's weights loaded anew, for the reason given, and returns when it serves again; `refusing`
    says why it cannot be asked for now."""

    def __init__(self, engine: Engine, renew: Callable[[str], Awaitable[None]], refusing: Callable[[], str]) -> None:
        self._engine = engine
        self.renew = renew
        self._refusing = refusing
        self._tasks = Tasks("renewal")
        self._under_way: asyncio.Task[str] | None = None

    @property
    def load(self) -> int:
        return self._engine.progress().load

    async def verify(self, load: int = 0) -> str:
        """Compare, and load anew if they differ; nothing if the load is above `load` already."""
        if load and self.load > load:
            return f"they were loaded anew before: load {self.load}"
        return await self._once(always=False)

    async def reload(self) -> str:
        """Load anew, right or wrong."""
        return await self._once(always=True)

    async def close(self) -> None:
        await self._tasks.stop()

    async def _once(self, *, always: bool) -> str:
        under_way = self._under_way
        if under_way is None or under_way.done():
            if why := self._refusing():
                raise UserError(f"{why}; weights are verified and loaded by the one of its group that serves")
            under_way = self._under_way = self._tasks.spawn(self._work(always=always), "renew")
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(under_way)
        except TimeoutError:
            return f"still under way after {ANSWER_S:g} s"

    async def _work(self, *, always: bool) -> str:
        wrong = await self._engine.verify()
        if not (wrong or always):
            log.warning("asked to verify: %s", RIGHT)
            return RIGHT
        why = f"the weights are damaged: {wrong}" if wrong else "asked to load the weights anew"
        log.warning("%s; loading them anew", why)
        before = self.load
        await self.renew(why)
        return f"{why}; loaded anew, load {before} -> {self.load}"
