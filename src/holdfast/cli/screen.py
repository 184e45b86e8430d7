"""Writes the output of commands: on a terminal with colour, and a spinner during a start; elsewhere plain lines.

Always true: a command that the user may copy is printed unchanged, never wrapped or coloured inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.cli.terminal import Cell, Spinner, Terminal
from holdfast.roles.progress import Lines
from holdfast.supervise.engine_groups import EngineGroup, groups_of
from holdfast.supervise.status import Status, is_reachable, web_address

_GOOD = ("ready", "active", "standby", "asleep")
AT_LEISURE = {("control", "starting")}  # control starts last, and nothing waits for it
_BAD = ("dead", "stopped", "silent", "backing off", "crash loop", "refused", "unkillable", "unhealthy")
STATE_COLOURS = dict.fromkeys(_GOOD, "green") | dict.fromkeys(_BAD, "red")
_STREAMING = ("worker", "frontend")


class Busy:
    """Shows the current activity beside a spinner; without a terminal, one line per change."""

    def __init__(self, screen: Screen, spinner: Spinner | None = None) -> None:
        self._screen, self._spinner = screen, spinner
        self._began_s = time.monotonic()
        self._shown: dict[str, str] = {}

    def show(self, doing: Mapping[str, str]) -> None:
        """Show the current activity of each process."""
        if self._spinner is not None:
            words = " · ".join(f"{name}: {phase}" for name, phase in doing.items()) or "nearly there"
            self.say(f"{words} ({time.monotonic() - self._began_s:.0f} s)")
            return
        for name, phase in doing.items():
            if self._shown.get(name) != phase:
                self._shown[name] = phase
                self._screen.line(f"  {name}: {phase}")

    def say(self, text: str) -> None:
        """Show one text, on a terminal only."""
        if self._spinner is not None:
            self._spinner.text = text


class Screen:
    """Writes to standard output, for people."""

    def __init__(self, terminal: Terminal | None = None) -> None:
        self.terminal = terminal or Terminal()

    def line(self, text: str = "", style: str = "") -> None:
        self.terminal.line(text, style)

    def event(self, text: str) -> None:
        """Show an event of a process."""
        bad = any(word in text for word in (" died", "cannot", "did not", "killing", "impossible", "not ready"))
        good = " ready," in text or " back as " in text or " adopted" in text
        styled = self.terminal.styled
        at = styled(time.strftime("%H:%M:%S"), "dim")
        self.line(f"{at} {styled(text, 'red' if bad else 'green' if good else '')}")

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[Busy]:
        """Show a spinner while the body runs; without a terminal, plain lines."""
        if not self.terminal.can_move:
            self.line(text)
            yield Busy(self)
            return
        with self.terminal.turning(text) as spinner:
            yield Busy(self, spinner)

    def table(self, statuses: Sequence[Status]) -> None:
        """Show one line per process, then notes about unhealthy ones."""
        titles = ("name", "pid", "state", "streams", "address")
        self.terminal.table(titles, [_row(status) for status in statuses], right=("pid", "streams"))
        for status in statuses:
            if note := _note(status):
                self.line(f"  {status.name}: {note}", style="yellow")

    def steps(self, words: Sequence[str], indent: str, between: str = " · ") -> None:
        """Show words in a row; break lines only between them."""
        rows = [""]
        for word in words:
            longer = f"{rows[-1]}{between}{word}" if rows[-1] else word
            if rows[-1] and len(indent) + len(longer) > self.terminal.width:
                rows.append(word)
            else:
                rows[-1] = longer
        for row in filter(None, rows):
            self.line(f"{indent}{row}")


def _row(status: Status) -> list[Cell]:
    state = (status.state, STATE_COLOURS.get(status.state, "yellow"))
    streams = str(status.streams) if status.role in _STREAMING else ""
    # Our own process names contain the role; a user may have chosen another name.
    name = status.name if status.role in status.name else f"{status.name} ({status.role})"
    return [(name, ""), (str(status.pid or ""), ""), state, (streams, ""), (_address(status), "")]


def _note(status: Status) -> str:
    note = status.note
    if status.state == "crash loop" and status.retry_in_s is not None:
        note += f"; next try in {status.retry_in_s:.1f} s"
    verdict = ""
    if status.health not in ("", "healthy", "dead") and status.pid:
        why = f": {status.health_reason}" if status.health_reason else ""
        verdict = f"{status.health}, weight {status.weight:g}{why}"
    return "; ".join(filter(None, (note, verdict)))


def _address(status: Status) -> str:
    """Return the most useful address: a frontend's server, a worker's metrics, else the socket."""
    if status.role == "frontend" and status.address:
        return web_address(status.address, bound=True)
    if status.metrics:
        return status.metrics
    return status.address.replace(f"unix://{os.path.expanduser('~')}/", "~/").removeprefix("unix://")


def tilde(path: Path) -> str:
    """Return a path with ~ for the home directory."""
    with contextlib.suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def chat_command(url: str, model: str, api_key: str, *, private: bool) -> str:
    """Return a `curl` command, for a narrow screen, that streams an answer long enough to kill a worker during it.
    Without `private`, others may read the output, so the key is left out."""
    if api_key and not private:
        api_key = "YOUR_KEY"
    body = f'{{"model":{json.dumps(model)},"stream":true,"max_tokens":600,\n'
    body += '         "messages":[{"role":"user","content":"Tell me about the sea"}]}'
    lines = [f"curl -N {url}/v1/chat/completions", "    -H 'Content-Type: application/json'"]
    if api_key:
        lines.append(f"    -H {shlex.quote(f'Authorization: Bearer {api_key}')}")
    return " \\\n".join([*lines, f"    -d {shlex.quote(body)}"])


def open_warning(addresses: Iterable[str], api_keys: Sequence[str] = ()) -> str:
    """Return a warning if other machines can reach one of the addresses and no key is required; else ""."""
    reached = sorted({one for one in addresses if is_reachable(one)})
    if not reached or api_keys:
        return ""
    where = ", ".join(web_address(one, bound=True) for one in reached)
    return (
        f"No API key is needed at {where}: every client that reaches this machine can use it.\n"
        "Set keys with --api-key-file FILE or $HOLDFAST_API_KEYS, or listen on 127.0.0.1 (--host)."
    )


def show_up(
    screen: Screen,
    title: str,
    statuses: Sequence[Status],
    *,
    chat: str,
    state_dir: Path,
    detached: bool,
    note: str = "",
    warning: str = "",
    more: str = "",
) -> None:
    """Show what runs, how to use it (`chat`; "" without a frontend) and how to test a failure. `note`: what to expect
    of its model; `warning`: what is insecure."""
    screen.line()
    screen.line(title, style="bold")
    screen.line()
    screen.table(statuses)
    screen.line()
    groups = groups_of(statuses)
    for group in groups:
        screen.line(str(group))
    if groups:
        screen.line()
    awaited = [status for status in statuses if (status.role, status.state) not in AT_LEISURE]
    if any(status.state not in _GOOD for status in awaited):
        screen.line("Not everything is ready yet; it is still starting. `holdfast status` shows more.", style="yellow")
        screen.line()
    if warning:
        screen.line(warning, style="yellow")
        screen.line()
    if note:
        screen.line(note)
        screen.line()
    if chat:
        screen.line("Talk to it, from another terminal, with `holdfast chat` or:", style="bold")
        screen.line(f"  {chat}")
    _show_what_to_kill(screen, statuses, groups)
    screen.line()
    if more:
        screen.line(more)
    end = "`holdfast down` stops it" if detached else "Ctrl-C stops it"
    screen.line(f"Logs are in {tilde(state_dir / 'logs')}. `holdfast status` shows what runs; {end}.")


def _show_what_to_kill(screen: Screen, statuses: Sequence[Status], groups: Sequence[EngineGroup]) -> None:
    active = next((group.active for group in groups if group.active is not None), None)
    worker = active or next((status for status in statuses if status.role == "worker" and status.pid), None)
    if worker is None:
        return
    screen.line()
    if active is not None:
        screen.line("Kill the active engine while it answers; its standby goes on:", style="bold")
    else:
        screen.line("Kill a worker while it answers (`holdfast status` shows which); the stream goes on:", style="bold")
    screen.line(f"  kill -9 {worker.pid}")


# -- a progress bar on standard error; without a terminal one line per piece of work, or none

BAR_CELLS = 30
BAR_S = 0.1  # between updates of a bar


@contextlib.contextmanager
def works() -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield a function to call with the current piece of work, the bytes done and the total (None: unknown)."""
    terminal = Terminal(sys.stderr)
    if not terminal.can_move:
        yield Lines(Terminal().line)
        return
    bar = Bar(terminal)
    try:
        yield bar
    finally:
        terminal.move("")


class Bar:
    """Shows progress as a changing line: a bar, bytes, and their rate."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._work, self._began_s, self._shown_s = "", 0.0, 0.0

    def __call__(self, work: str, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if work != self._work:
            self._work, self._began_s, self._shown_s = work, now_s, 0.0
        if now_s - self._shown_s < BAR_S and done != total:
            return
        self._shown_s = now_s
        part = round(BAR_CELLS * done / total) if total else 0
        bar = f"[{'#' * part}{' ' * (BAR_CELLS - part)}] " if total else ""
        size = f"{done / 2**20:.1f}/{total / 2**20:.1f}" if total else f"{done / 2**20:.1f}"
        speed = f", {done / 2**20 / (now_s - self._began_s):.1f} MiB/s" if now_s > self._began_s else ""
        self._terminal.move(f"{work} {bar}{size} MiB{speed}")
