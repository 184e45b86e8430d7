"""What the commands show. On a terminal: colour, and a spinner while things start; elsewhere plain lines.

Always true: a command meant for copying is printed as it is, never wrapped or coloured inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.cli.terminal import Cell, Spinner, Terminal
from holdfast.supervise.standing import Group, groups_of
from holdfast.supervise.status import Status, is_reachable, web_address

_GOOD = ("ready", "active", "standby", "asleep")
AT_LEISURE = {("control", "starting")}  # it comes last, and nobody waits for it
_BAD = ("dead", "stopped", "silent", "backing off", "crash loop", "refused", "unkillable", "unhealthy")
STATE_COLOURS = dict.fromkeys(_GOOD, "green") | dict.fromkeys(_BAD, "red")
_STREAMING = ("worker", "frontend")


class Busy:
    """What is going on, beside a spinner; where nobody watches a line for each change."""

    def __init__(self, screen: Screen, spinner: Spinner | None = None) -> None:
        self._screen, self._spinner = screen, spinner
        self._began_s = time.monotonic()
        self._told: dict[str, str] = {}

    def show(self, doing: Mapping[str, str]) -> None:
        """Who does what now."""
        if self._spinner is not None:
            words = " · ".join(f"{name}: {phase}" for name, phase in doing.items()) or "nearly there"
            self.say(f"{words} ({time.monotonic() - self._began_s:.0f} s)")
            return
        for name, phase in doing.items():
            if self._told.get(name) != phase:
                self._told[name] = phase
                self._screen.line(f"  {name}: {phase}")

    def say(self, text: str) -> None:
        """Where somebody watches."""
        if self._spinner is not None:
            self._spinner.text = text


class Screen:
    """Standard output, for people."""

    def __init__(self, terminal: Terminal | None = None) -> None:
        self.terminal = terminal or Terminal()

    def line(self, text: str = "", style: str = "") -> None:
        self.terminal.line(text, style)

    def event(self, text: str) -> None:
        """Something happened to a process."""
        bad = any(word in text for word in (" died", "cannot", "did not", "killing", "impossible", "not ready"))
        good = " ready," in text or " back as " in text or " adopted" in text
        styled = self.terminal.styled
        at = styled(time.strftime("%H:%M:%S"), "dim")
        self.line(f"{at} {styled(text, 'red' if bad else 'green' if good else '')}")

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[Busy]:
        """A spinner while the body runs; plain lines where nobody watches."""
        if not self.terminal.can_move:
            self.line(text)
            yield Busy(self)
            return
        with self.terminal.turning(text) as spinner:
            yield Busy(self, spinner)

    def table(self, statuses: Sequence[Status]) -> None:
        """One line per process, then what is to be said of those that are not well."""
        titles = ("name", "pid", "state", "streams", "address")
        self.terminal.table(titles, [_row(status) for status in statuses], right=("pid", "streams"))
        for status in statuses:
            if note := _note(status):
                self.line(f"  {status.name}: {note}", style="yellow")

    def steps(self, words: Sequence[str], indent: str, between: str = " · ") -> None:
        """Words in a row, never broken in the middle of one."""
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
    # Names of ours have the role in them; a person may have chosen another.
    name = status.name if status.role in status.name else f"{status.name} ({status.role})"
    return [(name, ""), (str(status.pid or ""), ""), state, (streams, ""), (_address(status), "")]


def _note(status: Status) -> str:
    note = status.note
    if status.state == "crash loop" and status.retry_in_s is not None:
        note += f"; next try in {status.retry_in_s:.1f} s"
    return "; ".join(filter(None, (note, _standing(status))))


def _standing(status: Status) -> str:
    """What control holds against a worker, and the share of traffic that leaves it."""
    if status.health in ("", "healthy", "dead") or not status.pid:
        return ""
    why = f": {status.health_reason}" if status.health_reason else ""
    return f"{status.health}, weight {status.weight:g}{why}"


def _address(status: Status) -> str:
    """What a person can open: a frontend's server, a worker's metrics; of the others their socket."""
    if status.role == "frontend" and status.address:
        return web_address(status.address, bound=True)
    if status.metrics:
        return status.metrics
    return status.address.replace(f"unix://{os.path.expanduser('~')}/", "~/").removeprefix("unix://")


def tilde(path: Path) -> str:
    """A path under the home directory as a shell writes it."""
    with contextlib.suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def chat_command(url: str, model: str, api_key: str, *, private: bool) -> str:
    """A `curl` that streams an answer long enough to kill a worker in the middle of it; for a narrow screen. Not
    `private`: a pipe or a file may be read by others, so that the key is not in it."""
    if api_key and not private:
        api_key = "YOUR_KEY"
    body = f'{{"model":{json.dumps(model)},"stream":true,"max_tokens":600,\n'
    body += '         "messages":[{"role":"user","content":"Tell me about the sea"}]}'
    lines = [f"curl -N {url}/v1/chat/completions", "    -H 'Content-Type: application/json'"]
    if api_key:
        lines.append(f"    -H {shlex.quote(f'Authorization: Bearer {api_key}')}")
    return " \\\n".join([*lines, f"    -d {shlex.quote(body)}"])


def open_warning(addresses: Iterable[str], api_keys: Sequence[str]) -> str:
    """Return a warning for people, if one of the addresses can be reached from other machines and needs no key."""
    reached = sorted({one for one in addresses if is_reachable(one)})
    if not reached or api_keys:
        return ""
    where = ", ".join(web_address(one, bound=True) for one in reached)
    return (
        f"No API key is needed at {where}: everyone who reaches this machine can use it.\n"
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
    """The one screen that says what runs, how to talk to it (`chat`, "" where nobody listens) and how to break it.
    `note`: what to expect of its model; `warning`: what is not safe about it."""
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
        screen.line("Not everything is ready yet; it is still starting. `holdfast ps` shows more.", style="yellow")
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
    screen.line(f"Logs are in {tilde(state_dir / 'logs')}. `holdfast ps` shows what runs; {end}.")


def _show_what_to_kill(screen: Screen, statuses: Sequence[Status], groups: Sequence[Group]) -> None:
    active = next((group.active for group in groups if group.active is not None), None)
    worker = active or next((status for status in statuses if status.role == "worker" and status.pid), None)
    if worker is None:
        return
    screen.line()
    if active is not None:
        screen.line("Kill the active engine while it answers; its standby goes on:", style="bold")
    else:
        screen.line("Kill a worker while it answers (`holdfast ps` shows which); the stream goes on:", style="bold")
    screen.line(f"  kill -9 {worker.pid}")
