"""Shows a chat's answer word by word within a margin; a mark there shows where another engine continued.

Always true: on a terminal no line reaches the last column, so the cursor's position is known, and no text of a model
can move it. Elsewhere standard output has only the unchanged text.
"""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Protocol

from holdfast.cli.chat.server import AnswerEnd
from holdfast.cli.terminal import Terminal, cells, write_out

MARK = "↻"
MARGIN = 2
WIDTH_MIN = 8  # real terminals are wider; on a narrower one words are broken
TAB = "    "
WAITING = "… no engine is up; waiting"
IN_LINE = "… every engine is full; place {} in line"

_RUNS = re.compile(r"\n|[ \t]+|[^ \t\n]+")
# Everything that moves a cursor or controls the terminal, except line ends and tabs.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def visible(text: str) -> str:
    return _CONTROLS.sub("", text)


def notes(pauses_s: list[float], ended: AnswerEnd | None) -> list[str]:
    """Return the lines shown below an answer."""
    lines = []
    if pauses_s:
        times = f" {len(pauses_s)} times" if len(pauses_s) > 1 else ""
        pauses = ", ".join(f"{one * 1000:.0f} ms" if one < 1 else f"{one:.1f} s" for one in pauses_s)
        note = f"{MARK} this answer was interrupted{times}; it continued after {pauses}"
        inexact = ended is not None and not ended.exact
        lines.append(note + ("; the rest may differ from an uninterrupted answer" if inexact else ""))
    if ended is not None and ended.finish == "length":
        lines.append("… the answer was cut off at its limit of tokens")
    return lines


class AnswerView(Protocol):
    """Shows one answer as it arrives."""

    def add_text(self, text: str) -> None: ...

    def add_pause(self, pause_s: float) -> None: ...

    def show_waiting(self, place: int = 0) -> None: ...

    def end(self, ended: AnswerEnd | None) -> None:
        """Finish the answer; None: it was stopped or broke off."""


class PlainView:
    """Writes the text unchanged; notes go to standard error."""

    def __init__(self, *, terminal: bool = False) -> None:
        self._terminal = terminal
        self._at_line_start = True
        self._waits = ""  # the note that was shown last
        self._pauses_s: list[float] = []

    def add_text(self, text: str) -> None:
        self._waits = ""
        text = visible(text) if self._terminal else text
        self._at_line_start = text.endswith("\n") if text else self._at_line_start
        write_out(text)

    def add_pause(self, pause_s: float) -> None:
        self._pauses_s.append(pause_s)

    def show_waiting(self, place: int = 0) -> None:
        words = _waiting(place)
        if self._waits != words:
            self._waits = words
            sys.stderr.write(f"{words}\n")

    def end(self, ended: AnswerEnd | None) -> None:
        if not self._at_line_start:
            write_out("\n")
        for note in notes(self._pauses_s, ended):
            sys.stderr.write(f"{note}\n")


class MarginView:
    """Shows the text beside a margin, on a terminal that can move its cursor."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._width = max(WIDTH_MIN, terminal.width - MARGIN - 1)
        self._open = False  # the line's margin is written
        self._column = 0  # cells used after the margin
        self._word = ""  # last letters of the line: more of the same word may follow
        self._wrapped = True  # the line continues one of the text: white space before its first word is left out
        # A line ends only when the next one has text, so the last line can still get a mark.
        self._breaks = 0
        self._full = False  # the line has no room for the white space that came
        self._marked = False  # the next margin gets the mark
        self._waits = ""  # the note that was shown last
        self._pauses_s: list[float] = []

    def add_text(self, text: str) -> None:
        self._wait_over()
        for run in _RUNS.findall(visible(text)):
            if run == "\n":
                self._breaks += self._open
                self._full = False
            elif run[0] in " \t":
                self._space(run.replace("\t", TAB))
            else:
                self._break()
                self._letters(run)
        self._terminal.file.flush()

    def add_pause(self, pause_s: float) -> None:
        self._pauses_s.append(pause_s)
        self._marked = True

    def show_waiting(self, place: int = 0) -> None:
        """Show a note below the text; it is removed when the text continues."""
        words = _waiting(place)
        if self._waits == words:
            return
        self._wait_over()
        self._waits = words
        self._write("\n" if self._open else "")
        self._write(self._terminal.styled(words[: self._width], "dim"))
        self._terminal.file.flush()

    def end(self, ended: AnswerEnd | None) -> None:
        self._wait_over()
        if self._marked and self._open:  # no further line came, so this one gets the mark
            self._write("\r")
            self._mark()
            self._write(f"\x1b[{MARGIN - 1 + self._column}C" if self._column else "")
        self._write("\n" if self._open else "")
        for note in notes(self._pauses_s, ended):
            lines = textwrap.fill(note, self._width + MARGIN, subsequent_indent=" " * MARGIN)
            self._terminal.line(lines, "dim")

    # -- the cursor

    def _write(self, text: str) -> None:
        self._terminal.file.write(text)

    def _mark(self) -> None:
        self._marked = False
        self._write(self._terminal.styled(MARK, "bold yellow"))

    def _put(self, text: str) -> None:
        if not self._open:
            self._open = True
            if self._marked:
                self._mark()
                self._write(" " * (MARGIN - 1))
            else:
                self._write(" " * MARGIN)
        self._write(text)
        self._column += cells(text)

    def _next_line(self, *, wrapped: bool) -> None:
        self._write("\n")
        self._open, self._column, self._word, self._wrapped = False, 0, "", wrapped

    def _break(self) -> None:
        for _ in range(self._breaks):
            self._next_line(wrapped=False)
        if self._full:
            self._next_line(wrapped=True)
        self._breaks, self._full = 0, False

    def _space(self, run: str) -> None:
        if self._full:
            return
        self._break()
        self._word = ""
        if self._column + len(run) > self._width:
            self._full = True
        elif self._column or not self._wrapped:
            self._put(run)

    def _letters(self, run: str) -> None:
        width, word_width = cells(run), cells(self._word)
        if self._column + width > self._width and word_width + width <= self._width:
            # The word is too long for this line: erase its beginning and move it to the next line.
            word = self._word
            self._write(f"\x1b[{word_width}D\x1b[K" if word else "")
            self._next_line(wrapped=True)
            run = word + run
        elif self._column + width > self._width:
            for letter in run:
                if self._column + cells(letter) > self._width:
                    self._next_line(wrapped=True)
                self._put(letter)
                self._word += letter
            return
        self._put(run)
        self._word += run

    def _wait_over(self) -> None:
        if self._waits:
            self._waits = ""
            self._write("\r\x1b[K")
            if self._open:
                self._write(f"\x1b[1A\x1b[{MARGIN + self._column}C")


def _waiting(place: int) -> str:
    return IN_LINE.format(place) if place else WAITING


def view_for(terminal: Terminal) -> AnswerView:
    """Return the view that this output can show."""
    return MarginView(terminal) if terminal.can_move else PlainView(terminal=terminal.is_terminal)
