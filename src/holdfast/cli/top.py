"""`holdfast top`: a live view of a deployment: who serves, with what standing, how fast, and what went wrong last.

Always true: it only looks, and needs neither control nor a supervisor; on a terminal it redraws one screen, which it
leaves as it found it, however it ends; elsewhere it prints one page.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from holdfast.cli.arguments import Asked, Json
from holdfast.cli.checks import readable
from holdfast.cli.failovers import cost, headline
from holdfast.cli.overview import FrontendSeen, Overview, WorkerSeen, overview
from holdfast.cli.ps import incidents_by_now, look_around
from holdfast.cli.screen import STATE_COLOURS, Screen, tilde
from holdfast.cli.terminal import Cell, Terminal, cells, write_out
from holdfast.settings import Environment, Looks
from holdfast.spec.settings import about

RATE_S = 0.5  # between the two looks of one page, from which rates come
# Another screen, without a cursor, on which what is too wide for it is cut and not wrapped; and back.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME, TO_LINE_END, TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
COLOURS = {
    "healthy": "green", "spare": "green", "suspicious": "yellow", "draining": "yellow", "unchecked": "yellow",
    "unhealthy": "red", "quarantined": "red", "dead": "red", "failed": "red", "open": "red", "half_open": "yellow",
}  # fmt: skip
# Titles of the workers' table; on a narrow screen those at the end of `SPARED` go first.
TITLES = ("worker", "state", "health", "weight", "breaker", "streams", "tokens/s", "canary")
SPARED = ("weight", "streams", "canary", "tokens/s", "state", "breaker")
RIGHT = ("weight", "streams", "tokens/s", "held", "resumed")


class Top(Asked, frozen=True):
    """`holdfast top`."""

    json: Json = False
    once: Annotated[bool, about("Show one page and exit.")] = False
    every: Annotated[float, about("Time between updates.", "s", min=0.2, max=60.0)] = 1.0

    def run(self, env: Environment) -> int:
        state_dir = readable(env.state_dir)
        terminal = Terminal()
        if not self.json and not self.once and terminal.can_move:
            asyncio.run(Live(state_dir, terminal, self.every).run())
            return 0
        found = asyncio.run(_twice(state_dir))
        if self.json:
            write_out(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
        else:
            show(Screen(terminal), state_dir, found)
        return 0


async def _twice(state_dir: Path) -> Overview:
    before = await glance(state_dir, None)
    if not before.workers:
        return before
    await asyncio.sleep(RATE_S)
    return await glance(state_dir, before)


async def glance(state_dir: Path, before: Overview | None) -> Overview:
    looked = await look_around(state_dir)
    incidents = incidents_by_now(state_dir, looked.statuses)
    return overview(looked, incidents, before=before, unix_s=time.time(), monotonic_s=time.monotonic())


# -- the live screen


class Live:
    """Redraws until somebody types q or Ctrl-C."""

    def __init__(self, state_dir: Path, terminal: Terminal, every_s: float) -> None:
        self._state_dir = state_dir
        self._terminal = terminal
        self._every_s = every_s
        self._over = asyncio.Event()
        self._found: Overview | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._over.set)
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        with keys() as keyboard:
            if keyboard is not None:
                loop.add_reader(keyboard, self._typed, keyboard)
            self._put(ENTER)
            try:
                while not self._over.is_set() and self._terminal.is_shown:
                    self._found = await glance(self._state_dir, self._found)
                    self._draw()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._over.wait(), self._every_s)
            finally:
                self._put(LEAVE)

    def _typed(self, keyboard: int) -> None:
        typed = b""
        with contextlib.suppress(OSError):  # the terminal is gone
            typed = os.read(keyboard, 64)
        if typed[:1].lower() in (b"q", b"\x04", b""):
            self._over.set()

    def _draw(self) -> None:
        """The whole screen in one write, each line over the one before it: nothing flickers."""
        if self._found is None:
            return
        width, height = self._terminal.width, self._terminal.height
        page = io.StringIO()
        sheet = Terminal(page, width, Looks(self._terminal.colour, dumb=False))
        show(Screen(sheet), self._state_dir, self._found, room=height - 1)
        lines = page.getvalue().splitlines()[: height - 1]
        lines.append(self._terminal.styled("q or Ctrl-C to quit", "dim"))
        self._put(HOME + "".join(f"{line}{TO_LINE_END}\r\n" for line in lines[:-1]) + f"{lines[-1]}{TO_SCREEN_END}")

    def _put(self, text: str) -> None:
        self._terminal.raw(text)


@contextlib.contextmanager
def keys() -> Iterator[int | None]:
    """The keyboard, read key by key and not shown; None where there is none."""
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, termios.error):
        yield None
        return
    tty.setcbreak(number, termios.TCSADRAIN)
    try:
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


# -- one page


def show(screen: Screen, state_dir: Path, found: Overview, room: int | None = None) -> None:
    """All of it; in so many lines, if that is given: incidents go first, then workers that are well."""
    fit = screen.terminal.width if room is not None else None
    screen.line(_clipped(_headline(state_dir, found), fit), style="bold")
    for text, style in _summary(found):
        screen.line(_clipped(text, fit), style=style)
    if not found.workers and not found.frontends:
        screen.line()
        screen.line(f"nothing runs in {tilde(state_dir)}; start with `holdfast up`")
        return
    notes = [f"  {worker.name}: {why}" for worker in found.workers if (why := worker.reason or worker.note)]
    notes += [f"  {words}" for words in found.others]
    fixed = 8 + len(found.frontends) + len(notes)
    screen.line()
    _workers(screen, found.workers, None if room is None else max(3, room - fixed))
    for note in notes:
        screen.line(_clipped(note, fit), style="yellow")
    screen.line()
    _frontends(screen, found.frontends)
    if found.incidents:
        screen.line()
        screen.line("last incidents", style="bold")
    for incident in reversed(found.incidents):
        at = time.strftime("%H:%M:%S", time.localtime(incident.unix_s))
        screen.line(_clipped("; ".join([f"{at}  {headline(incident)}", *cost(incident)]), fit))


def _headline(state_dir: Path, found: Overview) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(found.at_unix_s))
    return f"holdfast top  {at}  {tilde(state_dir)}"


def _summary(found: Overview) -> list[tuple[str, str]]:
    streams = sum(frontend.streams for frontend in found.frontends)
    held = sum(frontend.held or 0 for frontend in found.frontends)
    rate = f"{found.tokens_per_s:.0f}" if found.tokens_per_s is not None else "–"
    lines = [(f"streams {streams}   waiting {held}   tokens/s {rate}", "")]
    level = found.level.level if found.level is not None else 0
    words = [f"level {level}" if found.level is not None else "level –"]
    if found.capacity is not None:
        share = f"capacity {found.capacity.ratio:.0%} of the SLO: " if found.capacity.promised else ""
        words.append(share + found.capacity.words)
    lines.append(("   ".join(words), "red" if level > 1 else "yellow" if level else ""))
    if found.level is not None and level:
        lines.append((f"  {found.level.reason}", "yellow"))
    if not found.control:
        lines.append(("control: none runs here; level, health and weight are as last decided", "yellow"))
        return lines
    if found.control != "leads" or found.control_note:
        lines.append((f"control {found.control}: {found.control_note or 'another leads'}", "yellow"))
    return lines


def _workers(screen: Screen, workers: list[WorkerSeen], room: int | None) -> None:
    left = 0
    if room is not None and len(workers) > room:  # who is not well stands first
        workers = sorted(workers, key=lambda worker: worker.health == "healthy" and not worker.note)
        workers, left = workers[: room - 1], len(workers) - room + 1
    rows = [dict(zip(TITLES, _row(worker), strict=True)) for worker in workers]
    titles = _fitting(rows, screen.terminal.width)
    screen.terminal.table(titles, [[row[title] for title in titles] for row in rows], right=RIGHT)
    if left:
        screen.line(f"… and {left} more", style="dim")


def _fitting(rows: list[dict[str, Cell]], width: int) -> list[str]:
    """The titles of as many columns as there is room for."""
    titles = list(TITLES)
    wide = {title: max([len(title), *(cells(row[title][0]) for row in rows)]) for title in TITLES}
    for title in reversed(SPARED):
        if sum(wide[one] + 2 for one in titles) - 2 > width:
            titles.remove(title)
    return titles


def _row(worker: WorkerSeen) -> list[Cell]:
    asleep = worker.state in ("standby", "asleep", "waking", "starting")
    weight = "–" if worker.weight is None or asleep else f"{worker.weight:g}"
    age = _age(worker.canary_age_s)
    canary = (f"{age} {'ok' if worker.canary == 'passed' else worker.canary}", COLOURS.get(worker.canary, ""))
    return [
        (worker.name, ""),
        (worker.state or "elsewhere", STATE_COLOURS.get(worker.state, "yellow" if worker.state else "dim")),
        (worker.health or "–", COLOURS.get(worker.health, "")),
        (weight, "" if weight in ("1", "–") else "yellow"),
        (worker.breaker.replace("_", "-") or "–", COLOURS.get(worker.breaker, "")),
        ("–" if worker.streams is None else str(worker.streams), ""),
        ("–" if worker.tokens_per_s is None else f"{worker.tokens_per_s:.0f}", ""),
        canary if age else ("–", ""),
    ]


def _age(age_s: float | None) -> str:
    if age_s is None:
        return ""
    return f"{age_s:.0f} s" if age_s < 100 else f"{age_s / 60:.0f} min" if age_s < 6000 else f"{age_s / 3600:.0f} h"


def _frontends(screen: Screen, frontends: list[FrontendSeen]) -> None:
    rows: list[list[Cell]] = [
        [
            (one.name, ""),
            (one.state, STATE_COLOURS.get(one.state, "yellow")),
            (str(one.streams), ""),
            ("–" if one.held is None else str(one.held), "yellow" if one.held else ""),
            ("–" if one.resumed_total is None else str(one.resumed_total), ""),
            (one.address, ""),
        ]
        for one in frontends
    ]
    screen.terminal.table(("frontend", "state", "streams", "held", "resumed", "address"), rows, right=RIGHT)


def _clipped(text: str, width: int | None) -> str:
    """A line of a live screen never wraps."""
    if width is None or cells(text) <= width:
        return text
    while cells(text) > width - 1:
        text = text[:-1]
    return f"{text}…"
