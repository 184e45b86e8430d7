"""Waiting for what was asked for: until it is there, or will not be; on the screen, how far it is.

Always true: whoever leaves, by Ctrl-C or because the time is over, is told that the rollout goes on, and where to look.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Annotated

from holdfast.cli.deployments.book import Book, Seen
from holdfast.cli.screen import Busy, Screen
from holdfast.core.errors import UserError
from holdfast.rollout.status import RolloutReport, RolloutResult
from holdfast.spec.arguments import UsageError
from holdfast.spec.settings import about

QUIET_S = 10.0
UNHEEDED_S = 30.0  # for a supervisor to take up what is asked for: it looks twice a second
STILL_S = 600.0  # without progress towards another number of replicas: as long as a revision has by default
LOOK_S = 1.0  # between two looks, where the store tells of nothing
_COUNTDOWN = re.compile(r"and watched for (up to )?\d+ s more")  # it would be a line a second where nobody watches

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smh])")
_KUBECTL = {"client": True, "server": True, "none": False}

DryRun = Annotated[bool, about("Show what would be done, without doing it.", flag="--dry-run", words=_KUBECTL)]
Wait = Annotated[bool, about("Wait until it is done; exit status 1 if it fails.", flag="--wait")]
Timeout = Annotated[str, about("Time limit for waiting, e.g. 90s or 10m (0: none).", flag="--timeout")]


def seconds(flag: str, text: str) -> float | None:
    """`90`, `90s`, `1m30s` or `2h`; None: no bound. UsageError, if it is none of these."""
    whole = text if text[-1:].isalpha() else f"{text}s"
    found = _TIME.findall(whole)
    if not found or "".join(map("".join, found)) != whole:
        raise UsageError(f"{flag} is a time such as 90s, 1m30s or 2h; got {text!r}")
    return sum(float(number) * _SECONDS[unit] for number, unit in found) or None


async def in_place(book: Book, seen: Seen, screen: Screen, timeout_s: float | None) -> int:
    """Until what is wanted is there: 0. UserError says why it will not be, or is not within the time."""
    name, number = seen.name, seen.wanted.revision
    loop = asyncio.get_running_loop()
    still = ("", loop.time())  # what was last told of a count that is not reached, and since when

    def over(now: Seen | None) -> str | None:
        if now is None or now.wanted.deleted:
            raise UserError(f"{name} was deleted")
        if now.wanted.revision != number:
            raise UserError(f"revision {number} of {name} is superseded by {now.wanted.revision}")
        report = now.report
        if report is None:
            return None
        if report.state in (RolloutResult.UNDONE, RolloutResult.STUCK) or report.is_unwell:
            raise UserError(f"{name}: {report.headline}")
        nonlocal still
        lacking = report.headline if report.state is RolloutResult.DONE and not report.is_done else ""
        still = still if still[0] == lacking else (lacking, loop.time())
        if lacking and loop.time() > still[1] + STILL_S:
            raise UserError(f"{name}: {lacking}")
        return report.headline if report.is_done else None

    return await _until(book, name, over, screen, timeout_s)


async def gone(book: Book, name: str, screen: Screen, timeout_s: float | None) -> int:
    """Until nothing of it is left: 0."""

    def over(now: Seen | None) -> str | None:
        if now is None:
            return "it is gone"
        if not now.wanted.deleted:
            raise UserError(f"{name} was applied again meanwhile")
        return None

    return await _until(book, name, over, screen, timeout_s)


async def _until(
    book: Book, name: str, over: Callable[[Seen | None], str | None], screen: Screen, timeout_s: float | None
) -> int:
    try:
        if (done := over(book.seen(name))) is None:
            with screen.busy(f"waiting for {name} …") as busy:
                async with asyncio.timeout(timeout_s):
                    done = await _watched(book, name, over, busy)
    except TimeoutError:
        raise UserError(f"timed out after {timeout_s:g} s; {_goes_on(name)}") from None
    except asyncio.CancelledError:
        screen.line(_goes_on(name))
        raise
    screen.line(f"{name}: {done}")
    return 0


async def _watched(book: Book, name: str, over: Callable[[Seen | None], str | None], busy: Busy) -> str:
    quiet = Quiet()
    while (done := over(now := book.seen(name))) is None:
        if now is not None and now.report is not None:
            busy.show({name: _left(now.report) if now.wanted.deleted else _how_far(now.report)})
        quiet.hear(book, now)
        await book.news(LOOK_S)
    return done


def _how_far(report: RolloutReport) -> str:
    return _COUNTDOWN.sub("and watched", report.headline)


def _left(report: RolloutReport) -> str:
    """Of one that is being deleted."""
    there = [f"{one.there} {one.name} left" for one in report.services if one.there]
    return "; ".join(["being deleted", *there, *(one.waits_for for one in report.services if one.waits_for)])


class Quiet:
    """How long nothing can be told: a store, or a supervisor, that is started again is back within seconds."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def hear(self, book: Book, now: Seen | None) -> None:
        """UserError, if it has been so for too long."""
        bound_s, why = _quiet(book, now)
        now_s = asyncio.get_running_loop().time()
        if not why:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s > self._since_s + bound_s:
            raise UserError(why)


def _quiet(book: Book, now: Seen | None) -> tuple[float, str]:
    """What nothing is told for, and how long that may be; "": something is."""
    if book.store.state != "connected":
        return QUIET_S, f"{book.store!r} does not answer"
    if now is None or now.unheard:
        return QUIET_S, now.unheard if now is not None else ""
    if now.report is None:
        return UNHEEDED_S, f"{now.name}: its supervisor ({now.supervisor}) does not react to the change; is it stopped?"
    return QUIET_S, ""


def _goes_on(name: str) -> str:
    return f"it continues in the background: `holdfast rollout status {name}` shows how far it is"
