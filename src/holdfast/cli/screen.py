"""What the commands show. On a terminal: colour, and a spinner while things start; elsewhere plain lines.

Always true: a command meant for copying is printed as it is, never wrapped or coloured inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.supervise.status import Status, web_address

_STATE_COLOURS = {"ready": "green", "dead": "red", "stopped": "red", "silent": "red", "backing off": "red"}


class Screen:
    """Standard output, for people."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)

    def line(self, text: str = "", style: str = "") -> None:
        # The terminal may be gone; what is supervised must not be.
        with contextlib.suppress(OSError):
            self._console.print(text, style=style, markup=False, soft_wrap=True)

    def event(self, text: str) -> None:
        """Something happened to a process."""
        bad = " died" in text or "cannot" in text or "did not" in text
        good = " ready" in text or " back as " in text or " adopted" in text
        with contextlib.suppress(OSError):
            colour = "red" if bad else "green" if good else "default"
            at = time.strftime("%H:%M:%S")
            self._console.print(f"[dim]{at}[/dim] [{colour}]{escape(text)}[/{colour}]", soft_wrap=True)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner while the body runs; a plain line where nobody watches."""
        if not self._console.is_terminal:
            self.line(text)
            yield
            return
        with self._console.status(text):
            yield

    def table(self, statuses: Sequence[Status]) -> None:
        """One line per process."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("role", "name", "pid", "state", "streams", "address"):
            table.add_column(title, justify="right" if title in ("pid", "streams") else "left", no_wrap=True)
        for status in statuses:
            table.add_row(*_row(status))
        with contextlib.suppress(OSError):
            self._console.print(table, crop=False, soft_wrap=False, width=None if self._console.is_terminal else 200)


def _row(status: Status) -> tuple[str, ...]:
    colour = _STATE_COLOURS.get(status.state, "yellow")
    state = f"[{colour}]{escape(status.state)}[/{colour}]"
    if status.note:
        state += f" [dim]{escape(status.note[:100])}[/dim]"
    streams = "" if status.role == "store" else str(status.streams)
    return status.role, status.name, str(status.pid or ""), state, streams, _address(status)


def _address(status: Status) -> str:
    if status.role == "frontend" and status.address:
        return web_address(status.address)
    return status.address.replace(f"unix://{os.path.expanduser('~')}/", "~/").removeprefix("unix://")


def tilde(path: Path) -> str:
    """A path under the home directory as a shell writes it."""
    with contextlib.suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def chat_command(url: str, model: str, api_key: str) -> str:
    """A `curl` that streams an answer long enough to kill a worker in the middle of it; for a narrow screen."""
    body = f'{{"model":{json.dumps(model)},"stream":true,"max_tokens":600,\n'
    body += '         "messages":[{"role":"user","content":"Tell me about the sea"}]}'
    lines = [f"curl -N {url}/v1/chat/completions", "    -H 'Content-Type: application/json'"]
    if api_key:
        lines.append(f"    -H {shlex.quote(f'Authorization: Bearer {api_key}')}")
    return " \\\n".join([*lines, f"    -d {shlex.quote(body)}"])


def show_up(screen: Screen, title: str, statuses: Sequence[Status], chat: str, state_dir: Path, detached: bool) -> None:
    """The one screen that says what runs, how to talk to it and how to break it."""
    screen.line()
    screen.line(title, style="bold")
    screen.line()
    screen.table(statuses)
    screen.line()
    if any(status.state != "ready" for status in statuses):
        screen.line("Not everything is ready yet; it goes on by itself; `holdfast ps` shows more.", style="yellow")
        screen.line()
    if chat:
        screen.line("Talk to it, from another terminal:", style="bold")
        screen.line(f"  {chat}")
    worker = next((status for status in statuses if status.role == "worker" and status.pid), None)
    if worker is not None:
        screen.line()
        screen.line("Kill a worker while it answers (`holdfast ps` shows which); the stream goes on:", style="bold")
        screen.line(f"  kill -9 {worker.pid}")
    screen.line()
    end = "`holdfast down` stops it" if detached else "Ctrl-C stops it"
    screen.line(f"Logs are in {tilde(state_dir / 'logs')}. `holdfast ps` shows what runs; {end}.")
