"""Waits for a condition, with a bound and an error that says what was waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

BOUND_S = 60.0  # for anything that is quick on an idle machine
LOOK_EVERY_S = 0.02


def _nothing() -> str:
    return ""


def wait_until(
    true: Callable[[], Any],
    what: str,
    bound_s: float = BOUND_S,
    *,
    every_s: float = LOOK_EVERY_S,
    ended: Callable[[], str] = _nothing,
    logs: Callable[[], str] = _nothing,
) -> float:
    """Poll until `true` holds and return the seconds it took. Raise TimeoutError with `what` and the `logs` after the
    bound, or as soon as `ended` returns a reason why it never will hold."""
    began_s = time.monotonic()
    while not true():
        why = ended() or (f"waited {bound_s:g} s" if time.monotonic() - began_s > bound_s else "")
        if why:
            raise TimeoutError(f"{why}: for {what}\n{logs()}".rstrip())
        time.sleep(every_s)
    return time.monotonic() - began_s


async def until(
    seen: Callable[[], Any], what: str, bound_s: float = BOUND_S, *, every_s: float = LOOK_EVERY_S / 2
) -> Any:
    """Poll inside an event loop until `seen` returns something true, and return that. `seen` may be a coroutine
    function."""
    deadline_s = asyncio.get_running_loop().time() + bound_s
    while True:
        found = seen()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        if asyncio.get_running_loop().time() > deadline_s:
            raise TimeoutError(f"waited {bound_s:g} s for {what}")
        await asyncio.sleep(every_s)


async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a blocking call in a thread, beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)
