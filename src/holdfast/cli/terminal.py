"""What a person looks at: how wide it is, whether it shows colours, and a last line that may change.

Always true: a reader that has gone (`up | tee`, and tee ended), or a terminal that was closed, silences it and does not
end the process: what is supervised must go on. Elsewhere than on a terminal there are neither colours nor moving lines.
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

PLAIN_WIDTH = 200  # where there is neither a terminal to fit nor $COLUMNS
FOLD_MIN = 10  # characters a folded column has on however narrow a screen
MOVING_ROWS_MAX = 8  # of a last line that is longer than the screen is wide
TURN_S = 0.1
GAP = "  "
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_NEW_EMOJI = range(0x1F900, 0x1FB00)  # wide, whether or not this Python's tables know them yet
_JOINED = re.compile("\u200d.|[\U0001f3fb-\U0001f3ff]")  # shown in one with what stands before it
_PICTURE = re.compile(".\ufe0f")  # a sign that is shown as a picture, which is wide
_WIDE = "\uff03"

_WROTE: list[str] = []  # the last that was written whole; nothing, if none was
_LOST: list[OSError] = []  # why what people were to see on standard output was not written; told at the exit

Cell = tuple[str, str]  # text and style


def write_out(text: str = "") -> None:
    """To standard output, whole: unlike a person, a program must not be left with a part. UserError says why that, or
    anything that was shown before, could not be written; BrokenPipeError that nobody reads it."""
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
    """A command begins, and has written nothing."""
    _WROTE.clear()


def has_written() -> bool:
    """Whether anything was for programs."""
    return bool(_WROTE)


def cells(text: str) -> int:
    """Columns that it takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(map(_cells_of, _PICTURE.sub(_WIDE, _JOINED.sub("", text))))


def _cells_of(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" or ord(char) in _NEW_EMOJI else 1


class Terminal:
    """Standard output, unless another file is given."""

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
        """Columns there are now."""
        return self._width or _width(self.file, self.is_terminal)

    @property
    def height(self) -> int:
        """Lines there are now."""
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(self.file.fileno()).lines or 24
        return 24

    @property
    def is_shown(self) -> bool:
        """Whether what was written last could be, and somebody may read more: a terminal may have been closed, and who
        reads a pipe may have left (`| head -1`), which else is found out with the next line only."""
        return self._shown and not _has_left(self.file)

    def raw(self, text: str) -> None:
        """As it is, for a screen that is drawn whole."""
        with self._lock:
            self._put(text)

    def styled(self, text: str, style: str) -> str:
        codes = ";".join(_CODES[word] for word in style.split())
        return f"\x1b[{codes}m{text}\x1b[0m" if codes and text and self.colour else text

    def line(self, text: str = "", style: str = "") -> None:
        """One that stays, above what moves; never wrapped by us."""
        with self._lock:
            self._put(f"{self._erased()}{self.styled(text, style)}\n" + "\n".join(self._moving))

    def move(self, text: str) -> None:
        """Change the last line."""
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
            _LOST[:] = lost  # what a full disk kept back is in the buffer: once it is written, nothing was lost

    @contextlib.contextmanager
    def turning(self, text: str) -> Iterator[Spinner]:
        """Text beside a sign that turns while the body runs. For a terminal that can move."""
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
        """Columns with two spaces between. Nothing is cut: the last column goes on in the next line; the last cell of a
        row that is shorter than the others runs over what is not there."""
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
    """A sign that turns, and what is said beside it."""

    def __init__(self, terminal: Terminal, text: str) -> None:
        self._terminal, self.text = terminal, text
        self.over = threading.Event()
        utf = (terminal.file.encoding or "").lower().startswith("utf")
        self._signs = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏" if utf else "-\\|/"

    def turn(self) -> None:
        """Until it is over."""
        turns = 0
        while not self.over.is_set():
            self._terminal.move(f"{self._signs[turns % len(self._signs)]} {self.text}")
            turns += 1
            self.over.wait(TURN_S)


def _has_left(file: TextIO) -> bool:
    """Whether nobody reads it any more; what cannot be asked has not."""
    with contextlib.suppress(OSError, ValueError):
        asked = select.poll()
        asked.register(file.fileno(), 0)
        return any(found & (select.POLLERR | select.POLLHUP) for _, found in asked.poll(0))
    return False


def _width(file: TextIO, is_terminal: bool) -> int:
    if is_terminal:
        with contextlib.suppress(OSError):  # the terminal of this file, which is not always standard output's
            return os.get_terminal_size(file.fileno()).columns or 80
    return shutil.get_terminal_size((80 if is_terminal else PLAIN_WIDTH, 0)).columns  # $COLUMNS, if that is set
