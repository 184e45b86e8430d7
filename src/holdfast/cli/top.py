"""`holdfast status`, and its live view `holdfast status --watch` (`holdfast top`), show which workers serve, their
health and speed, and the last incidents.

Always true:
- The command only reads, and needs neither control nor a supervisor.
- On a terminal the live view redraws one screen and restores the terminal when it ends, for whatever reason; elsewhere
  it prints one page.
- A figure that no process has reported is None or empty, never a guess. A rate is computed from two readings of the
  same process.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.checks import readable
from holdfast.cli.down import joined
from holdfast.cli.screen import STATE_COLOURS, Screen, tilde
from holdfast.cli.status import LocalState, cost, headline, incidents_by_now, look_around, show_json, show_processes
from holdfast.cli.terminal import Cell, Terminal, cells
from holdfast.core.tasks import done_within
from holdfast.health.status_page import CapacityShown, LevelShown, VerdictShown
from holdfast.settings import Environment, Looks
from holdfast.spec.arguments import UsageError
from holdfast.spec.settings import about
from holdfast.supervise.incidents import Incident
from holdfast.supervise.status import Status, count, web_address
from holdfast.supervise.verdicts import HEALTHY, rows_of, verdict_on, word

INCIDENTS = 5  # number of latest incidents shown
RATE_S = 0.5  # between the two readings from which a page's rates are computed
# Switch to the alternate screen, hide the cursor and cut long lines instead of wrapping them; and back.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME, TO_LINE_END, TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
COLOURS = {
    "healthy": "green", "spare": "green", "suspicious": "yellow", "draining": "yellow", "unchecked": "yellow",
    "unhealthy": "red", "quarantined": "red", "dead": "red", "failed": "red", "open": "red", "half_open": "yellow",
}  # fmt: skip
# Columns of the workers' table. On a narrow screen columns are dropped, the last of `SPARED` first.
TITLES = ("worker", "state", "health", "weight", "breaker", "streams", "tokens/s", "canary")
SPARED = ("weight", "streams", "canary", "tokens/s", "state", "breaker")
RIGHT = ("weight", "streams", "tokens/s", "held", "resumed")


class StatusCommand(CommandOptions, frozen=True):
    json: Json = False
    node: Annotated[str, about("Show only this node, which `holdfast node join` started here.")] = ""
    watch: Annotated[bool, about("Live view, until Ctrl-C.", short="-w")] = False

    def run(self, env: Environment) -> int:
        if self.watch and self.node:
            raise UsageError("--node does nothing with --watch; leave one of them out")
        if self.watch:
            return TopCommand(json=self.json).run(env)
        state_dir = readable(env.state_dir)
        if self.node:
            state_dir = joined(state_dir, self.node)
        looked = asyncio.run(look_around(state_dir))
        return show_json(looked.statuses) if self.json else show_processes(state_dir, looked)


class TopCommand(CommandOptions, frozen=True):
    json: Json = False
    once: Annotated[bool, about("Show one page and exit.")] = False
    every: Annotated[float, about("Time between updates.", "s", min=0.2, max=60.0)] = 1.0

    def run(self, env: Environment) -> int:
        state_dir = readable(env.state_dir)
        terminal = Terminal()
        if not self.json and not self.once and terminal.can_move:
            asyncio.run(Live(state_dir, terminal, self.every).run())
            return 0
        found = asyncio.run(_with_rates(state_dir))
        if self.json:
            return show_json(found)
        show(Screen(terminal), state_dir, found)
        return 0


async def _with_rates(state_dir: Path) -> Overview:
    before = await glance(state_dir, None)
    if not before.workers:
        return before
    await asyncio.sleep(RATE_S)
    return await glance(state_dir, before)


async def glance(state_dir: Path, before: Overview | None) -> Overview:
    looked = await look_around(state_dir)
    incidents = incidents_by_now(state_dir, looked.statuses)
    return overview(looked, incidents, before=before, unix_s=time.time(), monotonic_s=time.monotonic())


# -- what is known at one moment


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int = 0
    group: str = ""
    state: str = ""  # as in `holdfast status`; empty: it does not run here
    health: str = ""  # empty: control has no verdict
    weight: float | None = None
    reason: str = ""  # why it does not get all its traffic
    breaker: str = ""
    streams: int | None = None
    tokens_per_s: float | None = None
    tokens_total: int | None = None
    canary: str = ""  # result of the last one: passed, failed
    canary_age_s: float | None = None
    note: str = ""


class FrontendSeen(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str
    address: str
    streams: int = 0
    held: int | None = None  # streams that wait because no worker is there or free
    resumed_total: int | None = None
    store: str = ""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """All facts that are shown, at one moment."""

    at_unix_s: float
    monotonic_s: float
    control: str = ""  # leads, follows; empty: none runs
    control_note: str = ""
    level: LevelShown | None = None
    capacity: CapacityShown | None = None
    workers: list[WorkerRow] = []
    frontends: list[FrontendSeen] = []
    others: list[str] = []  # unhealthy processes of other roles
    incidents: list[Incident] = []

    @property
    def tokens_per_s(self) -> float | None:
        rates = [worker.tokens_per_s for worker in self.workers if worker.tokens_per_s is not None]
        return sum(rates) if rates else None


def overview(
    looked: LocalState, incidents: Sequence[Incident], *, before: Overview | None, unix_s: float, monotonic_s: float
) -> Overview:
    """Return what to show; `before`: the previous overview, for rates."""
    local = [status for status in looked.statuses if status.role == "worker"]
    counted = {(worker.name, worker.pid): worker.tokens_total for worker in before.workers} if before else {}
    passed_s = monotonic_s - before.monotonic_s if before else 0.0
    served = _streams(looked.pages)

    def seen(status: Status | None, verdict: VerdictShown | None) -> WorkerRow:
        page = looked.pages.get(status.name, {}) if status is not None else {}
        total = count(page.get("tokens_total"))
        last = counted.get((status.name, status.pid)) if status is not None else None
        rate = (total - last) / passed_s if total is not None and last is not None and passed_s > 0.0 else None
        return _worker(status, verdict, served, unix_s, total=total, rate=rate)

    elsewhere = [verdict for verdict in looked.verdicts if verdict.name not in {status.name for status in local}]
    control = looked.control
    return Overview(
        at_unix_s=unix_s,
        monotonic_s=monotonic_s,
        control="" if control is None else "leads" if control.leads else "follows",
        control_note="" if control is None else control.reason,
        level=looked.level,
        capacity=control.capacity if control is not None else None,
        workers=[seen(status, verdict_on(status.name, status.instance, looked.verdicts)) for status in local]
        + [seen(None, verdict) for verdict in elsewhere],
        frontends=[
            _frontend(status, looked.pages.get(status.name, {}))
            for status in looked.statuses
            if status.role == "frontend"
        ],
        others=_unwell(looked.statuses),
        incidents=list(incidents[-INCIDENTS:]),
    )


def _streams(pages: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """Return the streams of all frontends, by worker."""
    served: dict[str, int] = {}
    for page in pages.values():
        for row in rows_of(page):
            name, streams = row.get("name"), row.get("streams")
            if isinstance(name, str) and isinstance(streams, int):  # other values count as unknown
                served[name] = served.get(name, 0) + streams
    return served


def _worker(
    status: Status | None,
    verdict: VerdictShown | None,
    served: Mapping[str, int],
    unix_s: float,
    *,
    total: int | None,
    rate: float | None,
) -> WorkerRow:
    name = status.name if status is not None else verdict.worker if verdict is not None else ""
    asked_s = verdict.canary_unix_s if verdict is not None else 0.0
    failed = verdict is not None and verdict.canary_passed_unix_s < asked_s
    return WorkerRow(
        name=name,
        pid=status.pid if status is not None else 0,
        group=status.group if status is not None else verdict.group if verdict is not None else "",
        state=status.state if status is not None else "",
        health=word(verdict) if verdict is not None else "",
        weight=verdict.weight if verdict is not None else None,
        reason=verdict.reason if verdict is not None and verdict.status != HEALTHY else "",
        breaker=verdict.breaker if verdict is not None else "",
        streams=status.streams if status is not None else served.get(name),
        tokens_per_s=None if rate is None else round(max(0.0, rate), 1),
        tokens_total=total,
        canary="" if not asked_s else "failed" if failed else "passed",
        canary_age_s=round(max(0.0, unix_s - asked_s), 1) if asked_s else None,
        note=status.note if status is not None else "",
    )


def _frontend(status: Status, page: Mapping[str, Any]) -> FrontendSeen:
    return FrontendSeen(
        name=status.name,
        state=status.state,
        address=web_address(status.address) if status.address else "",
        streams=status.streams,
        held=count(page.get("held")),
        resumed_total=count(page.get("resumed_total")),
        store=str(page.get("store") or ""),
    )


def _unwell(statuses: Sequence[Status]) -> list[str]:
    """Return lines about unhealthy processes of other roles."""
    rest = [status for status in statuses if status.role not in ("worker", "frontend")]
    notes = [(status, ": ".join(filter(None, (status.state, status.note)))) for status in rest]
    return [f"{status.name}: {words}" for status, words in notes if status.state != "ready" or status.note]


# -- the live screen


class Live:
    """Redraws the screen until q or Ctrl-C is typed."""

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
            self._terminal.raw(ENTER)
            try:
                while not self._over.is_set() and self._terminal.is_shown:
                    self._found = await glance(self._state_dir, self._found)
                    self._draw()
                    await done_within(self._over.wait(), self._every_s)
            finally:
                self._terminal.raw(LEAVE)

    def _typed(self, keyboard: int) -> None:
        typed = b""
        with contextlib.suppress(OSError):  # the terminal is gone
            typed = os.read(keyboard, 64)
        if typed[:1].lower() in (b"q", b"\x04", b""):
            self._over.set()

    def _draw(self) -> None:
        """Draw the whole screen in one write, each line over the previous one, so that nothing flickers."""
        if self._found is None:
            return
        width, height = self._terminal.width, self._terminal.height
        page = io.StringIO()
        sheet = Terminal(page, width, Looks(self._terminal.colour, dumb=False))
        show(Screen(sheet), self._state_dir, self._found, room=height - 1)
        lines = page.getvalue().splitlines()[: height - 1]
        lines.append(self._terminal.styled("q or Ctrl-C to quit", "dim"))
        self._terminal.raw(
            HOME + "".join(f"{line}{TO_LINE_END}\r\n" for line in lines[:-1]) + f"{lines[-1]}{TO_SCREEN_END}"
        )


@contextlib.contextmanager
def keys() -> Iterator[int | None]:
    """Read the keyboard key by key, without echo; yield its file descriptor, or None if there is no keyboard."""
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
    """Show the overview. If it must fit into `room` lines, leave out incidents first, then healthy workers."""
    fit = screen.terminal.width if room is not None else None
    at = time.strftime("%H:%M:%S", time.localtime(found.at_unix_s))
    screen.line(_clipped(f"holdfast status  {at}  {tilde(state_dir)}", fit), style="bold")
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


def _workers(screen: Screen, workers: list[WorkerRow], room: int | None) -> None:
    left = 0
    if room is not None and len(workers) > room:  # unhealthy ones come first
        workers = sorted(workers, key=lambda worker: worker.health == "healthy" and not worker.note)
        workers, left = workers[: room - 1], len(workers) - room + 1
    rows = [dict(zip(TITLES, _row(worker), strict=True)) for worker in workers]
    titles = _fitting(rows, screen.terminal.width)
    screen.terminal.table(titles, [[row[title] for title in titles] for row in rows], right=RIGHT)
    if left:
        screen.line(f"… and {left} more", style="dim")


def _fitting(rows: list[dict[str, Cell]], width: int) -> list[str]:
    """Return the titles of as many columns as fit."""
    titles = list(TITLES)
    wide = {title: max([len(title), *(cells(row[title][0]) for row in rows)]) for title in TITLES}
    for title in reversed(SPARED):
        if sum(wide[one] + 2 for one in titles) - 2 > width:
            titles.remove(title)
    return titles


def _row(worker: WorkerRow) -> list[Cell]:
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
    """Return the line cut to the width, because lines of a live screen must not wrap."""
    if width is None or cells(text) <= width:
        return text
    while cells(text) > width - 1:
        text = text[:-1]
    return f"{text}…"
