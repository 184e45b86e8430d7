"""Writes to the user's terminal: its width, its colours, and a last line that may change.

Always true: if the reader has left (`up | tee`, and tee ended) or the terminal was closed, output is discarded and the
process continues, because it may supervise others. Without a terminal there are no colours and no moving lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import sys
import textwrap
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TextIO

from holdfast.core.errors import UserError
from holdfast.settings import Looks, read_looks

PLAIN_WIDTH = 200  # without a terminal and $COLUMNS
FOLD_MIN = 10  # minimum width of a folded column on a narrow screen
MOVING_ROWS_MAX = 8  # maximum rows of the moving last line
TURN_S = 0.1
GAP = "  "
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_NEW_EMOJI = range(0x1F900, 0x1FB00)  # wide, even if this Python's tables lack them
_JOINED = re.compile("\u200d.|[\U0001f3fb-\U0001f3ff]")  # drawn as one with the character before
_PICTURE = re.compile(".\ufe0f")  # a character shown as a picture, which is wide
_WIDE = "\uff03"

_WROTE: list[str] = []  # the last text that was completely written; empty: none
_LOST: list[OSError] = []  # why text for people was not written to standard output; reported at the exit

Cell = tuple[str, str]  # text and style


def write_out(text: str = "") -> None:
    """Write all of the text to standard output: a program must not read only a part. Raise UserError if this text, or
    any before it, could not be written, and BrokenPipeError if the reader has left."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
        if _LOST:
            raise _LOST[0]
        if text:
            _WROTE[:] = [text]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"standard output cannot be written: {error.strerror}") from error


def write_begins() -> None:
    """Record that a command begins and has written nothing."""
    _WROTE.clear()


def has_written() -> bool:
    """Return True if anything was written for programs."""
    return bool(_WROTE)


def cells(text: str) -> int:
    """Return the number of terminal columns that the text takes."""
    if text.isascii():
        return len(text)
    count = 0
    for char in _PICTURE.sub(_WIDE, _JOINED.sub("", text)):
        if unicodedata.category(char) not in ("Mn", "Me", "Cf"):
            count += 2 if unicodedata.east_asian_width(char) in "WF" or ord(char) in _NEW_EMOJI else 1
    return count


class Terminal:
    """A terminal or other text file to write to; by default standard output."""

    def __init__(self, file: TextIO | None = None, width: int = 0, looks: Looks | None = None) -> None:
        self.file = file or sys.stdout
        self.is_terminal = self.file.isatty()
        looks = looks or read_looks()
        self.can_move = self.is_terminal and not looks.dumb
        self.colour = self.can_move if looks.colour is None else looks.colour
        self._width = width
        self._lock = threading.RLock()
        self._shown = True
        self._moving: list[str] = []  # rows of the last line, as they are shown

    @property
    def width(self) -> int:
        if self._width:
            return self._width
        if self.is_terminal:
            with contextlib.suppress(OSError):  # this file's terminal, which may not be standard output's
                return os.get_terminal_size(self.file.fileno()).columns or 80
        fallback = 80 if self.is_terminal else PLAIN_WIDTH
        return shutil.get_terminal_size((fallback, 0)).columns  # $COLUMNS if it is set

    @property
    def height(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(self.file.fileno()).lines or 24
        return 24

    @property
    def is_shown(self) -> bool:
        """Return True if the last output was written and its reader is still there. A closed terminal or pipe (`| head
        -1`) would otherwise be noticed only at the next line."""
        with contextlib.suppress(OSError, ValueError):  # a file that cannot be polled counts as read
            asked = select.poll()
            asked.register(self.file.fileno(), 0)
            has_left = any(found & (select.POLLERR | select.POLLHUP) for _, found in asked.poll(0))
            return self._shown and not has_left
        return self._shown

    def raw(self, text: str) -> None:
        """Write the text unchanged, for a caller that draws the whole screen."""
        with self._lock:
            self._put(text)

    def styled(self, text: str, style: str) -> str:
        codes = ";".join(_CODES[word] for word in style.split())
        return f"\x1b[{codes}m{text}\x1b[0m" if codes and text and self.colour else text

    def line(self, text: str = "", style: str = "") -> None:
        """Write a permanent line above the moving one; it is never wrapped here."""
        with self._lock:
            self._put(f"{self._erased()}{self.styled(text, style)}\n" + "\n".join(self._moving))

    def move(self, text: str) -> None:
        rows = textwrap.wrap(text, max(FOLD_MIN, self.width - 1), max_lines=MOVING_ROWS_MAX, placeholder=" …")
        with self._lock:
            erased, self._moving = self._erased(), rows
            self._put(erased + "\n".join(rows))

    def _erased(self) -> str:
        return "\r\x1b[K" + "\x1b[1A\x1b[K" * (len(self._moving) - 1) if self._moving else ""

    def _put(self, text: str) -> None:
        try:
            self.file.write(text)
            self.file.flush()
            lost: list[OSError] = []
        except OSError as error:
            lost = [error]
        self._shown = not lost
        if self.file is sys.stdout:
            _LOST[:] = lost  # after a full disk the text is still in the buffer: a later flush may write it

    @contextlib.contextmanager
    def turning(self, text: str) -> Iterator[Spinner]:
        """Show text beside a spinner while the body runs, on a terminal that can move its cursor."""
        spinner = Spinner(self, text)
        thread = threading.Thread(target=spinner.turn, daemon=True)
        thread.start()
        try:
            yield spinner
        finally:
            spinner.over.set()
            thread.join()
            self.move("")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[Cell]], right: Sequence[str] = ()) -> None:
        """Show columns separated by two spaces. Nothing is cut: the last column continues on the next line. In a
        shorter row the last cell extends over the missing ones."""
        head = [(title, "bold") for title in titles]
        whole = [row for row in (head, *rows) if len(row) == len(titles)]
        widths = [max(cells(row[at][0]) for row in whole) for at in range(len(titles))]
        room = max(FOLD_MIN, self.width - sum(widths[:-1]) - len(GAP) * (len(titles) - 1))
        for row in (head, *rows):
            *cut, (last, style) = row
            shown = [self._fitted(cell, widths[at], titles[at] in right) for at, cell in enumerate(cut)]
            if len(row) < len(titles) or titles[-1] in right:
                pieces = [last if len(row) < len(titles) else last.rjust(widths[-1])]
            else:
                pieces = [last[at : at + room] for at in range(0, len(last), room)] or [""]
            self.line(GAP.join([*shown, self.styled(pieces[0], style)]).rstrip())
            for piece in pieces[1:]:
                self.line(" " * (sum(widths[:-1]) + len(GAP) * len(cut)) + self.styled(piece, style))

    def _fitted(self, cell: Cell, width: int, right: bool) -> str:
        text, space = self.styled(*cell), " " * (width - cells(cell[0]))
        return space + text if right else text + space


class Spinner:
    def __init__(self, terminal: Terminal, text: str) -> None:
        self._terminal, self.text = terminal, text
        self.over = threading.Event()
        utf = (terminal.file.encoding or "").lower().startswith("utf")
        self._signs = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏" if utf else "-\\|/"

    def turn(self) -> None:
        turns = 0
        while not self.over.is_set():
            self._terminal.move(f"{self._signs[turns % len(self._signs)]} {self.text}")
            turns += 1
            self.over.wait(TURN_S)
