"""Child processes that carry out orders, side by side, each told and answered by one JSON line: both ends.

`Agent` is the parent's end and `obey` the child's. Always true: an order whose child died ends with `OrderFailed`; what
a child said before its end is heard before `kill` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Coroutine
from typing import Any

from holdfast.core.tasks import Tasks
from holdfast.testing.waiting import BOUND_S

LINE_BYTES_MAX = 1 << 20
NEWS = 0  # the number of a line that answers no order


class OrderFailed(Exception):
    """An order failed in the child; `kind` is the class of the error there."""

    def __init__(self, kind: str, text: str, code: str = "") -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.code = code


class Agent:
    """A child process, `python ARGUMENTS…`, that carries out orders. `under`: a command to run it with, such as
    `unshare --pid --fork`."""

    def __init__(self, *arguments: str, under: tuple[str, ...] = ()) -> None:
        self._command = (*under, sys.executable, *arguments)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(NEWS + 1)
        self._tasks = Tasks("agent")

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
        )
        self._listening = self._tasks.spawn(self._listen(), "listen")

    @property
    def pid(self) -> int:
        return self.process.pid

    def order(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        """Send an order; return the future of its answer."""
        assert self.process.stdin is not None
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps([number, name, arguments]).encode() + b"\n")
        return self._answers[number]

    async def do(self, name: str, **arguments: Any) -> Any:
        async with asyncio.timeout(BOUND_S):
            return await self.order(name, **arguments)

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            number, *words = json.loads(line)
            if number == NEWS:
                self.heard(*words)
            elif not (future := self._answers.pop(number)).done():
                result, error = words
                future.set_result(result) if error is None else future.set_exception(OrderFailed(*error))
        for future in self._answers.values():
            if not future.done():
                future.set_exception(OrderFailed("Died", "the process has ended"))
                future.exception()

    def heard(self, *words: Any) -> None:
        """Handle a line that answers no order. Subclasses override it."""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """Send SIGKILL; return when the child has ended and all its output was read."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.ended()

    async def ended(self) -> None:
        async with asyncio.timeout(BOUND_S):
            await self.process.wait()
            await self._listening


def say(*words: Any, out: int = 1) -> None:
    """Write one line to the parent in a single call, so that a kill never cuts it."""
    os.write(out, json.dumps(words).encode() + b"\n")


async def obey(agent: object, out: int = 1) -> None:
    """Carry out the orders on stdin, each by the agent's method of that name, until there are no more."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    orders = Tasks("orders")

    async def carry_out(number: int, name: str, arguments: dict[str, Any]) -> None:
        work: Coroutine[Any, Any, Any] = getattr(agent, name)(**arguments)
        try:
            say(number, await work, None, out=out)
        except Exception as failed:  # the root of an order: its giver is told
            say(number, None, [type(failed).__name__, str(failed), getattr(failed, "code", "")], out=out)

    while line := await reader.readline():
        orders.spawn(carry_out(*json.loads(line)), "order")
