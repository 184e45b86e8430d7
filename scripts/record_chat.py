"""Record a chat that survives a `kill -9` as an animated SVG: `python scripts/record_chat.py docs/chat.svg -- --exact`.

A deployment is started, `holdfast chat` runs on a pseudo-terminal, the engine that answers is killed in the middle, and
every state of every line is drawn with the time it was seen. Nothing is staged but the typing.
Needs pyte (a terminal emulator) beside what `make up` installs.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pyte

COLUMNS, ROWS, BELOW = 92, 18, 5
QUESTION = "Tell me a story about a lighthouse that never went dark."
START_S, WORDS_S, REST_S = 300.0, 60.0, 4.0
KILL_AFTER_CHARACTERS = 330
LETTER, LINE, MARGIN = 8.43, 19, 16
COLOURS = {"default": "#d7dde0", "brown": "#e5b567", "green": "#7fc98f", "red": "#e07a70"}  # as pyte calls them

Run = tuple[str, str, bool]  # text, colour, bold


@dataclass
class Film:
    """What each line of the screen was, and when."""

    began_s: float = field(default_factory=time.monotonic)
    lines: dict[int, list[tuple[float, tuple[Run, ...]]]] = field(default_factory=dict)

    def look(self, row: int, runs: tuple[Run, ...]) -> None:
        seen = self.lines.setdefault(row, [(0.0, ())])
        if seen[-1][1] != runs:
            seen.append((time.monotonic() - self.began_s, runs))


def runs_of(screen: pyte.Screen, row: int) -> tuple[Run, ...]:
    cells = [screen.buffer[row][column] for column in range(COLUMNS)]
    styled = [(cell.data, COLOURS.get(cell.fg, COLOURS["default"]), cell.bold) for cell in cells]
    runs = [("".join(cell[0] for cell in run), *style) for style, run in groupby(styled, key=lambda cell: cell[1:])]
    while runs and not runs[-1][0].strip():
        runs.pop()
    if runs:
        runs[-1] = (runs[-1][0].rstrip(), *runs[-1][1:])
    return tuple(runs)


class Terminal:
    """A program on a pseudo-terminal, its screen filmed."""

    def __init__(self, command: list[str], environment: dict[str, str], film: Film) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self._film = film
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            command, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)

    def text(self) -> str:
        return "\n".join(self.screen.display)

    def watch(self, enough: float, until: str = "", characters: int = 0) -> None:
        """Film for as long as that, or until the screen has the text, or so many characters."""
        end_s = time.monotonic() + enough
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([self.master], [], [], min(left_s, 0.02))[0]:
                try:
                    self._stream.feed(os.read(self.master, 65_536))
                except OSError:  # the program has ended
                    return
            for row in range(ROWS):
                self._film.look(row, runs_of(self.screen, row))
            if (until and until in self.text()) or (characters and len("".join(self.text().split())) > characters):
                return
        if until or characters:
            sys.exit(f"nothing of the kind came:\n{self.text()}")

    def type(self, words: str) -> None:
        for letter in words:
            os.write(self.master, letter.encode())
            self.watch(0.03)


def leader(holdfast: list[str], environment: dict[str, str]) -> int:
    told = subprocess.run([*holdfast, "ps", "--json"], env=environment, capture_output=True, text=True, check=True)
    return next(int(row["pid"]) for row in json.loads(told.stdout) if row["lifecycle"] == "active")


def svg(film: Film, length_s: float) -> str:
    """Every state of a line is a text of its own, shown from when it was seen until the next one was."""
    styles, texts = [], []
    for row, states in film.lines.items():
        for number, (begin_s, runs) in enumerate(states):
            if not runs:
                continue
            end_s = states[number + 1][0] if number + 1 < len(states) else length_s
            first, last = 100 * begin_s / length_s, 100 * end_s / length_s
            name = f"s{row}_{number}"
            gone = f"{last:.3f}%{{visibility:hidden}}" if last < 100 else ""
            styles.append(f"@keyframes {name}{{0%{{visibility:hidden}}{first:.3f}%{{visibility:visible}}{gone}}}")
            styles.append(f"#{name}{{animation:{name} {length_s:.2f}s step-end infinite}}")
            spans = "".join(
                f'<tspan fill="{colour}" font-weight="{700 if bold else 400}">{html.escape(text)}</tspan>'
                for text, colour, bold in runs
            )
            y = MARGIN + 24 + LINE * (row + 1)
            texts.append(f'<text id="{name}" x="{MARGIN}" y="{y}" visibility="hidden">{spans}</text>')
    width, height = round(2 * MARGIN + COLUMNS * LETTER), 2 * MARGIN + 28 + LINE * (ROWS + 1 + BELOW)
    lights = enumerate(COLOURS[name] for name in ("red", "brown", "green"))
    dots = "".join(f'<circle cx="{20 + 18 * place}" cy="18" r="5.5" fill="{colour}"/>' for place, colour in lights)
    middle = MARGIN + 24 + LINE * ROWS + 14
    rule = f'<path d="M0 {middle}H{width}" stroke="#3a474d"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14" xml:space="preserve">\n'
        "<title>A chat whose engine is killed in mid-answer goes on with the next word</title>\n"
        f"<style>text{{white-space:pre}}{''.join(styles)}</style>\n"
        f'<rect width="{width}" height="{height}" rx="10" fill="#1d2529"/>{dots}{rule}\n'
        + "\n".join([*texts, "</svg>\n"])
    )


def record(film: Film, state_dir: str, port: int, arguments: list[str]) -> None:
    holdfast = [sys.executable, "-m", "holdfast"]
    environment = {**os.environ, "HOLDFAST_STATE_DIR": state_dir, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    subprocess.run(
        [*holdfast, "up", "--detach", "--port", str(port), *arguments], env=environment, check=True, timeout=START_S
    )
    pid = leader(holdfast, environment)
    below = ROWS + 1  # the lines of another terminal, under the chat's
    try:
        chat = Terminal([*holdfast, "chat", "--temperature", "0", "--max-tokens", "150"], environment, film)
        chat.watch(WORDS_S, until="> ")
        film.began_s = time.monotonic()  # what came before is dull
        film.lines = {row: [(0.0, states[-1][1])] for row, states in film.lines.items()}
        chat.watch(0.6)
        chat.type(QUESTION + "\n")
        chat.watch(WORDS_S, characters=KILL_AFTER_CHARACTERS)
        film.look(below, (("$ ", COLOURS["green"], True), (f"kill -9 {pid}", COLOURS["default"], True)))
        os.kill(pid, signal.SIGKILL)
        chat.watch(WORDS_S, until="died under this answer")
        told = subprocess.run([*holdfast, "incidents"], env=environment, capture_output=True, text=True, check=True)
        film.look(below + 1, (("$ ", COLOURS["green"], True), ("holdfast get incidents", COLOURS["default"], True)))
        lines = told.stdout.splitlines()
        newest = max(number for number, line in enumerate(lines) if line[:1].strip())
        for number, line in enumerate(lines[newest : newest + BELOW - 2]):
            film.look(below + 2 + number, ((line[:COLUMNS], COLOURS["default"], False),))
        chat.watch(REST_S)
        chat.process.kill()
    finally:
        subprocess.run([*holdfast, "down"], env=environment, check=True, timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--port", type=int, default=8731)
    parser.add_argument("up", nargs="*", help="options of `holdfast up`, after --")
    given = parser.parse_args()
    film = Film()
    with tempfile.TemporaryDirectory() as state_dir:
        record(film, state_dir, given.port, given.up)
    given.out.write_text(svg(film, time.monotonic() - film.began_s))


if __name__ == "__main__":
    main()
