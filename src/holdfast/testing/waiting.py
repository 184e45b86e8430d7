"""Waiting for something to happen, with a bound and with words for when it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

BOUND_S = 60.0  # for anything that should be quick, on a machine that is not
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
    """Look again and again until something holds; seconds it took. TimeoutError with what was waited for and the `logs`
    once the bound has passed, or as soon as `ended` says why it never will."""
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
    """The same inside an event loop, whose other tasks go on; what was seen. `seen` may be a coroutine function."""
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
    """A call that waits, made beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)
