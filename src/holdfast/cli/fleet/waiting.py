"""How a command ends that changed what is wanted of a model: with `--wait` when that is so, or will not be.

Always true: whoever leaves, by Ctrl-C or because the time is over, is told that it goes on, and where to look. What is
shown as JSON is how it was at the end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.cli.fleet.hope import Hope, Parting, how_far
from holdfast.cli.fleet.seen import Fleet
from holdfast.cli.fleet.words import model_shown
from holdfast.cli.screen import Busy, Screen
from holdfast.cli.status import show_json
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.errors import UserError
from holdfast.fleet.records import Wish

LOOK_S = 1.0  # between two looks, where the store tells of nothing


@dataclass(frozen=True, slots=True)
class Manner:
    """What somebody wants to see of it."""

    wait: bool
    timeout_s: float | None
    as_json: bool


async def end(fleet: Fleet, key: str, wish: Wish | None, told: str, manner: Manner) -> int:
    """`wish`: what is wanted now, None of one that was forgotten; `told`: what was done. The exit status."""
    await fleet.known(key, wish)
    if not manner.as_json:
        write_out(f"{told}\n")
    try:
        if manner.wait:
            screen = Screen(Terminal(sys.stderr) if manner.as_json else None)
            hope = Parting(key) if wish is None else Hope(wish, fleet.seen)
            await _until(fleet, key, hope, screen, manner.timeout_s)
    finally:
        if manner.as_json:
            show_json(model_shown(fleet.seen, key))
    return 0


async def all_in_place(fleet: Fleet, wishes: Sequence[Wish], timeout_s: float | None) -> None:
    """Each of several, one after the other, within one time for all. UserError, once all were waited for, says which
    are not, and why."""
    loop, wrong = asyncio.get_running_loop(), []
    until_s = None if timeout_s is None else loop.time() + timeout_s
    for wish in wishes:
        key, left_s = wish.model.key, None if until_s is None else max(0.001, until_s - loop.time())
        try:
            await fleet.known(key, wish)
            await _until(fleet, key, Hope(wish, fleet.seen), Screen(), left_s)
        except UserError as error:
            wrong.append(f"{key}: {error}".replace(f"{key}: {key}", key))
    if wrong:
        raise UserError("; ".join(wrong))


async def _until(fleet: Fleet, key: str, hope: Hope | Parting, screen: Screen, timeout_s: float | None) -> None:
    """UserError says why it will not be, or is not within the time."""
    goes_on = f"it continues in the background: `holdfast get models {key}` shows how far it is"
    try:
        with screen.busy(f"waiting for {key} …") as busy:
            async with asyncio.timeout(timeout_s):
                done = await _watched(fleet, key, hope, busy)
    except TimeoutError:
        raise UserError(f"timed out after {timeout_s:g} s; {goes_on}") from None
    except asyncio.CancelledError:
        screen.line(goes_on)
        raise
    screen.line(f"{key}: {done}")


async def _watched(fleet: Fleet, key: str, hope: Hope | Parting, busy: Busy) -> str:
    loop, book = asyncio.get_running_loop(), fleet.book
    while True:
        seen = fleet.seen
        away = "" if book.store.state == "connected" else f"{book.store!r} does not answer"
        if (done := hope.look(seen, loop.time(), away)) is not None:
            return done
        busy.show({key: how_far(seen, hope.wish) if isinstance(hope, Hope) else f"{len(seen.replicas(key))} left"})
        await book.news(LOOK_S)
