"""How a chat's answer is shown: word by word within a margin, where a mark says that another engine went on from here.

Always true: on a terminal no line reaches its last column, so the cursor is where it is thought to be, and nothing a
model says can move it; elsewhere standard output has the text as it came and nothing else.
"""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Protocol

from holdfast.cli.chat.events import Ended
from holdfast.cli.terminal import Terminal, cells, write_out

MARK = "↻"
MARGIN = 2
WIDTH_MIN = 8  # no real terminal is as narrow; the words of one are broken
TAB = "    "
WAITING = "… no engine is up; waiting"
IN_LINE = "… every engine is full; place {} in line"

_RUNS = re.compile(r"\n|[ \t]+|[^ \t\n]+")
# Everything that moves a cursor or speaks to the terminal, but for line ends and tabs.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def visible(text: str) -> str:
    return _CONTROLS.sub("", text)


def pause_words(pause_s: float) -> str:
    return f"{pause_s * 1000:.0f} ms" if pause_s < 1 else f"{pause_s:.1f} s"


def notes(pauses_s: list[float], ended: Ended | None) -> list[str]:
    """What is said below an answer."""
    said = []
    if pauses_s:
        times = f" {len(pauses_s)} times" if len(pauses_s) > 1 else ""
        pauses = ", ".join(map(pause_words, pauses_s))
        note = f"{MARK} an engine died during this answer{times}; its standby continued after {pauses}"
        inexact = ended is not None and not ended.exact
        said.append(note + ("; the rest may differ from an uninterrupted answer" if inexact else ""))
    if ended is not None and ended.finish == "length":
        said.append("… the answer was cut off at its limit of tokens")
    return said


class View(Protocol):
    """One answer as it comes."""

    def said(self, text: str) -> None: ...

    def resumed(self, pause_s: float) -> None: ...

    def waiting(self, place: int = 0) -> None: ...

    def end(self, ended: Ended | None) -> None:
        """Nothing more comes; None: it was stopped or broke off."""


class PlainView:
    """The text as it came; what is about it goes to standard error."""

    def __init__(self, *, terminal: bool = False) -> None:
        self._terminal = terminal
        self._at_line_start = True
        self._waits = ""  # as it was told
        self._pauses_s: list[float] = []

    def said(self, text: str) -> None:
        self._waits = ""
        text = visible(text) if self._terminal else text
        self._at_line_start = text.endswith("\n") if text else self._at_line_start
        write_out(text)

    def resumed(self, pause_s: float) -> None:
        self._pauses_s.append(pause_s)

    def waiting(self, place: int = 0) -> None:
        words = _waiting(place)
        if self._waits != words:
            self._waits = words
            sys.stderr.write(f"{words}\n")

    def end(self, ended: Ended | None) -> None:
        if not self._at_line_start:
            write_out("\n")
        for note in notes(self._pauses_s, ended):
            sys.stderr.write(f"{note}\n")


class MarginView:
    """For a terminal that can move its cursor."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._width = max(WIDTH_MIN, terminal.width - MARGIN - 1)
        self._open = False  # the line has its margin
        self._column = 0  # cells used behind the margin
        self._word = ""  # the end of the line, as far as it may belong to a word that goes on
        self._wrapped = True  # this line begins none of the text's: white space before its first word is left out
        # Lines end when the next one has something in it, so the last line can still get a mark.
        self._breaks = 0
        self._full = False  # white space came that the line has no room for
        self._marked = False  # the next margin has the mark
        self._waits = ""  # as it was told
        self._pauses_s: list[float] = []

    def said(self, text: str) -> None:
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

    def resumed(self, pause_s: float) -> None:
        self._pauses_s.append(pause_s)
        self._marked = True

    def waiting(self, place: int = 0) -> None:
        """A note below the text, taken away again when the text goes on."""
        words = _waiting(place)
        if self._waits == words:
            return
        self._wait_over()
        self._waits = words
        self._write("\n" if self._open else "")
        self._write(self._terminal.styled(words[: self._width], "dim"))
        self._terminal.file.flush()

    def end(self, ended: Ended | None) -> None:
        self._wait_over()
        if self._marked and self._open:  # no next line came: then this one has the mark
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
            # The word turns out too long for this line: take back what is shown of it.
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


def view_for(terminal: Terminal) -> View:
    """What this output can show."""
    return MarginView(terminal) if terminal.can_move else PlainView(terminal=terminal.is_terminal)
